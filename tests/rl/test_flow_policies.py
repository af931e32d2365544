# SPDX-License-Identifier: Apache-2.0
"""π0.5 and GR00T with log-probabilities: rollout and training agree, evaluation is the host's own sampler."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from functools import cache

import pytest
import torch

from embodix.attention.cpu import SegmentAuto
from embodix.packing.layout import PaddedPacker, PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix_groot import flow as groot_flow
from embodix_groot import testing as small_groots
from embodix_groot.testing import reference_actions, strengthen
from embodix_pi05 import testing as small_pi05s
from embodix_pi05.testing import upstream_actions
from embodix_rl.flow.chain import ChainSettings
from embodix_rl.flow.flow_policy import AFTER_KEY, BEFORE_KEY, STEP_KEY, ValueSettings, flow_policy
from embodix_rl.objectives.objective import at_level
from embodix_rl.objectives.policy_loss import ratio_statistics

FAST = FastPathSettings(PaddingFreePacker(), SegmentAuto())
DENSE = FastPathSettings(PaddedPacker(), None)
TOLERANCE = 1e-5
POLICIES = ("pi05", "groot")


@cache
def host_policy(kind):
    if kind == "pi05":
        return small_pi05s.small_pi05(num_inference_steps=4, empty_cameras=1)
    return strengthen(small_groots.small_groot())


def observations(kind, seed=0, lengths=(5, 11, 7)):
    policy = host_policy(kind)
    if kind == "pi05":
        absent = [[False, index == 1] for index in range(len(lengths))]
        return small_pi05s.random_batch(policy, lengths, camera_is_pad=absent, seed=seed)
    batch = small_groots.random_batch(policy, lengths, [1 + index % 3 for index in range(len(lengths))], seed)
    batch["embodiment_id"] = torch.tensor([31, 3, 17, 3][: len(lengths)])
    return batch


def build(kind, settings=FAST, chain=None, value=None, policy=None):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)  # the same value head in every flow, whose values differ
        flow = flow_policy(policy or host_policy(kind), settings, chain or ChainSettings(), value or ValueSettings())
        torch.nn.init.normal_(flow.value_head.layers[-1].weight, std=0.1)
    return flow


def stream(seed=0):
    return torch.Generator().manual_seed(seed)


def chosen(inputs, rows):
    return {key: value[rows] for key, value in inputs.items()}


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("transition", ["flow_sde", "flow_cps"])
@pytest.mark.parametrize("stochastic", ["one", "all"])
def test_recomputed_log_probabilities_are_those_of_the_rollout(kind, transition, stochastic):
    flow = build(kind, chain=ChainSettings(transition, stochastic_steps=stochastic, counted_steps="predicted"))
    rollout = flow.sample(observations(kind), generator=stream())
    again = flow.evaluate(rollout.forward_inputs)
    assert rollout.log_probs.shape == (3, flow.host.sizes.num_predicted, 4)
    torch.testing.assert_close(again.log_probs, rollout.log_probs, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(again.values, rollout.values, rtol=TOLERANCE, atol=TOLERANCE)
    assert rollout.log_probs.std() > 0.1
    assert rollout.values.std() > 1e-4


@pytest.mark.parametrize("kind", POLICIES)
def test_a_weight_changed_by_a_percent_is_noticed(kind):
    policy = copy.deepcopy(host_policy(kind))
    flow = build(kind, policy=policy)
    rollout = flow.sample(observations(kind), generator=stream())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.01)
    apart = (flow.evaluate(rollout.forward_inputs).log_probs - rollout.log_probs).abs()
    assert apart.max() > 100 * TOLERANCE


@pytest.mark.parametrize("kind", POLICIES)
def test_a_sample_does_not_depend_on_its_batch(kind):
    """Rollouts of different batches, with prompts padded differently, are trained in other batches."""
    flow = build(kind)
    parts = [
        flow.sample(observations(kind, seed, lengths), generator=stream(seed))
        for seed, lengths in enumerate([(5, 11), (7,), (3, 4, 9)])
    ]
    inputs = flow.host.concatenate([part.forward_inputs for part in parts])
    padded = [flow.host.pad(part.forward_inputs, 40, 3) for part in parts]
    assert {key: torch.cat([part[key] for part in padded]).shape[0] for key in inputs} == dict.fromkeys(inputs, 6)
    log_probs, values = (torch.cat([getattr(part, name) for part in parts]) for name in ("log_probs", "values"))
    for rows in (torch.tensor([5, 0, 3]), torch.tensor([2]), torch.arange(6)):
        again = flow.evaluate(chosen(inputs, rows))
        torch.testing.assert_close(again.log_probs, log_probs[rows], rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(again.values, values[rows], rtol=TOLERANCE, atol=TOLERANCE)
    widest = {key: torch.cat([part[key] for part in padded]) for key in inputs}
    torch.testing.assert_close(flow.evaluate(widest).log_probs, log_probs, rtol=TOLERANCE, atol=TOLERANCE)


def test_inputs_beyond_the_padded_size_are_refused():
    flow = build("groot")
    inputs = flow.sample(observations("groot"), generator=stream()).forward_inputs
    with pytest.raises(ValueError, match="padded to 9 tokens and 3 images a sample; got"):
        flow.host.pad(inputs, 9, 3)


@pytest.mark.parametrize("kind", POLICIES)
def test_own_streams_make_the_whole_rollout_independent_of_the_company(kind):
    flow, batch = build(kind), observations(kind)
    together = flow.sample(batch, generator=[stream(seed) for seed in (1, 2, 3)])
    alone = flow.host.unpack_observation(chosen(flow.host.pack_observation(batch), torch.tensor([1])))
    single = flow.sample(alone, generator=[stream(2)])
    torch.testing.assert_close(single.actions[0], together.actions[1], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(single.log_probs[0], together.log_probs[1], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("kind", POLICIES)
def test_packed_and_dense_attention_give_the_same(kind):
    batch = observations(kind)
    packed = build(kind).sample(batch, generator=stream())
    for settings in (DENSE, FastPathSettings(PaddingFreePacker(), None)):
        dense = build(kind, settings)
        rollout = dense.sample(batch, generator=stream())
        torch.testing.assert_close(rollout.actions, packed.actions, rtol=0, atol=TOLERANCE)
        again = dense.evaluate(packed.forward_inputs)
        torch.testing.assert_close(again.log_probs, packed.log_probs, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(again.values, packed.values, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_mean_of_a_draw_comes_from_upstreams_own_denoising_step():
    from lerobot.policies.pi05.modeling_pi05 import make_att_2d_masks

    policy = host_policy("pi05")
    flow = build("pi05", chain=ChainSettings(candidate_steps=(2,)))
    batch = {key: value for key, value in observations("pi05").items() if key != "camera_is_pad"}
    rollout = flow.sample(batch, generator=stream())
    model, inputs = policy.model, rollout.forward_inputs
    policy.eval()
    images, masks = policy._preprocess_images(batch)
    with torch.no_grad():
        embedded, valid, blocks = model.embed_prefix(
            images, masks, batch["observation.language.tokens"], batch["observation.language.attention_mask"]
        )
        model.paligemma_with_expert.paligemma.model.language_model.config._attn_implementation = "eager"
        _, cache = model.paligemma_with_expert.forward(
            attention_mask=model._prepare_attention_masks_4d(make_att_2d_masks(valid, blocks)),
            position_ids=torch.cumsum(valid, dim=1) - 1,
            past_key_values=None,
            inputs_embeds=[embedded, None],
            use_cache=True,
        )
        before = inputs[BEFORE_KEY][:, 0]
        v = model.denoise_step(valid, cache, before, torch.full((3,), 0.5))
    sigma = 0.5 * (0.5 / 0.5) ** 0.5
    mean = before - 0.25 * (v + sigma**2 / (2 * 0.5) * (before + 0.5 * v))
    wanted = torch.distributions.Normal(mean[..., :4], sigma * 0.5).log_prob(inputs[AFTER_KEY][:, 0])
    torch.testing.assert_close(rollout.log_probs, wanted[:, :3], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("kind", POLICIES)
def test_evaluation_is_the_hosts_own_sampler(kind):
    flow, batch = build(kind), observations(kind)
    torch.manual_seed(3)
    got = flow.sample(batch, mode="eval")
    torch.manual_seed(3)
    assert torch.equal(got.actions, flow.host._fast_path.predict_action_chunk(batch))
    assert (got.log_probs, got.forward_inputs) == (None, {})
    noise = torch.randn(3, flow.host.sizes.num_predicted, flow.host.sizes.padded_dims)
    given = flow.sample(batch, mode="eval", noise=noise)
    upstream = upstream_actions if kind == "pi05" else reference_actions
    wanted = upstream(host_policy(kind), batch, **{"noise" if kind == "pi05" else "noise_BTA": noise})
    torch.testing.assert_close(given.actions, wanted, rtol=0, atol=TOLERANCE)
    seeded = [flow.sample(batch, mode="eval", generator=stream(4)).actions for _ in range(2)]
    assert torch.equal(*seeded)


@pytest.mark.parametrize("kind", POLICIES)
def test_rollouts_draw_from_the_given_stream_alone(kind):
    flow, batch = build(kind), observations(kind)
    state = torch.get_rng_state()
    first, second = (flow.sample(batch, generator=stream(1)) for _ in range(2))
    assert torch.equal(first.actions, second.actions)
    assert torch.equal(torch.get_rng_state(), state)
    noise = flow.draw_noise(batch, stream(1))
    assert torch.equal(flow.sample(batch, noise=noise).actions, first.actions)
    other = flow.sample(batch, generator=stream(2))
    assert not torch.allclose(other.actions, first.actions, atol=1e-3)


@pytest.mark.parametrize("kind", POLICIES)
def test_executed_steps_are_the_first_of_the_chunk(kind):
    batch = observations(kind)
    executed, predicted = (
        build(kind, chain=ChainSettings(counted_steps=counted)).sample(batch, generator=stream())
        for counted in ("executed", "predicted")
    )
    num_executed = host_policy(kind).config.n_action_steps
    assert torch.equal(executed.log_probs, predicted.log_probs[:, :num_executed])
    assert predicted.log_probs.shape[1] > num_executed


@pytest.mark.parametrize("kind", POLICIES)
def test_the_log_probability_has_the_gradient_of_finite_differences(kind):
    policy = copy.deepcopy(host_policy(kind))
    flow = build(kind, policy=policy)
    rollout = flow.sample(observations(kind), generator=stream())
    head = policy.model.action_out_proj if kind == "pi05" else policy._groot_model.action_head.action_decoder.layer2
    bias = head.bias if kind == "pi05" else head.b
    flow.evaluate(rollout.forward_inputs).log_probs.sum().backward()
    index = (0,) if kind == "pi05" else (3, 0)
    sums, width = [], 1e-2
    for sign in (1, -1):
        with torch.no_grad():
            bias[index] += sign * width
            sums.append(flow.evaluate(rollout.forward_inputs).log_probs.sum().item())
            bias[index] -= sign * width
    assert bias.grad[index].item() == pytest.approx((sums[0] - sums[1]) / (2 * width), rel=2e-2)
    assert abs(bias.grad[index].item()) > 0.1


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("features", ["prefix", "action"])
def test_a_detached_value_trains_the_head_alone(kind, features):
    policy, batch = copy.deepcopy(host_policy(kind)), observations(kind)

    def trained(detached):
        flow = build(kind, value=ValueSettings(features, detached), policy=policy)
        policy.zero_grad(set_to_none=True)
        rollout = flow.sample(batch, generator=stream())
        flow.evaluate(rollout.forward_inputs).values.sum().backward()
        assert all(parameter.grad is not None for parameter in flow.value_head.parameters())
        return sum(parameter.grad is not None and bool(parameter.grad.any()) for parameter in policy.parameters())

    assert trained(True) == 0
    assert trained(False) > 0


@pytest.mark.parametrize("kind", POLICIES)
def test_values_start_at_zero_and_the_head_stands_beside_the_policy(kind):
    flow = flow_policy(host_policy(kind), FAST, ChainSettings(), ValueSettings())
    assert torch.equal(flow.sample(observations(kind)).values, torch.zeros(3))
    names = [name for name in flow.state_dict() if not name.startswith("value_head.")]
    assert names == [f"policy.{name}" for name in host_policy(kind).state_dict()]
    without = flow_policy(host_policy(kind), FAST, ChainSettings())
    assert without.sample(observations(kind)).values is None


def test_dropout_is_off_in_training_too(monkeypatch):
    policy = strengthen(small_groots.small_groot({**small_groots.SMALL_ARCHITECTURE, "dropout": 0.2}))
    flow = build("groot", policy=policy)
    rollout = flow.sample(observations("groot"), generator=stream())
    policy.train()
    again = flow.evaluate(rollout.forward_inputs).log_probs
    torch.testing.assert_close(again, rollout.log_probs, rtol=TOLERANCE, atol=TOLERANCE)
    assert policy.training
    monkeypatch.setattr(groot_flow, "dropout_off", lambda _: contextlib.nullcontext())
    assert (flow.evaluate(rollout.forward_inputs).log_probs - rollout.log_probs).abs().max() > 1e-2


def test_gradient_checkpointing_changes_nothing():
    policy = small_pi05s.small_pi05(num_inference_steps=4)
    batch = small_pi05s.random_batch(policy, [4, 9])
    flow = build("pi05", policy=policy)
    rollout = flow.sample(batch, generator=stream())
    gradients = []
    for enabled in (False, True):
        policy.model.gradient_checkpointing_enabled = enabled
        policy.train()
        policy.zero_grad(set_to_none=True)
        flow.evaluate(rollout.forward_inputs).log_probs.sum().backward()
        gradients.append(policy.model.action_in_proj.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_the_state_stays_in_float32_where_the_model_is_in_bfloat16():
    policy = small_pi05s.small_pi05(num_inference_steps=4, dtype="bfloat16")
    flow = build("pi05", policy=policy)
    rollout = flow.sample(small_pi05s.random_batch(policy, [4, 9]), generator=stream())
    drawn = [rollout.forward_inputs[key] for key in (BEFORE_KEY, AFTER_KEY)]
    assert {tensor.dtype for tensor in (*drawn, rollout.log_probs, rollout.actions)} == {torch.float32}
    again = flow.evaluate(rollout.forward_inputs).log_probs
    torch.testing.assert_close(again, rollout.log_probs, rtol=0, atol=0.1)


def test_entropy_is_known_from_the_steps():
    flow = build("pi05", chain=ChainSettings(candidate_steps=(1, 2)))
    rollout = flow.sample(observations("pi05"), generator=stream())
    entropy = flow.evaluate(rollout.forward_inputs).entropy
    std = flow.plan.table.std_K[rollout.forward_inputs[STEP_KEY][:, 0]]
    torch.testing.assert_close(entropy, torch.distributions.Normal(0.0, std).entropy() * 3 * 4)


def test_wrong_calls_are_refused():
    flow, batch = build("pi05"), observations("pi05")
    with pytest.raises(ValueError, match="train or eval; got 'test'"):
        flow.sample(batch, mode="test")
    with pytest.raises(ValueError, match="mode=train takes a ChainNoise"):
        flow.sample(batch, noise=torch.zeros(3, 6, 8))
    with pytest.raises(ValueError, match="mode=eval takes the initial noise"):
        flow.sample(batch, mode="eval", noise=flow.draw_noise(batch))
    with pytest.raises(ValueError, match=r"(groot and pi05|pi05 and groot); got policy\.type=Linear"):
        flow_policy(torch.nn.Linear(1, 1), FAST, ChainSettings())
    with pytest.raises(ValueError, match="prefix or action; got 'suffix'"):
        ValueSettings("suffix")
    with pytest.raises(ValueError, match="widths, 1 at least"):
        dataclasses.replace(ValueSettings(), hidden_sizes=(0,))


@pytest.mark.parametrize("kind", POLICIES)
def test_a_quantized_rollout_shows_its_mismatch_with_training(kind):
    """Sampling works on FP8 weights; training in full precision sees other log-probabilities, as importance ratios."""
    from embodix_fp8.fp8_block import Fp8BlockQuantizer

    policy = copy.deepcopy(host_policy(kind))
    flow, batch = build(kind, policy=policy), observations(kind)
    plain = flow.sample(batch, generator=stream())
    installation = Fp8BlockQuantizer(activations="high", kernel="dequantize").install(policy, kind)
    rollout = flow.sample(batch, generator=stream())
    again = flow.evaluate(rollout.forward_inputs)
    torch.testing.assert_close(again.log_probs, rollout.log_probs, rtol=TOLERANCE, atol=TOLERANCE)
    installation.uninstall()
    trained = flow.evaluate(rollout.forward_inputs)
    everything = torch.ones(3, dtype=torch.bool)
    metrics = [
        ratio_statistics(at_level(trained.log_probs, "chunk"), at_level(log_probs, "chunk"), everything).metrics()
        for log_probs in (rollout.log_probs, trained.log_probs)
    ]
    assert 1e-9 < metrics[0]["approx_kl"] < 0.5
    assert metrics[0]["effective_sample_share"] < metrics[1]["effective_sample_share"] == 1.0
    assert (rollout.actions - plain.actions).abs().max() > 1e-6
