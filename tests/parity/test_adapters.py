# SPDX-License-Identifier: Apache-2.0
"""A policy with adapters, packed, computes what upstream computes of it; without the adapters it would not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from embodix.attention.cpu import SegmentAuto
from embodix.packing.layout import PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix.policies.support import support_of
from embodix.testing.errors import TrainingRun, compare_gradients
from embodix_groot import testing as groot
from embodix_pi05 import testing as pi05

LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5
FAST = FastPathSettings(PaddingFreePacker(), SegmentAuto(), "valid")


@dataclass(frozen=True)
class Case:
    """A policy, a batch whose samples differ, and upstream's computation of it where that is the reference."""

    build: Callable[..., Any]
    batch: Callable[[Any], Any]
    reference: Callable[..., TrainingRun]
    fast: Callable[..., TrainingRun]


CASES = {
    "pi05": Case(
        pi05.small_pi05,
        lambda policy: pi05.random_batch(policy, [3, 12, 7], camera_is_pad=[[0, 0], [1, 0], [0, 1]]),
        pi05.run_upstream,
        pi05.run_fast,
    ),
    "groot": Case(
        lambda **config: groot.strengthen(groot.small_groot(tune_llm=True, tune_visual=True, **config)),
        lambda policy: groot.random_batch(policy, (5, 12, 7), (1, 3, 2)),
        groot.run_reference,
        groot.run_fast,
    ),
}


def _everywhere(policy: Any) -> list[str]:
    """Every linear layer that is called as a module; a pooling head of the vision tower reads its weights itself."""
    return [
        path
        for path, module in policy.named_modules()
        if isinstance(module, nn.Linear) and not path.endswith("lm_head") and ".head." not in path
    ]


@cache
def _adapted(name: str, where: str, **config: Any) -> Any:
    """The policy with trained adapters: new ones add nothing."""
    policy = CASES[name].build(**config)
    policy.config.pretrained_path = "base"  # upstream trains no adapters beside untrained weights
    targets = _everywhere(policy) if where == "everywhere" else support_of(name).peft_targets
    adapted = policy.wrap_with_peft(peft_cli_overrides={"r": 2, "target_modules": targets, "lora_alpha": 4})
    for path, parameter in adapted.named_parameters():
        if "lora_B" in path:
            torch.nn.init.normal_(parameter, std=0.05)
    return adapted.get_base_model()


@pytest.mark.parametrize("where", ["where the policy's record says", "everywhere"])
@pytest.mark.parametrize("name", list(CASES))
def test_losses_and_gradients_of_adapters_are_upstreams(name: str, where: str) -> None:
    policy, case = _adapted(name, where), CASES[name]
    batch = case.batch(policy)
    wanted, got = case.reference(policy, batch), case.fast(policy, batch, FAST)
    assert got.loss == pytest.approx(wanted.loss, rel=LOSS_TOLERANCE)
    comparison = compare_gradients(got.gradients, wanted.gradients)
    assert comparison.structure == []
    assert comparison.worst <= GRADIENT_TOLERANCE, comparison.worst_name
    trained = [path for path, gradient in got.gradients.items() if gradient is not None]
    assert trained
    assert all("lora_" in path for path in trained)


@pytest.mark.parametrize("name", list(CASES))
def test_without_the_adapters_it_is_another_function(name: str) -> None:
    policy, case = _adapted(name, "everywhere"), CASES[name]
    batch = case.batch(policy)
    wanted = case.reference(policy, batch).loss
    lower_ranks = [module.lora_A for module in policy.modules() if hasattr(module, "lora_A")]
    assert len(lower_ranks) > 20
    kept = [layer["default"].weight.data.clone() for layer in lower_ranks]
    for layer in lower_ranks:
        layer["default"].weight.data.zero_()
    without = case.fast(policy, batch, FAST).loss
    for layer, weight in zip(lower_ranks, kept, strict=True):
        layer["default"].weight.data.copy_(weight)
    assert abs(without / wanted - 1) > 100 * LOSS_TOLERANCE


def test_checkpointed_layers_train_the_same_adapters() -> None:
    plain, saving = _adapted("pi05", "everywhere"), _adapted("pi05", "everywhere", gradient_checkpointing=True)
    saving.load_state_dict(plain.state_dict())
    batch = pi05.random_batch(plain, [3, 12, 7])
    wanted, got = pi05.run_fast(plain, batch, FAST), pi05.run_fast(saving, batch, FAST)
    comparison = compare_gradients(got.gradients, wanted.gradients)
    assert (got.loss, comparison.structure) == (wanted.loss, [])
    assert comparison.worst <= GRADIENT_TOLERANCE, comparison.worst_name
