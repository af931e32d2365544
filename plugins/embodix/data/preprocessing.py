# SPDX-License-Identifier: Apache-2.0
"""Preprocessing where the samples are read: upstream's own preprocessor, run by the loader instead of the loop.

A batch that was preprocessed there is marked by its type, and the training loop's preprocessor only moves it to the
device. Samples of several embodiments are preprocessed embodiment by embodiment and merged in their order.

Shape suffixes: B samples, C camera slots, D dimensions (of the widest embodiment).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate, get_worker_info

EMBODIMENT_KEY = "embodiment"
CAMERA_PAD_KEY, ACTION_DIMS_KEY = "camera_is_pad", "action_dims"
Sample = Mapping[str, Any]
Preprocessor = Callable[[dict[str, Any]], dict[str, Any]]


class PreprocessedBatch(dict[str, Any]):
    """A batch as the policy takes it: tokenised, normalised, on the host or already on the device."""


class MicroBatches(list[Any]):
    """The batches of one optimizer step."""


class Merger(Protocol):
    """Puts batches of several embodiments together."""

    def __call__(self, parts: Sequence[EmbodimentPart]) -> PreprocessedBatch: ...


@dataclass(frozen=True)
class EmbodimentPart:
    """The samples of one embodiment in a batch.

    Attributes:
        embodiment: number of the embodiment.
        rows: places of its samples in the batch.
        batch: its samples, preprocessed.
    """

    embodiment: int
    rows: list[int]
    batch: dict[str, Any]


class PreprocessingCollate:
    """Collates samples and preprocesses them; a loader's ``collate_fn``.

    Args:
        preprocessors: upstream's preprocessor of each embodiment, on the CPU.
        merge: how their batches become one; None where there is one embodiment.
    """

    def __init__(self, preprocessors: Sequence[Preprocessor], merge: Merger | None = None) -> None:
        assert merge is not None or len(preprocessors) == 1
        self._preprocessors = list(preprocessors)
        self._merge = merge

    def __call__(self, samples: Sequence[Sample]) -> PreprocessedBatch:
        if get_worker_info() is not None:
            # A forked tokenizer must not start threads of its own; it warns at each use unless this is said.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        if self._merge is None:
            return PreprocessedBatch(self._preprocessors[0](default_collate(list(samples))))
        rows_of: dict[int, list[int]] = {}
        for row, sample in enumerate(samples):
            rows_of.setdefault(int(sample[EMBODIMENT_KEY]), []).append(row)
        return self._merge([self._part(number, rows_of[number], samples) for number in sorted(rows_of)])

    def _part(self, embodiment: int, rows: list[int], samples: Sequence[Sample]) -> EmbodimentPart:
        own = [{key: value for key, value in samples[row].items() if key != EMBODIMENT_KEY} for row in rows]
        return EmbodimentPart(embodiment, rows, self._preprocessors[embodiment](default_collate(own)))


def require_finite_state(key: str, state_BD: torch.Tensor, data: Mapping[str, Any]) -> None:
    """Refuse a state that a policy can't be shown.

    Args:
        key: of the state.
        data: what comes with the batch; its ``index`` names the frames.

    Raises:
        ValueError: NaN or infinity; names the dimension and the frame.
    """
    rows_BD = state_BD.reshape(-1, state_BD.shape[-1])
    odd = (~torch.isfinite(rows_BD)).nonzero()
    if not len(odd):
        return
    row, dimension = (int(place) for place in odd[0])
    frames = data.get("index")
    if isinstance(frames, torch.Tensor) and frames.numel() == len(rows_BD):
        where = f"frame {int(frames.reshape(-1)[row])} of the data set"
    else:
        where = f"sample {row} of the batch"
    raise ValueError(
        f"A policy is shown a state of finite numbers; {key}[{dimension}] of {where} is "
        f"{float(rows_BD[row, dimension])}. Repair or leave out what is not finite in {key} or in its statistics."
    )


class LoopPreprocessor:
    """The training loop's preprocessor: upstream's for raw batches, a move to its device for preprocessed ones.

    Everything else (steps, saving) is upstream's.
    """

    def __init__(self, upstream: Any, device: torch.device) -> None:
        self._upstream = upstream
        self._device = device

    def __call__(self, batch: Any) -> Any:
        if isinstance(batch, MicroBatches):
            return MicroBatches(self(part) for part in batch)
        if isinstance(batch, PreprocessedBatch):
            return PreprocessedBatch({key: self._moved(value) for key, value in batch.items()})
        return self._upstream(batch)

    def _moved(self, value: Any) -> Any:
        # A tensor on some CUDA device stays there: accelerate has placed it on this process's own.
        if not isinstance(value, torch.Tensor) or value.is_cuda:
            return value
        return value.to(self._device, non_blocking=self._device.type == "cuda")

    def __getattr__(self, name: str) -> Any:
        if name == "_upstream":
            raise AttributeError(name)
        return getattr(self._upstream, name)
