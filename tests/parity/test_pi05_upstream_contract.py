# SPDX-License-Identifier: Apache-2.0
"""What upstream's own π0.5 tests check, with the packed path installed: structure, steps, checkpointing, chunking."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from embodix.attention.cpu import SegmentAuto
from embodix.packing.layout import PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix_pi05.testing import fast_actions, random_batch, run_fast, run_upstream, small_pi05, upstream_actions
from embodix_pi05.wrapper import Pi05Wrapper

FAST = FastPathSettings(PaddingFreePacker(), SegmentAuto())


@cache
def policy_with(**config):
    return small_pi05(**config)


def test_structure_stays_that_of_pi05():
    policy = small_pi05()
    Pi05Wrapper().install(policy, FAST)
    assert hasattr(policy.model, "time_mlp_in")
    assert hasattr(policy.model, "time_mlp_out")
    assert not hasattr(policy.model, "action_time_mlp_in")
    assert not hasattr(policy.model, "state_proj")
    with_expert = policy.model.paligemma_with_expert
    assert with_expert.paligemma.config.text_config.use_adarms is False
    assert with_expert.gemma_expert.config.use_adarms is True


def test_forward_and_actions_have_upstreams_shapes():
    policy, batch = policy_with(), random_batch(policy_with(), [4])
    installation = Pi05Wrapper().install(policy, FAST)
    loss, logged = policy.forward(batch)
    installation.uninstall()
    assert loss.shape == ()
    assert set(logged) == {"loss", "loss_per_dim"}
    assert len(logged["loss_per_dim"]) == 4
    assert fast_actions(policy, batch, FAST).shape == (1, policy.config.chunk_size, 4)


def test_ten_optimizer_steps_stay_with_upstream():
    """Same losses step by step under AdamW, weight decay of unread projections included."""
    losses = {}
    for name, run in {"upstream": run_upstream, "fast": lambda *a: run_fast(a[0], a[1], FAST, a[2])}.items():
        policy = small_pi05(empty_cameras=1)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.1)
        losses[name] = []
        for step in range(10):
            outcome = run(policy, random_batch(policy, [3, 8], seed=step), step)
            for parameter_name, parameter in policy.named_parameters():
                parameter.grad = outcome.gradients[parameter_name]
            optimizer.step()
            losses[name].append(outcome.loss)
    assert losses["fast"] == pytest.approx(losses["upstream"], rel=1e-4)
    assert losses["fast"][-1] < losses["fast"][0]


def count_layer_forwards(policy, run):
    layers = policy.model.paligemma_with_expert.paligemma.model.language_model.layers
    calls = []
    handles = [layer.self_attn.k_proj.register_forward_hook(lambda *_: calls.append(1)) for layer in layers]
    run()
    for handle in handles:
        handle.remove()
    return len(calls) / len(layers)


def test_gradient_checkpointing_computes_each_layer_twice_not_three_times():
    policy = small_pi05(gradient_checkpointing=True)
    batch = random_batch(policy, [3, 8])
    assert count_layer_forwards(policy, lambda: run_upstream(policy, batch)) == 3
    assert count_layer_forwards(policy, lambda: run_fast(policy, batch, FAST)) == 2
    policy.eval()
    assert count_layer_forwards(policy, lambda: run_fast(policy, batch, FAST)) == 1


def test_sampling_computes_the_prefix_once_whatever_the_number_of_steps():
    policy, batch = policy_with(), random_batch(policy_with(), [3, 8])
    for num_steps in (1, 7):
        assert count_layer_forwards(policy, lambda n=num_steps: fast_actions(policy, batch, FAST, num_steps=n)) == 1


def test_prompts_change_actions_and_padding_length_does_not():
    policy = policy_with()
    batch = random_batch(policy, [3, 8])
    actions = fast_actions(policy, batch, FAST)
    longer = dict(batch)
    for key in ("observation.language.tokens", "observation.language.attention_mask"):
        longer[key] = torch.nn.functional.pad(batch[key], (0, 20))
    torch.testing.assert_close(fast_actions(policy, longer, FAST), actions, rtol=0, atol=0)
    torch.testing.assert_close(upstream_actions(policy, longer), actions, rtol=0, atol=1e-5)
    other = dict(batch)
    other["observation.language.tokens"] = batch["observation.language.tokens"].roll(1, dims=0).clamp(min=1)
    assert not torch.allclose(fast_actions(policy, other, FAST), actions, atol=1e-4)
