# SPDX-License-Identifier: Apache-2.0
"""Parameters that a step computes no gradient for stay as they are, as they do without DeepSpeed.

ZeRO steps flat tensors, in which a gradient that is None becomes zeros: the optimizer would decay those weights, and
their moments. Their ranges are put back after each step of the flat tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embodix.policies.functional import ZERO_GRADIENT
from embodix_deepspeed.fragments import fragment_of


class ReadParameters:
    """Which parameters have had a gradient, in this step and ever.

    Args:
        parameters: that are trained, by name.
        elsewhere: a parameter is not here in its shape, so that it can't be given a gradient of zeros.

    Attributes:
        ever: names of those that the optimizer has state of.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], elsewhere: bool) -> None:
        self._parameters = parameters
        self._read: set[str] = set()
        self.ever: set[str] = set()
        self._handles = [p.register_hook(self._marker(name)) for name, p in parameters.items()]
        self._marked = [p for p in parameters.values() if elsewhere]
        for name, parameter in parameters.items():
            if elsewhere:
                setattr(parameter, ZERO_GRADIENT, self._marker(name))

    def _marker(self, name: str) -> Callable[..., None]:
        def mark(*_: Any) -> None:
            self._read.add(name)

        return mark

    def agreed(self, device: torch.device) -> set[str]:
        """Names of those with a gradient in this step; every rank must ask.

        Raises:
            RuntimeError: ranks have gradients of different parameters, which ZeRO exchanges in wrong pairs.
        """
        read = torch.tensor([name in self._read for name in self._parameters], dtype=torch.int32, device=device)
        dist.all_reduce(read)
        partly = [name for name, count in zip(self._parameters, read.tolist(), strict=True) if 0 < count < self._all]
        if partly:
            raise RuntimeError(
                f"ZeRO needs a gradient of the same parameters on every rank; {len(partly)} have one on some ranks "
                f"only, {partly[0]!r} the first. Choose parallel=ddp."
            )
        self.ever |= self._read
        return set(self._read)

    @property
    def _all(self) -> int:
        return dist.get_world_size()

    def step_ended(self) -> None:
        self._read.clear()

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()
        for parameter in self._marked:
            delattr(parameter, ZERO_GRADIENT)


class KeptRanges:
    """Hooks on the wrapped optimizer that put ranges of the flat tensors back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._remember),
            optimizer.register_step_post_hook(self._put_back),
        ]

    def choose(self, zero: Any, parameters: list[nn.Parameter]) -> None:
        """Keep these parameters in the next step."""
        self._ranges = {}
        for parameter in parameters:
            fragment = fragment_of(zero, parameter)
            if fragment is not None:
                self._ranges.setdefault(id(fragment.flat), []).append((fragment.offset, fragment.numel))

    def _remember(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._kept = []
        for flat in (flat for group in optimizer.param_groups for flat in group["params"]):
            state = [value for value in optimizer.state.get(flat, {}).values() if _like(value, flat)]
            for offset, numel in self._ranges.get(id(flat), []):
                parts = [tensor.detach().narrow(0, offset, numel) for tensor in (flat, *state)]
                self._kept += [(part, part.clone()) for part in parts]

    def _put_back(self, *_: Any) -> None:
        for part, value in self._kept:
            part.copy_(value)
        self._kept = []

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()


def _like(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape
