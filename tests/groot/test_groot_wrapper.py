# SPDX-License-Identifier: Apache-2.0
"""Installing, refusing, describing; masks, flow samples, counts and inference of the packed GR00T."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3

from embodix.attention.cpu import SegmentAuto
from embodix.packing.layout import PaddingFreePacker
from embodix.policies.installation import ALIGNED_ATTENTION
from embodix.policies.settings import FastPathSettings
from embodix_groot.architecture import PUBLIC_ARCHITECTURE
from embodix_groot.fast_path import GrootFastPath
from embodix_groot.reference import padding_effect
from embodix_groot.testing import (
    SMALL_ARCHITECTURE,
    fast_actions,
    meta_groot,
    random_batch,
    reference_actions,
    run_reference,
    run_upstream,
    small_groot,
    strengthen,
)
from embodix_groot.wrapper import GrootN15Wrapper

NUM_PATCHES = 4
NUM_QUERIES = 1 + SMALL_ARCHITECTURE["action_head"]["num_future_tokens"] + 16


def settings_with(**choices):
    return FastPathSettings(PaddingFreePacker(), SegmentAuto(), **choices)


@cache
def policy_with(tune_llm=False, tune_visual=False):
    return strengthen(small_groot(tune_llm=tune_llm, tune_visual=tune_visual))


@pytest.fixture
def installed():
    """Install on a policy for the length of a test."""
    installations = []

    def install(policy, **choices):
        installations.append(GrootN15Wrapper().install(policy, settings_with(**choices)))
        return installations[-1]

    yield install
    for installation in installations:
        installation.uninstall()


def test_install_touches_the_instance_only(installed):
    policy = policy_with()
    before = dict(policy.__dict__), list(policy.state_dict())
    installation = installed(policy)
    assert policy.forward.func.__self__ is installation.fast_path
    assert policy.config.type == "groot"
    assert list(policy.state_dict()) == before[1]
    installation.uninstall()
    installation.uninstall()
    assert policy.__dict__ == before[0]


def test_the_description_names_every_choice(installed):
    installation = installed(policy_with(), action_pad="mask", flow_samples=3)
    assert installation.describe() == {
        "policy": "groot",
        "packing": "padding_free",
        "attention": "segment_auto",
        "vision_tokens": "valid",
        "action_pad": "mask",
        "flow_samples": 3,
        "replaced": ["forward", "predict_action_chunk"],
    }


def test_the_head_dimension_is_the_language_models():
    assert GrootN15Wrapper().head_dim(policy_with()) == SMALL_ARCHITECTURE["language"]["head_dim"]


def test_tokens_and_images_are_counted(installed):
    policy = policy_with()
    batch = random_batch(policy, [3, 12], [1, 2])
    batch["action_is_pad"] = torch.zeros(2, 14, dtype=torch.bool)
    batch["action_is_pad"][1, 10:] = True
    installation = installed(policy, flow_samples=2)
    assert installation.token_counts is None
    policy(batch)
    counts = installation.token_counts
    assert counts.valid == counts.computed == 3 * NUM_PATCHES + 3 + 12 + 2 * 2 * NUM_QUERIES
    assert counts.upstream == 2 * (2 * NUM_PATCHES + 12) + 2 * 2 * NUM_QUERIES
    assert (counts.images_computed, counts.images_upstream) == (3, 3)
    # The processor repeats the last action of a chunk of 14 up to 16 steps.
    assert (counts.action_valid, counts.action_total) == (2 * 16 - 2 - 6, 2 * 16)


def test_another_policy_is_refused():
    with pytest.raises(ValueError, match=r"GrootPolicy; got 'Linear'"):
        GrootN15Wrapper().install(torch.nn.Linear(1, 1), settings_with())


def test_a_second_installation_is_refused(installed):
    installed(policy_with())
    with pytest.raises(ValueError, match="uninstall"):
        GrootN15Wrapper().install(policy_with(), settings_with())


def test_a_host_version_out_of_range_is_refused(monkeypatch):
    monkeypatch.setattr(GrootN15Wrapper, "supported", {"lerobot": ">=0.6"})
    with pytest.raises(ValueError, match=r"wanted lerobot>=0.6, found 0.5.1"):
        GrootN15Wrapper().install(policy_with(), settings_with())


def another_tower(model):
    model.backbone.eagle_model.vision_model = torch.nn.Identity()


def fewer_layers(model):
    model.backbone.eagle_model.language_model.model.layers.pop(-1)


def sliding_windows(model):
    model.backbone.eagle_model.language_model.model.has_sliding_layers = True


def attention_dropout(model):
    model.backbone.eagle_model.language_model.config.attention_dropout = 0.1


def expanded_batch(model):
    model.action_head.config.expand_batch = 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_tower, "Qwen3ForCausalLM on Identity, not Qwen3 on SigLIP"),
        (fewer_layers, "select_layer is 3 and the language model has 2 layers"),
        (sliding_windows, "sliding-window"),
        (attention_dropout, "attention_dropout is 0.1 in a tuned language model"),
        (expanded_batch, "expand_batch is 2 .flow_samples"),
    ],
)
def test_a_model_that_the_packed_computation_does_not_cover_is_refused(change, message):
    policy = copy.deepcopy(policy_with(True, True))
    change(policy._groot_model)
    with pytest.raises(ValueError, match=message):
        GrootN15Wrapper().install(policy, settings_with())


def test_a_batch_that_upstream_would_pass_on_is_refused(installed):
    policy, batch = policy_with(), random_batch(policy_with(), [4], [1])
    installed(policy)
    with pytest.raises(ValueError, match="got eagle_image_flags too"):
        policy({**batch, "eagle_image_flags": torch.ones(1)})
    del batch["eagle_input_ids"]
    with pytest.raises(ValueError, match="needs the batch key 'eagle_input_ids'"):
        policy(batch)


def test_images_that_do_not_match_the_prompt_are_refused(installed):
    policy, batch = policy_with(), random_batch(policy_with(), [4, 5], [1, 2])
    installed(policy)
    with pytest.raises(ValueError, match="got 12 image tokens for 2 images of 4 patches"):
        policy({**batch, "eagle_pixel_values": batch["eagle_pixel_values"][:2]})


def test_reduction_none_gives_a_loss_a_sample(installed):
    policy, batch = policy_with(), random_batch(policy_with(), [2, 9, 5], [1, 2, 1])
    batch["action_mask"][1, :, 3] = False
    wanted = run_reference(policy, batch).loss
    installed(policy)
    torch.manual_seed(0)
    losses_B, _ = policy.forward(batch, reduction="none")
    counts_B = batch["action_mask"].sum(dim=(1, 2))
    assert losses_B.shape == (3,)
    assert float((losses_B * counts_B).sum() / counts_B.sum()) == pytest.approx(wanted, rel=1e-6)


def test_flow_samples_share_a_context_and_equal_as_many_upstream_runs(installed):
    policy = policy_with(True, True)
    batch = random_batch(policy, [6, 6], [2, 2])
    torch.manual_seed(3)
    runs = [run_upstream_continuing(policy, batch) for _ in range(3)]
    installed(policy, flow_samples=3)
    policy.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    loss, _ = policy(batch)
    loss.backward()
    assert loss.item() == pytest.approx(sum(loss for loss, _ in runs) / 3, rel=1e-6)
    name = "_groot_model.action_head.vlln.weight"
    wanted = sum(gradient for _, gradient in runs) / 3
    torch.testing.assert_close(dict(policy.named_parameters())[name].grad, wanted, rtol=1e-4, atol=1e-7)
    policy.zero_grad(set_to_none=True)


def run_upstream_continuing(policy, batch):
    """Upstream's loss and one gradient, going on in the random stream."""
    policy.zero_grad(set_to_none=True)
    loss, _ = type(policy).forward(policy, batch)
    loss.backward()
    return loss.item(), policy._groot_model.action_head.vlln.weight.grad.clone()


def test_masked_action_steps_are_left_out_of_the_loss(installed):
    policy = policy_with()
    batch = random_batch(policy, [4, 7], [1, 2])
    batch["action_is_pad"] = torch.zeros(2, 16, dtype=torch.bool)
    batch["action_is_pad"][0, 9:] = True
    batch["action"][0, 9:] = batch["action"][0, 8]
    masked = {**batch, "action_mask": batch["action_mask"] & ~batch["action_is_pad"][..., None]}
    wanted = run_reference(policy, masked)
    installed(policy, action_pad="mask")
    torch.manual_seed(0)
    assert policy(batch)[0].item() == pytest.approx(wanted.loss, rel=1e-6)
    batch["action"][0, 9:] = float("nan")
    torch.manual_seed(0)
    assert policy(batch)[0].item() == pytest.approx(wanted.loss, rel=1e-6)
    del batch["action_is_pad"]
    with pytest.raises(ValueError, match="action_pad=mask needs the batch key 'action_is_pad'"):
        policy(batch)


def test_the_count_over_ranks_divides_the_loss(installed):
    policy, batch = policy_with(), random_batch(policy_with(), [4, 7], [1, 2])
    wanted = run_reference(policy, batch).loss
    installed(policy, reduce_count=lambda count: count * 2)
    torch.manual_seed(0)
    assert policy(batch)[0].item() == pytest.approx(wanted / 2, rel=1e-6)


def test_actions_are_drawn_as_upstream_draws_them_and_queued_by_it(installed):
    policy = copy.deepcopy(policy_with())
    batch = random_batch(policy, [6, 6], [2, 2])
    torch.manual_seed(5)
    wanted = policy.predict_action_chunk(batch)
    torch.manual_seed(5)
    wanted_first = policy.select_action(batch)
    policy.reset()
    installed(policy)
    torch.manual_seed(5)
    torch.testing.assert_close(policy.predict_action_chunk(batch), wanted, rtol=0, atol=1e-5)
    torch.manual_seed(5)
    torch.testing.assert_close(policy.select_action(batch), wanted_first, rtol=0, atol=1e-5)


def test_sampling_computes_the_context_once_whatever_the_number_of_steps(installed):
    policy = copy.deepcopy(policy_with())
    batch = random_batch(policy, [3, 8], [1, 2])
    head, calls = policy._groot_model.action_head, []
    layers = policy._groot_model.backbone.eagle_model.language_model.model.layers
    for module in (layers[0].self_attn.q_proj, head.model.transformer_blocks[0].attn1.to_k):
        module.register_forward_hook(lambda *_: calls.append(1))
    for num_steps in (1, 7):
        head.num_inference_timesteps = num_steps
        noise = torch.randn(batch["action"].shape)
        calls.clear()
        got = fast_actions(policy, batch, settings_with(), noise)
        assert len(calls) == 2
        torch.testing.assert_close(got, reference_actions(policy, batch, noise), rtol=0, atol=1e-5)


def saved_bytes(run):
    """Bytes that autograd keeps for the backward pass of a run, parameters included."""
    sizes = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(sizes.values())


def test_a_frozen_backbone_keeps_nothing_for_a_backward_pass():
    kept = {}
    for tuned in (False, True):
        policy = policy_with(tuned, tuned)
        batch = random_batch(policy, [30, 40], [3, 3])
        installation = GrootN15Wrapper().install(policy, settings_with())
        backbone = policy._groot_model.backbone
        features = []
        handle = policy._groot_model.action_head.vlln.register_forward_pre_hook(
            lambda _, inputs, features=features: features.append(inputs[0])
        )
        kept[tuned] = saved_bytes(lambda policy=policy, batch=batch: policy(batch))
        handle.remove()
        installation.uninstall()
        assert features[0].requires_grad == tuned
        assert backbone.eagle_model.vision_model.training == tuned
    assert kept[True] > 1.5 * kept[False]


def test_padding_changes_upstreams_loss_and_the_effect_says_by_how_much():
    policy = policy_with()
    padded, even = random_batch(policy, [2, 12, 5], [1, 3, 2]), random_batch(policy, [6, 6], [2, 2])
    effect = padding_effect(policy, padded)
    assert effect.valid == pytest.approx(run_reference(policy, padded).loss, rel=1e-6)
    assert effect.upstream == pytest.approx(run_upstream(policy, padded).loss, rel=1e-6)
    assert effect.relative > 1e-5
    assert (effect.num_tokens, effect.num_padding) == (6 * NUM_PATCHES + 19, 3 * (3 * NUM_PATCHES + 12) - 43)
    assert padding_effect(policy, even).relative < 1e-6
    assert padding_effect(policy, even).num_padding == 0


def test_the_effect_of_padding_leaves_policy_and_random_stream_as_they_were():
    policy = strengthen(small_groot({**SMALL_ARCHITECTURE, "dropout": 0.3}))
    training = {name: module.training for name, module in policy.named_modules()}
    state = torch.get_rng_state()
    even = random_batch(policy, [6, 6], [2, 2])
    assert padding_effect(policy, even).relative < 1e-6
    assert {name: module.training for name, module in policy.named_modules()} == training
    assert torch.equal(torch.get_rng_state(), state)


def test_unaligned_vision_heads_are_padded_and_put_back():
    sizes = {**SMALL_ARCHITECTURE["vision"], "hidden_size": 36}
    policy = small_groot({**SMALL_ARCHITECTURE, "vision": sizes})
    config = policy._groot_model.backbone.eagle_model.vision_model.vision_model.encoder.layers[0].self_attn.config
    installation = GrootN15Wrapper().install(policy, settings_with())
    assert config._attn_implementation == ALIGNED_ATTENTION
    installation.uninstall()
    assert config._attn_implementation == "sdpa"


def test_checkpoints_are_plain_upstream(installed, tmp_path):
    policy = policy_with()
    plain = {name: value.clone() for name, value in policy.state_dict().items()}
    installed(policy)
    policy.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], plain[name]) for name in saved)
    assert '"type": "groot"' in (tmp_path / "config.json").read_text()


def test_the_real_size_runs_on_the_meta_device(monkeypatch):
    # torch knows no autocast on the meta device.
    monkeypatch.setattr(modeling_qwen3, "maybe_autocast", lambda **_: nullcontext())
    monkeypatch.setattr(GrootFastPath, "autocast", lambda _: nullcontext())
    policy = meta_groot(PUBLIC_ARCHITECTURE, tune_llm=True, tune_visual=True)
    policy.train()
    image_token = policy._groot_model.backbone.eagle_model.image_token_index
    prompts = [torch.cat([torch.full((512,), image_token), torch.arange(100, 100 + length)]) for length in (45, 65)]
    lengths = torch.tensor([[len(prompt)] for prompt in prompts])
    batch = {
        "eagle_input_ids": torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left"),
        "eagle_attention_mask": torch.arange(577) >= 577 - lengths,
        "eagle_pixel_values": torch.rand(4, 3, 224, 224),
        "state": torch.rand(2, 1, 64),
        "action": torch.rand(2, 16, 32),
        "embodiment_id": torch.full((2,), 31),
    }
    installation = GrootN15Wrapper().install(policy, settings_with())
    losses = installation.fast_path.losses(
        batch, torch.empty(2, 1, 16, 32, device="meta"), torch.empty(2, 1, device="meta")
    )
    assert losses.shape == (2, 1, 16, 32)
    losses.mean().backward()
    without = [name for name, parameter in policy.named_parameters() if parameter.grad is None]
    assert without == ["_groot_model.backbone.eagle_model.language_model.lm_head.weight"]
    counts = installation.token_counts
    assert counts.valid == counts.computed == 2 * 512 + 45 + 65 + 2 * 49
    assert counts.upstream == 2 * 577 + 2 * 49
