# SPDX-License-Identifier: Apache-2.0
"""How far a low-precision computation is from its reference: measures of one tensor, and what a comparison holds.

Everything is summed in float64. A signal-to-quantization-noise ratio (SQNR) is infinite where nothing changed, and JSON
says ``"exact"`` for it.

Shape suffixes: N rows (outputs of a layer), K columns, B samples, T action steps, A action dimensions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

EXACT = "exact"


def sqnr_db(reference: Tensor, got: Tensor) -> float:
    """``10 log10(|reference|^2 / |reference - got|^2)`` in decibels.

    Infinite where both are equal, minus infinity where the reference is zero and ``got`` is not.
    """
    noise = float((reference.detach().double() - got.detach().double()).square().sum())
    return _decibels(float(reference.detach().double().square().sum()), noise)


def worst_row_sqnr_db(reference_NK: Tensor, got_NK: Tensor) -> float:
    """The smallest SQNR of a row: of the weights of one output.

    The SQNR of a whole weight hides rows that were lost beside a large one, since the large one has all the energy.
    """
    signal_N = reference_NK.detach().double().square().sum(dim=1)
    noise_N = (reference_NK.detach().double() - got_NK.detach().double()).square().sum(dim=1)
    wrong = ~(noise_N == 0)  # NaN, too
    if not bool(wrong.any()):
        return math.inf
    ratio = float((signal_N[wrong] / noise_N[wrong]).min())
    return 10 * math.log10(ratio) if ratio > 0 else -math.inf


def relative_error(reference: Tensor, got: Tensor) -> float:
    """``|reference - got| / |reference|``; 0 when both are zero, infinite when only the reference is."""
    noise = float((reference.detach().double() - got.detach().double()).norm())
    signal = float(reference.detach().double().norm())
    if signal == 0:
        return 0.0 if noise == 0 else math.inf
    return noise / signal


def cosines(reference: Tensor, got: Tensor) -> Tensor:
    """``[B]`` cosine of each sample with itself in the other computation; 1 where both are zero, 0 where one is."""
    one, other = reference.detach().double().flatten(1), got.detach().double().flatten(1)
    lengths = one.norm(dim=1) * other.norm(dim=1)
    both_zero = (one == 0).all(dim=1) & (other == 0).all(dim=1)
    cosine = (one * other).sum(dim=1) / torch.where(lengths > 0, lengths, torch.ones_like(lengths))
    return torch.where(both_zero, torch.ones_like(cosine), cosine).clamp(-1.0, 1.0)


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    if not math.isfinite(noise) or not math.isfinite(signal):
        return -math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


@dataclass(frozen=True)
class LayerAccuracy:
    """One converted module; what was not computed is None.

    Attributes:
        path: full module path.
        shape: of its weight.
        order: place among the converted modules that are computed, from 1: at most so many products lie before its
            output. None where the policy does not compute it.
        weight_db, weight_row_db: SQNR of the weight, and of its worst row.
        weight_error: relative error of the weight.
        input_db, output_db: SQNR of its input and output, errors of earlier modules included.
        output_gradient_db: SQNR of the loss's gradient at its output.
        weight_gradient_db, weight_gradient_cosine: of the gradient of its weight, where it is trained.
    """

    path: str
    shape: tuple[int, ...]
    order: int | None = None
    weight_db: float | None = None
    weight_row_db: float | None = None
    weight_error: float | None = None
    input_db: float | None = None
    output_db: float | None = None
    output_gradient_db: float | None = None
    weight_gradient_db: float | None = None
    weight_gradient_cosine: float | None = None


@dataclass(frozen=True)
class DimensionError:
    """Errors of one action dimension, in the physical units of the data set.

    Attributes:
        name: of the dimension.
        largest, rms: over samples and action steps.
        unit: what one of the policy's normalised units is; with quantile or min-max normalisation half the range.
    """

    name: str
    largest: float
    rms: float
    unit: float


@dataclass(frozen=True)
class ChunkAccuracy:
    """Action chunks after the whole denoising loop from the same noise.

    Attributes:
        cosine_by_step: mean over samples after each denoising step.
        worst_by_step: the smallest of a sample.
        relative_error: of all chunks as one vector.
        dimensions: errors by action dimension.
        state_dtypes: dtypes of the denoising state.
    """

    cosine_by_step: list[float]
    worst_by_step: list[float]
    relative_error: float
    dimensions: list[DimensionError]
    state_dtypes: list[str]

    @property
    def cosine(self) -> float:
        """Of the final chunk, mean over samples."""
        return self.cosine_by_step[-1]

    @property
    def worst_cosine(self) -> float:
        """Of the final chunk, the worst sample."""
        return self.worst_by_step[-1]


@dataclass(frozen=True)
class LossAccuracy:
    """The training loss on the same samples, noise and times.

    Attributes:
        reference, got: mean over the batches.
        velocity_power: mean square of the velocity that the loss is about, per element.
    """

    reference: float
    got: float
    velocity_power: float

    @property
    def relative_change(self) -> float:
        if self.reference == 0:
            return 0.0 if self.got == 0 else math.inf
        return abs(self.got - self.reference) / abs(self.reference)


@dataclass(frozen=True)
class Comparison:
    """A computation against its reference.

    Attributes:
        reference, got: the two in words.
        layers: the converted modules.
        outside: modules that were converted although they are no part of the language model, or changed unsaid.
    """

    reference: str
    got: str
    num_samples: int
    chunk: ChunkAccuracy
    loss: LossAccuracy
    layers: list[LayerAccuracy]
    outside: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain containers; an infinite ratio is ``"exact"`` or ``"lost"``."""
        record = dataclasses.asdict(self)
        record["chunk"] |= {"cosine": self.chunk.cosine, "worst_cosine": self.chunk.worst_cosine}
        record["loss"]["relative_change"] = self.loss.relative_change
        plain: dict[str, Any] = plain_numbers(record)
        return plain


def plain_numbers(value: Any) -> Any:
    """The value with infinities and NaN, which JSON lacks, in words."""
    if isinstance(value, Mapping):
        return {key: plain_numbers(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain_numbers(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return EXACT if value == math.inf else "lost" if value == -math.inf else "not a number"
    return value


def action_errors(
    reference_BTA: Tensor, got_BTA: Tensor, units_A: Tensor, names: Sequence[str]
) -> list[DimensionError]:
    """Errors by action dimension of chunks in physical units.

    Args:
        units_A: one normalised unit of each dimension.

    Raises:
        ValueError: another number of names than dimensions.
    """
    if len(names) != reference_BTA.shape[-1]:
        raise ValueError(f"{reference_BTA.shape[-1]} action dimensions need as many names; got {list(names)}.")
    reference, got = reference_BTA.double().flatten(0, 1), got_BTA.double().flatten(0, 1)
    difference = (got - reference).abs()
    return [
        DimensionError(
            name,
            largest=float(difference[:, index].max()),
            rms=float(difference[:, index].square().mean().sqrt()),
            unit=float(units_A[index]),
        )
        for index, name in enumerate(names)
    ]
