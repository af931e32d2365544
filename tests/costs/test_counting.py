# SPDX-License-Identifier: Apache-2.0
"""The cost model agrees with torch's counter, with upstream's parameters and with the published token counts."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from embodix.attention.segment import SegmentSdpa
from embodix.packing.packers import PaddedPacker, PaddingFreePacker
from embodix_pi05.cost import (
    EMBODIX,
    UPSTREAM,
    Computation,
    Sample,
    computation_of,
    flop_bound,
    real_sizes,
    step_flops,
    token_shares,
)
from embodix_pi05.cost_sizes import num_parameters, parameter_groups, sizes_of

from embodix.policies.settings import FastPathSettings
from embodix.training.flops import flop_counter
from embodix_pi05.testing import SMALL_ARCHITECTURE, random_batch, small_pi05
from embodix_pi05.wrapper import Pi05Wrapper

REAL = sizes_of({})
FIELDS = {"image_resolution": (28, 28), "tokenizer_max_length": 24, "chunk_size": 6, "max_action_dim": 8}
PROMPT = 7
BATCH = 2


def counted_flops(policy, batch) -> tuple[float, float]:
    """Operations of one sample's forward and backward pass by torch's counter."""
    with flop_counter() as forward:
        loss = policy.forward(batch)[0]
    with flop_counter() as backward:
        loss.backward()
    policy.zero_grad()
    return forward.get_total_flops() / BATCH, backward.get_total_flops() / BATCH


def small_case(**config):
    policy = small_pi05(empty_cameras=1, tokenizer_max_length=24, **config)
    batch = random_batch(policy, prompt_lengths=[PROMPT] * BATCH, padded_length=24)
    return policy, batch, sizes_of({**FIELDS, **config}, SMALL_ARCHITECTURE)


def assert_flops_agree(sizes, computation, counted):
    expected = step_flops(sizes, Sample(2, 1, PROMPT), computation).total
    # The model leaves out the rotary table and the fast norms' products with a vector: a few thousand operations.
    assert counted[0] == pytest.approx(expected.forward, rel=5e-4)
    assert counted[1] == pytest.approx(expected.backward, rel=1e-9 if computation == UPSTREAM else 2e-3)


@pytest.mark.parametrize("config", [{}, {"freeze_vision_encoder": True}, {"train_expert_only": True}], ids=str)
def test_upstream_flops_are_what_torch_counts(config):
    policy, batch, sizes = small_case(**config)
    assert_flops_agree(sizes, UPSTREAM, counted_flops(policy, batch))


@pytest.mark.parametrize("packer", [PaddedPacker(), PaddingFreePacker()], ids=lambda packer: packer.name)
@pytest.mark.parametrize("backend", [None, SegmentSdpa()], ids=["dense", "segments"])
@pytest.mark.parametrize("vision_tokens", ["upstream", "valid"])
@pytest.mark.parametrize("config", [{}, {"train_expert_only": True}], ids=str)
def test_fast_path_flops_are_what_torch_counts(packer, backend, vision_tokens, config):
    computation = Computation(packer.name, "upstream" if backend is None else backend.name, vision_tokens)
    if computation == UPSTREAM:
        pytest.skip("nothing is installed for upstream's own computation")
    policy, batch, sizes = small_case(**config)
    installation = Pi05Wrapper().install(policy, FastPathSettings(packer, backend, vision_tokens))
    counted = counted_flops(policy, batch)
    installation.uninstall()
    assert_flops_agree(sizes, computation, counted)


def test_flow_samples_share_the_prefix():
    policy, batch, sizes = small_case()
    settings = FastPathSettings(PaddingFreePacker(), SegmentSdpa(), "valid", flow_samples=3)
    installation = Pi05Wrapper().install(policy, settings)
    counted = counted_flops(policy, batch)
    installation.uninstall()
    assert_flops_agree(sizes, Computation("padding_free", "segment_sdpa", "valid", 3), counted)


@pytest.mark.parametrize("config", [{}, {"freeze_vision_encoder": True}, {"train_expert_only": True}], ids=str)
def test_parameters_are_those_of_upstream(config):
    policy, batch, sizes = small_case(**config)
    assert num_parameters(sizes) == sum(parameter.numel() for parameter in policy.parameters())
    policy.forward(batch)[0].backward()
    with_gradient = sum(parameter.numel() for parameter in policy.parameters() if parameter.grad is not None)
    assert sum(group.count for group in parameter_groups(sizes) if group.trained) == with_gradient


def test_bfloat16_keeps_the_parameters_in_float32_that_upstream_keeps():
    policy, _, sizes = small_case(dtype="bfloat16")
    kept = sum(parameter.numel() for parameter in policy.parameters() if parameter.dtype == torch.float32)
    assert sum(group.count for group in parameter_groups(sizes) if group.float32) == kept


def test_the_real_size_has_the_parameters_that_upstream_builds():
    from lerobot.policies.pi05.configuration_pi05 import PI05Config
    from lerobot.policies.pi05.modeling_pi05 import PI05Pytorch

    with torch.device("meta"):
        model = PI05Pytorch(PI05Config(device="cpu"))
    built = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters(REAL) == built == 4_143_404_816


@pytest.mark.parametrize(
    ("sample", "upstream", "valid", "waste", "forward_ratio", "training_bound"),
    [
        (Sample(2, 1, 55), 1018, 617, 39.4, 1.77, 1.72),
        (Sample(2, 1, 25), 1018, 587, 42.3, 1.85, 1.80),
        (Sample(2, 0, 55), 762, 617, 19.0, 1.28, 1.24),
        (Sample(1, 2, 55), 1018, 361, 64.5, 3.27, 3.17),
        (Sample(3, 0, 55), 1018, 873, 14.2, 1.21, 1.17),
    ],
    ids=lambda value: f"{value.images}+{value.blank_images}, prompt {value.prompt}" if hasattr(value, "prompt") else "",
)
def test_waste_and_bound_at_real_size(sample, upstream, valid, waste, forward_ratio, training_bound):
    shares = token_shares(REAL, sample)
    assert (shares.upstream, shares.valid) == (upstream, valid)
    assert round(100 * shares.waste, 1) == waste
    forward = [step_flops(REAL, sample, computation).total.forward for computation in (UPSTREAM, EMBODIX)]
    assert forward[0] / forward[1] == pytest.approx(forward_ratio, abs=0.005)
    # Upstream's backward pass skips the dead end of the last layer too, so a whole step gains a little less.
    assert flop_bound(REAL, {sample: 1}) == pytest.approx(training_bound, abs=0.005)


def test_forward_flops_by_part_at_real_size():
    flops = step_flops(sizes_of({"chunk_size": 10}), Sample(3, 0, 200))
    teraflops = {part: getattr(flops, part).forward / 1e12 for part in ("vision", "language", "attention")}
    assert teraflops == pytest.approx({"vision": 0.656, "language": 3.837, "attention": 0.138}, rel=0.03)
    assert flops.total.forward / 1e12 == pytest.approx(4.638, rel=0.005)


def test_a_bound_over_a_data_set_weighs_samples_by_their_work():
    short, long = Sample(2, 1, 10), Sample(2, 1, 150)
    work = [
        sum(step_flops(REAL, sample, computation).total.total for sample in (short, long))
        for computation in (UPSTREAM, EMBODIX)
    ]
    assert flop_bound(REAL, {short: 3, long: 3}) == pytest.approx(work[0] / work[1])
    assert flop_bound(REAL, {short: 1}, UPSTREAM) == 1.0
    # Eight draws of noise and time for one prefix: upstream would compute the prefix eight times.
    eight = Computation("padding_free", "auto", "valid", flow_samples=8)
    assert flop_bound(REAL, {short: 1}, eight) > 6 * flop_bound(REAL, {short: 1})


def test_configs_say_what_is_computed_and_which_real_model_is_meant():
    config = {"packing": {"name": "padding_free"}, "attention": {"name": "auto"}, "vision_tokens": {"name": "valid"}}
    assert computation_of(config) == EMBODIX
    small = {"image_resolution": [56, 56], "chunk_size": 10, "train_expert_only": True}
    assert real_sizes(small) == sizes_of({"train_expert_only": True})


def test_impossible_questions_are_refused():
    with pytest.raises(ValueError, match=r"tokenizer_max_length=200 tokens; got 201"):
        token_shares(REAL, Sample(2, 1, 201))
    with pytest.raises(ValueError, match="gemma_300m, gemma_2b; got 'gemma_7b'"):
        sizes_of({"paligemma_variant": "gemma_7b"})
    with pytest.raises(ValueError, match=r"policy\.type=pi05; got 'act'"):
        sizes_of({"type": "act"})
    with pytest.raises(ValueError, match="at least one sample"):
        flop_bound(REAL, {})


def test_the_model_imports_no_torch():
    code = "import sys, embodix_pi05.cost, embodix_pi05.cost_memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_shares_of_the_work_add_up():
    assert math.fsum(step_flops(REAL, Sample(2, 1, 55)).shares().values()) == pytest.approx(1)
