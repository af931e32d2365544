# SPDX-License-Identifier: Apache-2.0
"""Installing, refusing, describing; masks, flow samples, cameras, inference and checkpoints of the packed π0.5."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from transformers.models.gemma import modeling_gemma

from embodix.attention.cpu import SegmentAuto, SegmentGemm
from embodix.packing.layout import PaddedPacker, PaddingFreePacker
from embodix.policies.installation import ALIGNED_ATTENTION
from embodix.policies.settings import FastPathSettings
from embodix_pi05.testing import (
    fast_actions,
    image_key,
    meta_pi05,
    random_batch,
    run_fast,
    small_pi05,
    upstream_actions,
    upstream_losses,
)
from embodix_pi05.wrapper import Pi05Wrapper


def settings_with(**choices):
    return FastPathSettings(PaddingFreePacker(), SegmentAuto(), **choices)


@cache
def policy_with(**config):
    return small_pi05(**config)


@pytest.fixture
def installed():
    """Install on a policy for the length of a test."""
    installations = []

    def install(policy, **choices):
        installations.append(Pi05Wrapper().install(policy, settings_with(**choices)))
        return installations[-1]

    yield install
    for installation in installations:
        installation.uninstall()


def test_install_touches_the_instance_only(installed):
    policy = policy_with()
    before = dict(policy.__dict__), list(policy.state_dict())
    installation = installed(policy)
    assert policy.forward.func.__self__ is installation.fast_path
    assert policy.config.type == "pi05"
    assert list(policy.state_dict()) == before[1]
    installation.uninstall()
    installation.uninstall()
    assert policy.__dict__ == before[0]


def test_the_description_names_every_choice(installed):
    installation = installed(policy_with(), action_pad="mask", flow_samples=3)
    assert installation.describe() == {
        "policy": "pi05",
        "packing": "padding_free",
        "attention": "segment_auto",
        "vision_tokens": "valid",
        "action_pad": "mask",
        "flow_samples": 3,
        "replaced": ["forward", "predict_action_chunk"],
        "gradient_checkpointing": "off",
    }


def test_tokens_and_images_are_counted(installed):
    policy = policy_with(empty_cameras=1)
    batch = random_batch(policy, [3, 12], camera_is_pad=[[False, True], [False, False]])
    batch["action_is_pad"][1, 4:] = True
    installation = installed(policy)
    assert installation.token_counts is None
    policy(batch)
    counts = installation.token_counts
    patches, chunk = 4, policy.config.chunk_size
    assert counts.valid == counts.computed == 3 * patches + 3 + 12 + 2 * chunk
    assert counts.upstream == 2 * (3 * patches + 12 + chunk)
    assert (counts.images_computed, counts.images_upstream) == (3, 6)
    assert (counts.action_valid, counts.action_total) == (2 * chunk - 2, 2 * chunk)
    assert counts.utilisation == 1


def test_another_policy_is_refused():
    with pytest.raises(ValueError, match=r"PI05Policy; got 'Linear'"):
        Pi05Wrapper().install(torch.nn.Linear(1, 1), settings_with())


def test_a_compiled_policy_is_refused(monkeypatch):
    policy = policy_with()
    monkeypatch.setattr(policy.config, "compile_model", True)
    with pytest.raises(ValueError, match="compile_model=false"):
        Pi05Wrapper().install(policy, settings_with())


def test_a_second_installation_is_refused(installed):
    installed(policy_with())
    with pytest.raises(ValueError, match="uninstall"):
        Pi05Wrapper().install(policy_with(), settings_with())


def test_a_host_version_out_of_range_is_refused(monkeypatch):
    monkeypatch.setattr(Pi05Wrapper, "supported", {"lerobot": ">=0.6"})
    with pytest.raises(ValueError, match=r"wanted lerobot>=0.6, found 0.5.1"):
        Pi05Wrapper().install(policy_with(), settings_with())


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"vision_tokens": "some"}, "upstream, valid; got 'some'"),
        ({"action_pad": "drop"}, "host, mask; got 'drop'"),
        ({"flow_samples": 0}, "got 0"),
    ],
)
def test_settings_refuse_unknown_choices(choice, message):
    with pytest.raises(ValueError, match=message):
        settings_with(**choice)


def test_reduction_none_gives_a_loss_a_sample(installed):
    policy, batch = policy_with(), random_batch(policy_with(), [2, 9, 5])
    torch.manual_seed(0)
    wanted, wanted_log = policy.forward(batch, reduction="none")
    installed(policy)
    torch.manual_seed(0)
    got, got_log = policy.forward(batch, reduction="none")
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0)
    assert got_log["loss"] == pytest.approx(wanted_log["loss"], rel=1e-6)
    assert got_log["loss_per_dim"] == pytest.approx(wanted_log["loss_per_dim"], rel=1e-5)


def test_flow_samples_share_a_prefix_and_equal_as_many_upstream_runs(installed):
    policy = policy_with(empty_cameras=1)
    batch = random_batch(policy, [2, 9], camera_is_pad=[[False, True], [False, False]])
    for attention in (None, SegmentGemm()):
        choice = FastPathSettings(PaddingFreePacker(), attention, flow_samples=3)
        installation = Pi05Wrapper().install(policy, choice)
        actions = policy.prepare_action(batch)
        noise, time = torch.randn(2, 3, *actions.shape[1:]), torch.rand(2, 3)
        got = installation.fast_path.losses(batch, actions, noise, time)
        installation.uninstall()
        for index in range(3):
            wanted = upstream_losses(policy, batch, noise[:, index], time[:, index])
            torch.testing.assert_close(got[:, index], wanted, rtol=1e-4, atol=1e-5)


def test_flow_samples_draw_noise_then_time_each(installed):
    policy, batch = policy_with(), random_batch(policy_with(), [2, 9])
    torch.manual_seed(3)
    wanted = torch.stack([upstream_losses(policy, batch)[..., :4].mean() for _ in range(2)]).mean()
    installed(policy, flow_samples=2)
    torch.manual_seed(3)
    loss, _ = policy(batch)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)


def padded_batch(policy, poison):
    batch = random_batch(policy, [2, 9])
    batch["action_is_pad"][0, 2:] = batch["action_is_pad"][1, 5:] = True
    batch["action"] = batch["action"].masked_fill(batch["action_is_pad"][..., None], poison)
    return batch


def test_masked_padding_changes_nothing_even_as_nan():
    policy = policy_with()
    clean, poisoned = (
        run_fast(policy, padded_batch(policy, poison), settings_with(action_pad="mask"))
        for poison in (0.0, float("nan"))
    )
    assert poisoned.loss == clean.loss
    for name, gradient in clean.gradients.items():
        assert gradient is None or torch.equal(gradient, poisoned.gradients[name]), name


def test_host_padding_is_trained():
    policy = policy_with()
    first, second = (run_fast(policy, padded_batch(policy, poison), settings_with()) for poison in (0.0, 3.0))
    assert first.loss != pytest.approx(second.loss, rel=1e-3)


def test_without_padding_the_mask_is_the_host_loss():
    policy, batch = policy_with(), random_batch(policy_with(), [2, 9])
    masked, host = (run_fast(policy, batch, settings_with(action_pad=pad)) for pad in ("mask", "host"))
    assert masked.loss == pytest.approx(host.loss, rel=1e-6)


def test_a_misspelt_padding_key_is_named(installed):
    policy, batch = policy_with(), random_batch(policy_with(), [2])
    batch["actions_is_pad"] = batch.pop("action_is_pad")
    installed(policy, action_pad="mask")
    with pytest.raises(ValueError, match=r"observation.state|Did you mean 'actions_is_pad'") as error:
        policy(batch)
    assert "action, actions_is_pad" in str(error.value)


def test_a_camera_that_neither_side_knows_prints_both_lists(installed):
    policy, batch = policy_with(), random_batch(policy_with(), [2])
    batch[image_key("grippr")] = batch.pop(image_key("gripper"))
    installed(policy)
    with pytest.raises(ValueError, match="nearest to") as error:
        policy(batch)
    assert "observation.images.front, observation.images.gripper" in str(error.value)
    assert "batch: observation.images.front, observation.images.grippr" in str(error.value)


def test_a_batch_without_cameras_prints_both_lists(installed):
    policy, batch = policy_with(), random_batch(policy_with(), [2], cameras=())
    installed(policy)
    with pytest.raises(ValueError, match="batch: none"):
        policy(batch)


def test_a_sample_without_any_camera_is_refused(installed):
    policy = policy_with()
    batch = random_batch(policy, [2, 3], camera_is_pad=[[False, False], [True, True]])
    installed(policy)
    with pytest.raises(ValueError, match=r"samples \[1\]"):
        policy(batch)


def test_camera_columns_must_fit(installed):
    policy = policy_with()
    batch = random_batch(policy, [2], camera_is_pad=[[False, False, True]])
    installed(policy)
    with pytest.raises(ValueError, match="one column a camera"):
        policy(batch)


@pytest.mark.parametrize("packer", [PaddedPacker(), PaddingFreePacker()])
@pytest.mark.parametrize("vision_tokens", ["upstream", "valid"])
def test_what_an_absent_camera_holds_changes_nothing(packer, vision_tokens):
    policy = policy_with()
    choice = FastPathSettings(packer, SegmentAuto(), vision_tokens)
    batch = random_batch(policy, [2, 4], camera_is_pad=[[False, True], [False, False]])
    clean = run_fast(policy, batch, choice)
    batch[image_key("gripper")][0] = 0.123
    batch["observation.language.tokens"][0, 2:] = 77
    noisy = run_fast(policy, batch, choice)
    assert noisy.loss == clean.loss
    batch[image_key("gripper")][1] = 0.123
    assert run_fast(policy, batch, choice).loss != clean.loss


def test_swapped_cameras_are_noticed():
    policy, batch = policy_with(), random_batch(policy_with(), [2, 4])
    before = run_fast(policy, batch, settings_with()).loss
    front, gripper = image_key("front"), image_key("gripper")
    batch[front], batch[gripper] = batch[gripper], batch[front]
    assert run_fast(policy, batch, settings_with()).loss != before


def test_select_action_serves_the_chunk_step_by_step(installed):
    policy, batch = policy_with(), random_batch(policy_with(), [2, 4])
    wanted = upstream_actions(policy, batch)
    installed(policy)
    policy.reset()
    torch.manual_seed(0)
    got = torch.stack([policy.select_action(batch) for _ in range(policy.config.n_action_steps)], dim=1)
    policy.train()
    torch.testing.assert_close(got, wanted[:, : policy.config.n_action_steps], rtol=0, atol=1e-5)


def test_number_of_steps_and_given_noise_are_honoured():
    policy, batch = policy_with(), random_batch(policy_with(), [2, 4])
    noise = torch.randn(2, policy.config.chunk_size, policy.config.max_action_dim)
    wanted = upstream_actions(policy, batch, noise=noise, num_steps=3)
    got = fast_actions(policy, batch, settings_with(), noise=noise, num_steps=3)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("left_over", [None, 4])
def test_real_time_chunking_goes_through_upstreams_processor(left_over):
    from lerobot.policies.rtc.configuration_rtc import RTCConfig

    policy = small_pi05(rtc_config=RTCConfig(enabled=True, execution_horizon=4, debug=True))
    batch = random_batch(policy, [2, 4])
    previous = None if left_over is None else torch.randn(2, left_over, policy.config.max_action_dim)
    chunking = {"prev_chunk_left_over": previous, "inference_delay": 1, "execution_horizon": 4}
    wanted = upstream_actions(policy, batch, **chunking)
    num_tracked = len(policy.rtc_processor.get_all_debug_steps())
    policy.rtc_processor.reset_tracker()
    got = fast_actions(policy, batch, settings_with(), **chunking)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    assert len(policy.rtc_processor.get_all_debug_steps()) == num_tracked > 0
    if previous is not None:
        unguided = fast_actions(policy, batch, settings_with(), **{**chunking, "prev_chunk_left_over": None})
        assert not torch.allclose(got, unguided, rtol=1e-3)


def test_a_copy_of_the_policy_computes_with_its_own_weights(installed):
    policy, batch = small_pi05(), random_batch(policy_with(), [2, 4])
    installed(policy)
    twin = copy.deepcopy(policy)
    with torch.no_grad():
        twin.model.action_out_proj.bias.add_(1.0)
    losses = []
    for model in (policy, twin):
        torch.manual_seed(0)
        losses.append(model(batch)[0].item())
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def test_quantised_or_adapted_linears_are_called(installed):
    """Whatever replaces a Linear's forward on the instance is used, not bypassed."""
    policy, batch = policy_with(), random_batch(policy_with(), [2])
    calls = []
    layer = policy.model.paligemma_with_expert.paligemma.model.language_model.layers[0]
    linears = [layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.down_proj]
    handles = [linear.register_forward_hook(lambda *_: calls.append(1)) for linear in linears]
    installed(policy)
    policy(batch)
    for handle in handles:
        handle.remove()
    assert len(calls) == len(linears)


def test_unaligned_vision_heads_are_padded_and_put_back():
    sizes = {"hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    from embodix_pi05.testing import SMALL_ARCHITECTURE

    policy = small_pi05({**SMALL_ARCHITECTURE, "vision": {**sizes, "patch_size": 14}})
    tower = policy.model.paligemma_with_expert.paligemma.model.vision_tower
    config = tower.vision_model.encoder.layers[0].self_attn.config
    image = torch.rand(2, 3, 28, 28)
    wanted = tower(image).last_hidden_state
    installation = Pi05Wrapper().install(policy, settings_with())
    assert config._attn_implementation == ALIGNED_ATTENTION
    torch.testing.assert_close(tower(image).last_hidden_state, wanted, rtol=1e-5, atol=1e-6)
    installation.uninstall()
    assert config._attn_implementation == "sdpa"


def test_the_real_size_runs_on_the_meta_device(monkeypatch):
    # The rotary module switches autocast off, and torch knows no autocast on the meta device.
    monkeypatch.setattr(modeling_gemma, "maybe_autocast", lambda **_: nullcontext())
    policy = meta_pi05(empty_cameras=1, dtype="bfloat16")
    num_parameters = sum(parameter.numel() for parameter in policy.parameters())
    assert num_parameters == pytest.approx(4.143e9, rel=1e-3)
    batch = {
        image_key("front"): torch.rand(2, 3, 224, 224),
        image_key("gripper"): torch.rand(2, 3, 224, 224),
        "observation.language.tokens": torch.ones(2, 200, dtype=torch.int64),
        "observation.language.attention_mask": torch.arange(200) < torch.tensor([[45], [65]]),
    }
    installation = Pi05Wrapper().install(policy, settings_with())
    actions = torch.empty(2, 50, 32, device="meta")
    losses = installation.fast_path.losses(batch, actions)
    assert losses.shape == (2, 1, 50, 32)
    losses.mean().backward()
    without = [name for name, parameter in policy.named_parameters() if parameter.grad is None]
    assert len(without) == 8
    counts = installation.token_counts
    assert counts.valid == counts.computed == 4 * 256 + 45 + 65 + 100
    assert counts.upstream == 2 * (3 * 256 + 200 + 50)
