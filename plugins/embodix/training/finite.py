# SPDX-License-Identifier: Apache-2.0
"""A run whose loss, gradients or weights are no longer finite ends, and says which samples it had at hand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lerobot.utils.constants import ACTION, OBS_STATE
from torch import Tensor
from torch.distributed.tensor import DTensor

from embodix.data.preprocessing import MicroBatches
from embodix.training.stopped import RunStoppedError

MAX_NAMED, NOT_FINITE = 32, "not finite"
IMAGE_DIMS = 4  # a batch of images has as many dimensions or more
PLACE = ("index", "episode_index", "frame_index", "task")
PER_SAMPLE = (*PLACE, ACTION, OBS_STATE)  # the first that is there says how many samples a batch has


class NonFiniteError(RunStoppedError):
    """A loss, gradient or weight is NaN or infinite."""


class StepSamples:
    """What is kept of a batch until its step has ended: which samples it holds, and their inputs without images.

    Args:
        batch: as the loader gives it, raw or preprocessed, or the ``MicroBatches`` of a step.
        first_index: episode -> the number of its first frame in the data set, where that is known.
    """

    def __init__(self, batch: Any, first_index: Mapping[int, int]) -> None:
        parts = batch if isinstance(batch, MicroBatches) else [batch]
        self._parts = [_without_images(part) for part in parts]
        self._first_index = first_index

    def inputs_are_finite(self) -> bool:
        """Whether states and actions are: a policy may turn a broken number into a token, and the loss stays finite."""
        return all(_is_finite(part.get(key)) for part in self._parts for key in (OBS_STATE, ACTION))

    def describe(self) -> list[str]:
        """Each sample by episode, frame and task, with the inputs of it that are not finite."""
        return [self._sample(_per_sample(part), row) for part in self._parts for row in range(_num_samples(part))]

    def _sample(self, part: Mapping[str, Any], row: int) -> str:
        values = {key: part[key][row] for key in PLACE if key in part}
        words = self._place(values)
        if "task" in values:
            words.append(f"task {str(values['task'])!r}")
        bad = [key for key, value in part.items() if not _is_finite(value[row])]
        if bad:
            words.append(f"{NOT_FINITE}: {', '.join(bad)}")
        return ", ".join(words) or f"row {row} of a batch without episode_index"

    def _place(self, values: Mapping[str, Any]) -> list[str]:
        if "episode_index" not in values:
            return [f"index {int(values['index'])}"] if "index" in values else []
        episode = int(values["episode_index"])
        if "frame_index" in values:
            return [f"episode {episode} frame {int(values['frame_index'])}"]
        if "index" in values and episode in self._first_index:
            return [f"episode {episode} frame {int(values['index']) - self._first_index[episode]}"]
        return [f"episode {episode}", *([f"index {int(values['index'])}"] if "index" in values else [])]


def non_finite_step(step: int, loss: float, grad_norm: float, samples: Sequence[str], num_ranks: int) -> NonFiniteError:
    """The error of a step that must not reach the optimizer.

    Args:
        loss, grad_norm: of the step, over all ranks.
        samples: of all ranks.
    """
    first = sorted(samples, key=lambda sample: NOT_FINITE not in sample)[:MAX_NAMED]
    named = "".join(f"\n  {sample}" for sample in first)
    more = f"\n  and {len(samples) - MAX_NAMED} more" if len(samples) > MAX_NAMED else ""
    ranks = f" of {num_ranks} processes" if num_ranks > 1 else ""
    inputs, advice = "", "Their numbers are finite: lower the learning rate, or look at their images."
    if any(NOT_FINITE in sample for sample in samples):
        inputs = ", and inputs that are not finite"
        advice = "The data is broken there: repair it or leave these episodes out (dataset.episodes)."
    return NonFiniteError(
        f"Step {step} has a loss of {loss} and a gradient norm of {grad_norm}{inputs}. The optimizer has not taken the "
        f"step, and the checkpoints before it are whole. Its samples{ranks}:{named}{more}\n{advice}"
    )


def non_finite_state(step: int, weights: Iterable[tuple[str, Tensor]], optimizer: torch.optim.Optimizer) -> str | None:
    """Why no checkpoint may be made of what is about to be saved: a weight, or what the optimizer keeps of one, is not
    finite on this rank. None where all is."""
    bad = [name for name, weight in weights if not _is_finite(weight)]
    kept = [state for state in optimizer.state.values() if not all(map(_is_finite, state.values()))]
    if not bad and not kept:
        return None
    what = f"{len(bad)} weights ({', '.join(bad[:3])})" if bad else f"the optimizer's state of {len(kept)} weights"
    return (
        f"After step {step} {what} are not finite; no checkpoint is made of them. The checkpoints before are kept: "
        "resume one, or begin again with a lower learning rate."
    )


def all_finite(*values: float) -> bool:
    """Whether every number is finite."""
    return all(map(math.isfinite, values))


def _without_images(part: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in part.items()
        if (isinstance(value, Tensor) and 1 <= value.ndim < IMAGE_DIMS) or isinstance(value, list)
    }


def _num_samples(part: Mapping[str, Any]) -> int:
    return next((len(part[key]) for key in PER_SAMPLE if key in part), 0)


def _per_sample(part: Mapping[str, Any]) -> dict[str, Any]:
    """The values with a row a sample: a preprocessed batch may have others, as one a camera and sample."""
    return {key: value for key, value in part.items() if len(value) == _num_samples(part)}


def _is_finite(value: Any) -> bool:
    """Of a tensor that is cut across ranks, the part of this one."""
    if isinstance(value, DTensor):
        value = value.to_local()
    return not isinstance(value, Tensor) or not value.is_floating_point() or bool(torch.isfinite(value).all())
