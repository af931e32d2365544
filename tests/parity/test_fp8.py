# SPDX-License-Identifier: Apache-2.0
"""Block-scaled FP8 under packing and variable-length attention: the function of upstream with the same FP8 weights."""

from __future__ import annotations

import pytest
import torch

from embodix.attention.cpu import SegmentAuto
from embodix.packing.layout import PaddedPacker, PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix.testing.errors import compare_gradients, relative_error
from embodix_fp8.fp8_block import Fp8BlockQuantizer
from embodix_groot import testing as groot
from embodix_pi05 import testing as pi05
from embodix_pi05.record import DECODER_LINEAR, Pi05

FAST = FastPathSettings(PaddingFreePacker(), SegmentAuto())
CHOICES = {
    "packed": FAST,
    "packed, upstream attention": FastPathSettings(PaddingFreePacker(), None),
    "padded, variable-length attention": FastPathSettings(PaddedPacker(), SegmentAuto()),
}
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def pi05_case():
    policy = pi05.small_pi05(empty_cameras=1)
    batch = pi05.random_batch(policy, [3, 12, 7], camera_is_pad=[[False, True], [False, False], [True, False]])
    unquantized = pi05.upstream_actions(policy, batch)
    installation = Fp8BlockQuantizer(embeddings=True).install(policy, "pi05")
    yield policy, batch, unquantized
    installation.uninstall()


@pytest.fixture(scope="module")
def groot_case():
    policy = groot.strengthen(groot.small_groot())
    batch = groot.random_batch(policy, [5, 12, 7], [1, 3, 2])
    noise = torch.randn(batch["action"].shape, generator=torch.Generator().manual_seed(0))
    unquantized = groot.reference_actions(policy, batch, noise)
    installation = Fp8BlockQuantizer(embeddings=True).install(policy, "groot")
    yield policy, batch, noise, unquantized
    installation.uninstall()


@pytest.mark.parametrize("choice", CHOICES)
def test_pi05_acts_as_upstream_with_the_same_weights(pi05_case, choice):
    policy, batch, unquantized = pi05_case
    wanted = pi05.upstream_actions(policy, batch)
    got = pi05.fast_actions(policy, batch, CHOICES[choice])
    assert relative_error(got, wanted) <= TOLERANCE
    assert relative_error(wanted, unquantized) > 100 * TOLERANCE


@pytest.mark.parametrize("choice", CHOICES)
def test_groot_acts_as_upstream_with_the_same_weights(groot_case, choice):
    policy, batch, noise, unquantized = groot_case
    wanted = groot.reference_actions(policy, batch, noise)
    got = groot.fast_actions(policy, batch, CHOICES[choice], noise)
    assert relative_error(got, wanted) <= TOLERANCE
    assert relative_error(wanted, unquantized) > 5 * TOLERANCE


def test_gradients_of_what_is_not_quantized_are_upstreams(pi05_case):
    """FP8 weights have none; those of the vision tower flow through them."""
    policy, batch, _ = pi05_case
    wanted, got = pi05.run_upstream(policy, batch), pi05.run_fast(policy, batch, FAST)
    assert got.loss == pytest.approx(wanted.loss, rel=1e-6)
    comparison = compare_gradients(got.gradients, wanted.gradients)
    assert comparison.structure == []
    assert comparison.worst <= TOLERANCE, comparison.worst_name
    vision = {name: value for name, value in wanted.gradients.items() if "vision_tower" in name}
    assert sum(value is not None and bool(value.abs().sum() > 0) for value in vision.values()) > 10


def test_groot_in_its_own_autocast_multiplies_in_bfloat16():
    """Both paths on the same weights; rounding of bfloat16 alone tells them apart."""
    policy = groot.strengthen(groot.small_groot(use_bf16=True))
    batch = groot.random_batch(policy, [5, 12, 7], [1, 3, 2])
    noise = torch.randn(batch["action"].shape, generator=torch.Generator().manual_seed(0))
    installation = Fp8BlockQuantizer().install(policy, "groot")
    wanted = groot.reference_actions(policy, batch, noise)
    got = groot.fast_actions(policy, batch, FAST, noise)
    installation.uninstall()
    assert relative_error(got, wanted) < 0.05


def test_pi05_in_bfloat16_computes_its_prefix_in_bfloat16():
    """Upstream asks the first query projection for its dtype."""
    policy = pi05.small_pi05(dtype="bfloat16")
    batch = pi05.random_batch(policy, [3, 12, 7])
    unquantized = pi05.upstream_actions(policy, batch)
    installation = Fp8BlockQuantizer().install(policy, "pi05")
    wanted = pi05.upstream_actions(policy, batch)
    got = pi05.fast_actions(policy, batch, FAST)
    installation.uninstall()
    assert wanted.dtype == got.dtype == torch.float32
    assert relative_error(got, wanted) < 0.02
    assert 1e-3 < relative_error(wanted, unquantized) < 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fast", [False, True])
def test_the_state_of_denoising_stays_in_float32(dtype, fast, monkeypatch):
    policy = pi05.small_pi05(dtype=dtype)
    batch = pi05.random_batch(policy, [3, 12])
    seen = []
    embed = policy.model.embed_suffix

    def watched(state, time):
        seen.append((state.dtype, time.dtype))
        return embed(state, time)

    monkeypatch.setattr(policy.model, "embed_suffix", watched)
    installation = Fp8BlockQuantizer(activations="fp8").install(policy, "pi05")
    actions = pi05.fast_actions(policy, batch, FAST) if fast else pi05.upstream_actions(policy, batch)
    installation.uninstall()
    assert seen == [(torch.float32, torch.float32)] * policy.config.num_inference_steps
    assert actions.dtype == torch.float32


def test_taking_the_action_expert_too_is_noticed(pi05_case, monkeypatch):
    """The mutation twin: names without their full path would quantize the action head, and the actions would move."""
    policy, batch, _ = pi05_case
    wanted = pi05.upstream_actions(policy, batch)
    greedy = Pi05.module_kinds | {"language_linear": r".*gemma_expert.*" + DECODER_LINEAR}
    monkeypatch.setattr(Pi05, "module_kinds", greedy)
    installation = Fp8BlockQuantizer().install(policy, "pi05")
    assert all(".gemma_expert." in row["path"] for row in installation.describe()["converted"])
    changed = pi05.upstream_actions(policy, batch)
    installation.uninstall()
    assert relative_error(changed, wanted) > 100 * TOLERANCE
