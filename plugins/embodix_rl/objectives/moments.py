# SPDX-License-Identifier: Apache-2.0
"""Mean and variance of a global batch from the statistics of its parts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of the valid elements of a part; parts merge exactly.

    Ranks exchange ``to_tensor()``, three numbers, and merge what they get in one order.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Tensor, valid: Tensor) -> Moments:
        """Of the elements where ``valid``, computed in fp64."""
        chosen = values[valid].double()
        if not chosen.numel():
            return cls()
        mean = chosen.mean()
        return cls(chosen.numel(), mean.item(), (chosen - mean).square().sum().item())

    def __add__(self, other: Moments) -> Moments:
        """Of both parts together (Chan, Golub and LeVeque, 1979)."""
        count = self.count + other.count
        if not count:
            return self
        apart = other.mean - self.mean
        mean = self.mean + apart * other.count / count
        return Moments(count, mean, self.squares + other.squares + apart**2 * self.count * other.count / count)

    @property
    def std(self) -> float:
        """Standard deviation without bias; 0 for fewer than two elements."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def normalise(self, values: Tensor, valid: Tensor, eps: float = 1e-5) -> Tensor:
        """``(values - mean) / (std + eps)`` where ``valid``, 0 elsewhere."""
        normed = (values.double() - self.mean) / (self.std + eps)
        return torch.where(valid, normed, 0.0).to(values.dtype)

    def to_tensor(self) -> Tensor:
        """``[3]``, fp64."""
        return torch.tensor([self.count, self.mean, self.squares], dtype=torch.float64)

    @classmethod
    def from_tensor(cls, numbers: Tensor) -> Moments:
        count, mean, squares = numbers.tolist()
        return cls(int(count), mean, squares)
