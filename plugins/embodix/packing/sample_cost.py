# SPDX-License-Identifier: Apache-2.0
"""How large each sample of a data set is, known before anything is loaded, and what it costs.

The cost is ``a * tokens**2 + b * tokens + c * images``, given or fitted to measured steps: tokens go through linear
layers (b), attend to the tokens of their own sample (a), and images go through the vision tower (c). The same model as
in LoongForge's data-parallel balancing. Shape suffixes: N samples of the data set, S measured steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class SampleSizes:
    """Sizes of every sample, by dataset index.

    Attributes:
        prefix_N: int64 tokens of the prefix: real images and the prompt.
        images_N: int64 real images.
        num_actions: action tokens of a sample, the same for all.

    Raises:
        ValueError: arrays of different lengths, no samples, or a sample without a token.
    """

    prefix_N: IntArray
    images_N: IntArray
    num_actions: int = 0

    def __post_init__(self) -> None:
        if self.prefix_N.ndim != 1 or self.prefix_N.shape != self.images_N.shape or not self.prefix_N.size:
            raise ValueError(
                "Sample sizes are two one-dimensional arrays of one entry a sample; got shapes "
                f"{self.prefix_N.shape} and {self.images_N.shape}."
            )
        if int(self.prefix_N.min()) < 1 or int(self.images_N.min()) < 0 or self.num_actions < 0:
            raise ValueError(
                "Every sample has one prefix token at least and no negative counts; got a smallest prefix of "
                f"{self.prefix_N.min()}, images of {self.images_N.min()} and {self.num_actions} action tokens."
            )

    def __len__(self) -> int:
        return int(self.prefix_N.size)

    @property
    def tokens(self) -> IntArray:
        """``[N]`` prefix and action tokens of each sample."""
        return self.prefix_N + self.num_actions

    @classmethod
    def equal(cls, num_samples: int) -> SampleSizes:
        """Every sample counts one: for composing by number alone."""
        ones = np.ones(num_samples, dtype=np.int64)
        return cls(ones, np.zeros_like(ones))


# A term is kept only if leaving it out makes the residual of the fit this much larger.
WORTH_A_TERM = 1.1


@dataclass(frozen=True)
class CostModel:
    """Coefficients, in any unit; see :meth:`in_tokens`. The default counts tokens.

    Raises:
        ValueError: a negative or infinite coefficient, or none above zero.
    """

    tokens: float = 1.0
    tokens_squared: float = 0.0
    images: float = 0.0

    def __post_init__(self) -> None:
        values = (self.tokens, self.tokens_squared, self.images)
        if not all(np.isfinite(value) and value >= 0 for value in values) or not any(values):
            raise ValueError(
                "A cost model has coefficients tokens, tokens_squared and images, none negative and one above zero; "
                f"got {asdict(self)}."
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, float]) -> CostModel:
        """A model from a config's mapping; a coefficient that is left out is zero.

        Raises:
            ValueError: an unknown coefficient.
        """
        known = ("tokens", "tokens_squared", "images")
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"A cost model has the coefficients {', '.join(known)}; got also {', '.join(unknown)}.")
        return cls(**{name: float(values.get(name, 0.0)) for name in known})

    def costs(self, sizes: SampleSizes) -> FloatArray:
        """``[N]`` cost of each sample."""
        tokens_N = sizes.tokens.astype(np.float64)
        return self.tokens * tokens_N + self.tokens_squared * tokens_N**2 + self.images * sizes.images_N

    def in_tokens(self, sizes: SampleSizes) -> CostModel:
        """The same model scaled so that the mean sample costs as many units as it has tokens.

        A budget then means the same whether it is filled by tokens or by cost.
        """
        scale = float(sizes.tokens.mean()) / float(self.costs(sizes).mean())
        return CostModel(self.tokens * scale, self.tokens_squared * scale, self.images * scale)


@dataclass(frozen=True)
class MeasuredBin:
    """One bin that was trained: what it held and how long forward and backward took."""

    tokens: int
    tokens_squared: int
    images: int
    seconds: float

    @classmethod
    def of(cls, samples: IntArray, sizes: SampleSizes, seconds: float) -> MeasuredBin:
        """What the samples of a bin add up to."""
        tokens = sizes.tokens[samples]
        return cls(int(tokens.sum()), int((tokens**2).sum()), int(sizes.images_N[samples].sum()), seconds)


def fit_cost(measured: Sequence[MeasuredBin]) -> CostModel | None:
    """Non-negative least squares over measured bins, in seconds; None where they explain nothing.

    Tokens are always a term. Squared tokens and images become terms where that makes the residual smaller by a tenth
    at least, so that bins which are all alike (as a token budget makes them) are not explained by noise.
    """
    if len(measured) < 4:
        return None
    columns_S3 = np.array([[m.tokens, m.tokens_squared, m.images] for m in measured], dtype=np.float64)
    seconds_S = np.array([m.seconds for m in measured])
    scale_3 = np.maximum(columns_S3.max(axis=0), 1.0)
    fits = []
    for extra in itertools.chain.from_iterable(itertools.combinations((1, 2), size) for size in (0, 1, 2)):
        terms = [0, *extra]
        found, _, rank, _ = np.linalg.lstsq(columns_S3[:, terms] / scale_3[terms], seconds_S, rcond=1e-9)
        if rank < len(terms) or found.min() < 0 or found[0] <= 0:
            continue
        residual = float(np.linalg.norm(columns_S3[:, terms] / scale_3[terms] @ found - seconds_S))
        fits.append((residual, terms, found))
    if not fits:
        return None
    best = min(residual for residual, _, _ in fits)
    _, terms, found = next(fit for fit in fits if fit[0] <= WORTH_A_TERM * best + 1e-12)
    coefficients = np.zeros(3)
    coefficients[terms] = found / scale_3[terms]
    return CostModel(*map(float, coefficients))
