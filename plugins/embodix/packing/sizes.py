# SPDX-License-Identifier: Apache-2.0
"""How large each sample of a data set is, known before anything is loaded.

Shape suffixes: N samples of the data set.
"""

from __future__ import annotations

from dataclasses import dataclass

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
