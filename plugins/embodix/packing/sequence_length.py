# SPDX-License-Identifier: Apache-2.0
"""Token-budget batches in few fixed shapes, for compilers and CUDA graphs.

A shape is a triple (prefix rows, samples, images). The bins are packed for the largest one; each is computed in the
smallest that holds it, filled up with blank rows, samples and images, so that every linear layer of the model sees
``num_shapes`` different inputs at most. Attention still sees the true lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embodix.packing.batches import require_bins_per_step
from embodix.packing.bins import Bins, Limits, best_fit
from embodix.packing.layout import PackedLayout, PaddingFreePacker
from embodix.packing.sample_cost import CostModel, IntArray, SampleSizes


@dataclass(frozen=True)
class ComputedShape:
    """What is computed, padding included."""

    rows: int
    samples: int
    images: int

    def holds(self, rows: int, samples: int, images: int) -> bool:
        return rows <= self.rows and samples <= self.samples and images <= self.images


class SequenceLengthPacker:
    """Packs bins up to ``rows`` prefix tokens and pads each to one of ``num_shapes`` shapes.

    Args:
        rows: prefix rows of the largest shape; None for ``samples_per_bin`` times the mean prefix of a sample, or the
            largest prefix.
        num_shapes: shapes, in equal steps up to the largest.
        max_samples: samples of the largest shape; None for one and a half times ``samples_per_bin``.
        max_images: images of the largest shape; None for as many as fit into its rows.
        look_ahead: samples that may be passed over, see :func:`embodix.packing.bins.best_fit`.
        bins_per_step: micro-batches of a step on each rank.

    Raises:
        ValueError: a number below one.
    """

    name = "sequence_length"

    def __init__(
        self,
        rows: int | None = None,
        num_shapes: int = 4,
        max_samples: int | None = None,
        max_images: int | None = None,
        look_ahead: int = 256,
        bins_per_step: int = 1,
    ) -> None:
        Limits(1 if rows is None else rows, max_samples, max_images)
        if num_shapes < 1 or look_ahead < 1:
            raise ValueError(f"num_shapes and look_ahead are 1 or more; got {num_shapes} and {look_ahead}.")
        self.bins_per_step = require_bins_per_step(bins_per_step)
        self.cost_model = CostModel()
        self.shapes: tuple[ComputedShape, ...] = ()
        self._asked = (rows, max_samples, max_images)
        self.num_shapes = num_shapes
        self._look_ahead = look_ahead
        self._padding_free = PaddingFreePacker()

    def layout(self, valid_BS: Tensor) -> PackedLayout:
        """The valid rows; :meth:`pad` fills them up for a training step."""
        return self._padding_free.layout(valid_BS)

    def compose(self, samples_N: IntArray, sizes: SampleSizes, samples_per_bin: float, cost: CostModel) -> Bins:
        """Bins that the largest shape holds, see :class:`embodix.contracts.BatchComposer`.

        The shapes are set by the first epoch that is composed; ``cost`` does not matter to them.
        """
        prefix_N, images_N = sizes.prefix_N[samples_N], sizes.images_N[samples_N]
        if not self.shapes:
            self.shapes = self._choose_shapes(sizes, samples_per_bin)
        largest = self.shapes[-1]
        limits = Limits(largest.rows, largest.samples, max(1, largest.images))
        return best_fit(samples_N, prefix_N.astype("float64"), images_N, limits, self._look_ahead)

    def pad(self, layout: PackedLayout, num_images: int) -> PackedLayout:
        """The layout with blank rows up to the smallest shape that holds it; as it is before batches are composed.

        Raises:
            ValueError: a batch larger than the largest shape.
        """
        if not self.shapes:
            return layout
        needed = (layout.num_valid, layout.batch_size, num_images)
        shape = next((shape for shape in self.shapes if shape.holds(*needed)), None)
        if shape is None:
            raise ValueError(
                f"A batch of {needed[0]} prefix tokens, {needed[1]} samples and {needed[2]} images is larger than the "
                f"largest shape {self.shapes[-1]}; train on the batches that this packer composes."
            )
        num_blank = shape.rows - layout.num_valid
        blank = torch.full((num_blank,), layout.blank_row, device=layout.rows_N.device)
        return replace(
            layout,
            rows_N=torch.cat([layout.rows_N, blank]),
            positions_N=torch.cat([layout.positions_N, torch.zeros_like(blank)]),
            valid_rows_V=torch.arange(layout.num_valid, device=blank.device) if num_blank else None,
            num_samples_computed=shape.samples,
            num_images_computed=shape.images,
        )

    def _choose_shapes(self, sizes: SampleSizes, samples_per_bin: float) -> tuple[ComputedShape, ...]:
        """From the whole data set, so that they do not depend on the epoch."""
        rows, samples, images = self._asked
        rows = rows or max(int(sizes.prefix_N.max()), math.floor(samples_per_bin * float(sizes.prefix_N.mean())))
        samples = samples or math.ceil(1.5 * samples_per_bin)
        if images is None:
            images = math.floor(rows * float((sizes.images_N / sizes.prefix_N).max()))
        steps = [(index + 1) / self.num_shapes for index in range(self.num_shapes)]
        return tuple(
            ComputedShape(math.ceil(rows * step), math.ceil(samples * step), math.ceil(images * step)) for step in steps
        )
