# SPDX-License-Identifier: Apache-2.0
"""What a sample costs: ``a * tokens**2 + b * tokens + c * images``, given or fitted to measured steps.

Tokens go through linear layers (b), attend to the tokens of their own sample (a), and images go through the vision
tower (c). The same model as in LoongForge's data-parallel balancing. Shape suffixes: N samples, S measured steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from embodix.packing.sizes import FloatArray, IntArray, SampleSizes

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
