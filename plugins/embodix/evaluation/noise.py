# SPDX-License-Identifier: Apache-2.0
"""Random draws of a policy, row by row from the episode that the row belongs to.

A policy draws noise for a whole batch from one stream, so an episode's noise would depend on who shares its batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from embodix.evaluation.episodes import Episode

Draw = Callable[[torch.Generator], Tensor]


def seed_from(*parts: Any) -> int:
    """A seed of 63 bits out of anything that prints the same in every process."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def episode_generator(episode: Episode) -> torch.Generator:
    """The random stream of an episode; on the CPU, so that every device sees the same numbers."""
    return torch.Generator().manual_seed(seed_from(episode.task, episode.seed))


class EpisodeNoise(TorchFunctionMode):
    """Inside, ``torch.randn``, ``rand``, ``normal``, ``randn_like`` and ``rand_like`` fill row b of a tensor
    ``[B, ...]`` from ``generators[b]``.

    Draws of another leading size, with a generator of their own or by another function are torch's own.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self._generators = generators

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        draw = _ROW_DRAWS.get(func)
        if draw is None or kwargs.get("generator") is not None or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        rows = draw(args, dict(kwargs), len(self._generators))
        if rows is None:
            return func(*args, **kwargs)
        row_of, device = rows
        drawn = torch.cat([row_of(index, generator) for index, generator in enumerate(self._generators)])
        return drawn if device is None else drawn.to(device)


RowOf = Callable[[int, torch.Generator], Tensor]
Rows = tuple[RowOf, Any] | None


def _sized(func: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any], num_leading: int, B: int) -> Rows:
    """Rows of ``func(*leading, size, ...)``, the size given as a tuple, as numbers or by name."""
    leading, rest = args[:num_leading], args[num_leading:]
    options = {key: value for key, value in kwargs.items() if key not in ("size", "device", "generator", "out")}
    size = kwargs.get("size", rest[0] if len(rest) == 1 and isinstance(rest[0], Sequence) else rest)
    if not len(size) or size[0] != B:
        return None
    row_size = (1, *size[1:])
    return lambda _, generator: func(*leading, row_size, generator=generator, **options), kwargs.get("device")


def _like(func: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any], B: int) -> Rows:
    """Rows of ``func_like(tensor)``."""
    like = args[0]
    if like.ndim == 0 or like.shape[0] != B:
        return None
    row_size, dtype = (1, *like.shape[1:]), kwargs.get("dtype") or like.dtype
    return lambda _, generator: func(row_size, generator=generator, dtype=dtype), kwargs.get("device") or like.device


def _normal(args: Sequence[Any], kwargs: dict[str, Any], B: int) -> Rows:
    """Rows of ``torch.normal`` with numbers and a size, or with tensors of means and deviations."""
    mean, std = (kwargs.pop(name, args[at] if len(args) > at else 1.0) for at, name in enumerate(("mean", "std")))
    if not isinstance(mean, Tensor) and not isinstance(std, Tensor):
        return _sized(torch.normal, (mean, std, *args[2:]), kwargs, 2, B)
    mean, std = torch.broadcast_tensors(torch.as_tensor(mean), torch.as_tensor(std))
    rows = _like(torch.randn, (mean,), kwargs, B)
    if rows is None:
        return None
    row_of, device = rows
    means, deviations = mean.cpu(), std.cpu()
    return lambda b, generator: means[b : b + 1] + deviations[b : b + 1] * row_of(b, generator), device


_ROW_DRAWS: dict[Any, Callable[[Sequence[Any], dict[str, Any], int], Rows]] = {
    torch.randn: lambda args, kwargs, B: _sized(torch.randn, args, kwargs, 0, B),
    torch.rand: lambda args, kwargs, B: _sized(torch.rand, args, kwargs, 0, B),
    torch.randn_like: lambda args, kwargs, B: _like(torch.randn, args, kwargs, B),
    torch.rand_like: lambda args, kwargs, B: _like(torch.rand, args, kwargs, B),
    torch.normal: _normal,
}
