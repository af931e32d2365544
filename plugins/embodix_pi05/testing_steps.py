# SPDX-License-Identifier: Apache-2.0
"""One optimizer step of the same samples in any packing: bins, micro-batches, ranks.

Shape suffixes: B samples, T action steps, A padded action dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from embodix.attention.cpu import SegmentAuto
from embodix.contracts import Packer
from embodix.data.preprocessing import MicroBatches
from embodix.policies.settings import ActionPad, FastPathSettings, TokenCounts
from embodix.testing.errors import gradients_of
from embodix.training.step_forward import StepCount, StepForward
from embodix_pi05.testing import random_batch, small_pi05
from embodix_pi05.wrapper import Pi05Wrapper

PROMPTS = (5, 9, 3, 12, 1, 7, 4)
CAMERA_IS_PAD = ((0, 0), (0, 1), (1, 0), (0, 0), (0, 1), (0, 0), (1, 0))
VALID_STEPS = (6, 2, 1, 3, 6, 4, 5)
ACTION_DIMS = (4, 2, 3, 4, 1, 4, 2)


class NoTimer:
    """Measures nothing."""

    def bin_started(self) -> None: ...
    def forward_ended(self) -> None: ...
    def bin_ended(self) -> None: ...


@dataclass(frozen=True)
class StepResult:
    """What one rank has after a step, before the optimizer."""

    loss: float
    logged: dict[str, Any]
    gradients: dict[str, Tensor | None]
    token_counts: TokenCounts


def seven_samples(policy: Any, with_dims: bool) -> dict[str, Tensor]:
    """A batch whose samples differ in everything: prompts, cameras, valid steps and, if asked, action dimensions."""
    batch = random_batch(policy, PROMPTS, camera_is_pad=[[bool(pad) for pad in row] for row in CAMERA_IS_PAD])
    for sample, num_valid in enumerate(VALID_STEPS):
        batch["action"][sample, num_valid:] = batch["action"][sample, num_valid - 1]
        batch["action_is_pad"][sample, num_valid:] = True
    if with_dims:
        batch["action_dims"] = torch.tensor(ACTION_DIMS)
        for sample, num_dims in enumerate(ACTION_DIMS):
            batch["action"][sample, :, num_dims:] = 0
    return batch


def draw_by_sample(policy: Any, bins: Sequence[Sequence[int]]) -> None:
    """Make the model draw each sample's noise and time from a table, whatever bin it is in."""
    generator = torch.Generator().manual_seed(5)
    model, config = policy.model, policy.config
    noise_BTA = torch.randn(len(PROMPTS), config.chunk_size, config.max_action_dim, generator=generator)
    time_B = torch.rand(len(PROMPTS), generator=generator) * 0.9 + 0.05
    noise, times = iter(list(bins)), iter(list(bins))
    model.sample_noise = lambda shape, device: noise_BTA[list(next(noise))]
    model.sample_time = lambda batch_size, device: time_B[list(next(times))]


def run_step(
    bins: Sequence[Sequence[int]],
    packer: Packer,
    *,
    action_pad: ActionPad = "mask",
    with_dims: bool = True,
    accelerator: Accelerator | None = None,
    count: Callable[[Tensor], Tensor] | None = None,
) -> StepResult:
    """Forward and backward of one step of this rank's ``bins``, as upstream's loop runs it.

    Args:
        count: replaces the count that losses are divided by.
    """
    accelerator = accelerator or Accelerator(cpu=True)
    policy = small_pi05()
    step_count = StepCount()
    settings = FastPathSettings(
        packer, SegmentAuto(), action_pad=action_pad, reduce_count=count or step_count, uneven_batches=True
    )
    installation: Any = Pi05Wrapper().install(policy, settings)
    samples = seven_samples(policy, with_dims)
    draw_by_sample(policy, bins)
    prepared: Any = accelerator.prepare(policy)
    forward = StepForward(prepared, accelerator, installation, step_count, lambda phase: None, NoTimer())
    parts = [{key: value[list(members)] for key, value in samples.items()} for members in bins]
    loss, logged = prepared.forward(MicroBatches(parts) if len(parts) > 1 else parts[0])
    accelerator.backward(loss)
    forward.release()
    assert forward.token_counts is not None
    return StepResult(float(loss.detach()), logged, gradients_of(policy), forward.token_counts)
