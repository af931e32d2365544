# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of matrix products in a forward and backward pass; a multiply-add is two operations.

A backward pass multiplies twice for each forward product: once for the gradient of the input, once for that of the
weight; whatever is frozen, or has nothing trainable before it, saves its share.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Flops:
    """Operations of one sample's forward and backward pass."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.forward + other.forward, self.backward + other.backward)

    def times(self, factor: float) -> Flops:
        return Flops(factor * self.forward, factor * self.backward)


def linear(weights: int, rows: float, *, input_gradient: bool = True, weight_gradient: bool = True) -> Flops:
    """A linear map of ``weights`` weights over ``rows`` rows."""
    product = 2.0 * weights * rows
    return Flops(product, product * (input_gradient + weight_gradient))


def attention_products(width: int, pairs: float, *, gradient: bool = True) -> Flops:
    """Scores and weighted sums over ``pairs`` query-key pairs, ``width`` channels over all heads."""
    products = 4.0 * width * pairs
    return Flops(products, 2 * products * gradient)
