# SPDX-License-Identifier: Apache-2.0
"""The feature groups of `lerobot rl`: what they build and refuse, and rollouts with quantized weights."""

from __future__ import annotations

import copy
import json
from functools import cache

import pytest
import torch

from embodix.config.compose import compose
from embodix.plugins import PluginError, build
from embodix.policies.flow_host import FlowSizes
from embodix.policies.settings import FastPathSettings
from embodix.training.features import packed_settings
from embodix_groot import testing as small_groots
from embodix_groot.testing import strengthen
from embodix_pi05 import testing as small_pi05s
from embodix_rl.flow.chain import ChainSettings
from embodix_rl.flow.flow_policy import FlowPolicy, ValueSettings, flow_policy
from embodix_rl.rlinf.asynchronous.exchange import ModelBuffer, split_weights
from embodix_rl.rlinf.run_plan import plan_run
from embodix_rl.rlinf.task_config import FEATURE_DEFAULTS, feature_node, selected_features
from embodix_rl.scheduling.weights import Part

POLICIES = ("pi05", "groot")


@cache
def host_policy(kind):
    if kind == "pi05":
        return small_pi05s.small_pi05(num_inference_steps=4)
    return strengthen(small_groots.small_groot())


def observations(kind, policy):
    if kind == "pi05":
        return small_pi05s.random_batch(policy, (5, 11, 7))
    batch = small_groots.random_batch(policy, (5, 11, 7), [1, 2, 1], 0)
    batch["embodiment_id"] = torch.tensor([31, 3, 17])
    return batch


def settings_of(kind, *overrides):
    return packed_settings(host_policy(kind), selected_features(feature_node(compose("rl", list(overrides)))), "cpu")


def checkpoint(folder):
    model = folder / "run" / "checkpoints" / "last" / "pretrained_model"
    model.mkdir(parents=True)
    config = {"type": "pi05", "chunk_size": 10, "output_features": {"action": {"shape": [4]}}}
    (model / "config.json").write_text(json.dumps(config))
    return ["env=metaworld", "policy=pi05_small", f"checkpoint={folder / 'run'}", "rollout.steps=40"]


def test_the_configs_defaults_are_those_that_a_latency_policy_takes():
    cfg = compose("rl", [])
    assert {group: cfg[group].name for group in FEATURE_DEFAULTS} == FEATURE_DEFAULTS and len(FEATURE_DEFAULTS) == 5


@pytest.mark.parametrize("kind", POLICIES)
def test_the_default_computes_valid_rows_by_the_first_backend_that_works(kind):
    settings = settings_of(kind)
    assert settings.describe() == {
        "packing": "padding_free",
        "attention": "segment_auto",
        "vision_tokens": "valid",
        "action_pad": "host",
        "flow_samples": 1,
    }
    assert settings == FastPathSettings(settings.packer, settings.attention)


@pytest.mark.parametrize("kind", POLICIES)
def test_every_group_reaches_the_computation(kind):
    settings = settings_of(kind, "packing=none", "attention=segment_gemm", "vision_tokens=upstream")
    chosen = settings.describe()
    assert (chosen["packing"], chosen["attention"], chosen["vision_tokens"]) == ("none", "segment_gemm", "upstream")
    assert settings_of(kind, "attention=upstream").attention is None


def test_the_choices_travel_to_the_workers(tmp_path):
    plan = plan_run(compose("rl", [*checkpoint(tmp_path), "packing=none", "quantization=fp8_block"]), tmp_path)
    selection = selected_features(plan.host.actor.model.features)
    assert selection.packing.name == "none" and selection.attention.name == "auto"
    assert selection.quantization.name == "fp8_block"
    assert selection.quantization.options["activations"] == "auto"


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["packing=token_budget"], ValueError, "packing=token_budget composes the batches of a data set"),
        (["packing=sequence_length"], ValueError, "packing=sequence_length composes"),
        (["precision=fp8"], ValueError, r"precision=torchao exchanges layers.*Set precision=none"),
        (["packing.name=tight"], PluginError, "No packer is called 'tight'"),
        (["attention.name=quick"], PluginError, "quick"),
        (["vision_tokens.name=some"], ValueError, "vision_tokens must be one of upstream, valid"),
        (["quantization.name=int4"], PluginError, "No quantizer is called 'int4'"),
        (["quantization=fp8_block", "quantization.options.kernel=none"], ValueError, "kernel"),
    ],
)
def test_what_rlinf_leaves_no_place_for_is_refused_before_anything_starts(tmp_path, overrides, error, message):
    with pytest.raises(error, match=message):
        plan_run(compose("rl", [*checkpoint(tmp_path), *overrides]), tmp_path)


def test_a_latency_policy_refuses_features(tmp_path):
    with pytest.raises(ValueError, match=r"has no features; leave out packing=none, quantization=fp8_block"):
        plan_run(compose("rl", ["packing=none", "quantization=fp8_block"]), tmp_path)


def quantized_flow(kind, policy):
    value = ValueSettings(hidden_sizes=(8,))
    return flow_policy(policy, settings_of(kind), ChainSettings(), value, build("quantizers", "fp8_block", {}))


def stream():
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("kind", POLICIES)
def test_rollouts_take_quantized_weights_and_training_those_they_are_made_from(kind):
    policy = copy.deepcopy(host_policy(kind))
    flow, batch = quantized_flow(kind, policy), observations(kind, policy)
    plain = flow_policy(host_policy(kind), settings_of(kind), ChainSettings())
    with torch.no_grad():
        own = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    rollout, exact = flow.sample(batch, generator=stream()), plain.sample(batch, generator=stream())
    assert not torch.equal(rollout.actions, exact.actions)
    torch.testing.assert_close(rollout.actions, exact.actions, rtol=0.3, atol=0.3)

    by_hand = copy.deepcopy(host_policy(kind))
    build("quantizers", "fp8_block", {}).install(by_hand, by_hand.config.type)
    wanted = flow_policy(by_hand, settings_of(kind), ChainSettings()).sample(batch, generator=stream())
    assert torch.equal(rollout.actions, wanted.actions) and torch.equal(rollout.log_probs, wanted.log_probs)

    again = flow.evaluate(rollout.forward_inputs)
    assert torch.equal(again.log_probs, plain.evaluate(rollout.forward_inputs).log_probs)
    again.log_probs.sum().backward()
    trained = [name for name, parameter in policy.named_parameters() if parameter.grad is not None]
    # Of one of them the language model is frozen.
    assert trained and any("language_model" in name and "q_proj" in name for name in trained) == (kind == "pi05")
    assert {name: bool(torch.equal(value, own[name])) for name, value in policy.named_parameters()} == dict.fromkeys(
        own, True
    )


@pytest.mark.parametrize("way", ["load_state_dict", "parts"])
def test_weights_that_arrive_are_quantized_before_the_next_rollout(way):
    """By both exchanges: RLinf's loads a state, rl_vla3's writes parts into the tensors of the first state."""
    rollout_policy, trained = copy.deepcopy(host_policy("pi05")), copy.deepcopy(host_policy("pi05"))
    flow, trainer = quantized_flow("pi05", rollout_policy), quantized_flow("pi05", trained)
    batch = observations("pi05", trained)
    buffer = ModelBuffer(flow)
    before = flow.sample(batch, generator=stream())
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.05)
    sent = trainer.state_dict()
    assert list(sent) == buffer.names and all(type(weight) is torch.Tensor for weight in sent.values())
    if way == "parts":
        for index, part in enumerate(split_weights(sent, 100_000)):
            buffer.write(Part(1, index, part))
    else:
        flow.load_state_dict({name: sent[name] for name in buffer.names[::2]}, strict=False)
        flow.load_state_dict({name: sent[name] for name in buffer.names[1::2]}, strict=False)
    after = flow.sample(batch, generator=stream())
    wanted = trainer.sample(batch, generator=stream())
    assert torch.equal(after.actions, wanted.actions) and not torch.equal(after.actions, before.actions)
    assert all(torch.equal(weight, sent[name]) for name, weight in flow.state_dict().items())


class CountingQuantizer:
    """Says how often it was asked."""

    def __init__(self):
        self.num_installed = self.num_removed = 0

    def install(self, policy, policy_type):
        self.num_installed += 1
        return self

    def uninstall(self):
        self.num_removed += 1


def test_weights_are_quantized_once_an_exchange_and_never_where_nothing_is_sampled():
    policy = host_policy("pi05")
    quantizer, batch = CountingQuantizer(), observations("pi05", policy)
    flow = flow_policy(policy, settings_of("pi05"), ChainSettings(), None, quantizer)
    inputs = flow_policy(policy, settings_of("pi05"), ChainSettings()).sample(batch).forward_inputs
    flow.evaluate(inputs)
    flow.state_dict()
    assert quantizer.num_installed == 0
    for _ in range(3):
        flow.sample(batch)
    assert (quantizer.num_installed, quantizer.num_removed) == (1, 0)
    flow.weights_changed()
    flow.weights_changed()
    for _ in range(2):
        flow.sample(batch, mode="eval")
    assert (quantizer.num_installed, quantizer.num_removed) == (2, 1)
    assert isinstance(flow, FlowPolicy) and isinstance(flow.host.sizes, FlowSizes)
