# SPDX-License-Identifier: Apache-2.0
"""Sizes of all samples of a data set, for packers that compose batches; images are not decoded.

A policy wrapper that has :class:`MeasuresSamples`' method can be trained with such a packer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

from embodix.contracts import MeasuresSamples
from embodix.data.preprocessing import CAMERA_PAD_KEY
from embodix.packing.sample_cost import IntArray, SampleSizes

Preprocessor = Callable[[dict[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class SizedDataset:
    """A ``LeRobotDataset`` and how its samples become batches.

    Attributes:
        dataset: the data set.
        preprocess: upstream's preprocessor for it, on the CPU.
        camera_columns: policy slot of each column of its own ``camera_is_pad``, None for a camera that is left out;
            None where the columns are the policy's cameras in their order.
    """

    dataset: Any
    preprocess: Preprocessor
    camera_columns: tuple[str | None, ...] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def column(self, name: str) -> np.ndarray:
        """One column of all samples, read without the others."""
        return np.asarray(self.dataset.hf_dataset.select_columns([name]).with_format("numpy")[:][name])

    def task_names(self) -> list[str]:
        """The instruction of each task index."""
        return [str(name) for name in self.dataset.meta.tasks.index]

    def preprocessed(self, samples: Sequence[int]) -> Mapping[str, Any]:
        """A batch as the policy sees it, images included."""
        return self.preprocess(default_collate([self.dataset[index] for index in samples]))

    def num_absent(self) -> IntArray:
        """``[num_samples]``: cameras that each sample's ``camera_is_pad`` marks absent, those left out apart."""
        if CAMERA_PAD_KEY not in self.dataset.meta.features:
            return np.zeros(len(self), dtype=np.int64)
        absent_NC: IntArray = self.column(CAMERA_PAD_KEY).reshape(len(self), -1).astype(np.int64)
        if self.camera_columns is not None:
            absent_NC = absent_NC[:, [slot is not None for slot in self.camera_columns]]
        return np.asarray(absent_NC.sum(axis=1), dtype=np.int64)


def measure_samples(
    wrapper: Any, policy: nn.Module, datasets: Sequence[SizedDataset], flow_samples: int, quiet: bool = False
) -> SampleSizes:
    """Sizes of all samples, with a progress bar unless ``quiet``; the random state is left as it was.

    Raises:
        ValueError: the policy's wrapper can't tell sizes.
    """
    if not isinstance(wrapper, MeasuresSamples):
        raise ValueError(
            f"Composing batches by size needs a policy wrapper with a method sample_sizes; "
            f"{type(wrapper).__name__} has none. Choose packing=padding_free or none for this policy."
        )
    from rich.progress import Progress

    total = sum(len(part) for part in datasets)
    with torch.random.fork_rng(devices=[]), Progress(transient=True, disable=quiet) as bar:
        task = bar.add_task(f"Measuring {total} samples", total=total)
        return wrapper.sample_sizes(policy, datasets, flow_samples, lambda count: bar.advance(task, count))
