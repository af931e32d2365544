# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's step in the place of the optimizer that upstream's loop steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


class ZeroStep:
    """What upstream's loop uses of an optimizer.

    Args:
        engine: DeepSpeed's.
        optimizer: upstream's, whose groups its schedule writes ``lr`` into.
        step_ended: called after each step.
    """

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer, step_ended: Callable[[], None]) -> None:
        self._engine, self._optimizer, self._step_ended = engine, optimizer, step_ended
        self._pre_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Upstream's groups; their parameters are DeepSpeed's flat tensors."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:
        """Of the flat tensors."""
        return self._optimizer.state

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(optimizer, args, kwargs)`` before each step."""
        handle = RemovableHandle(self._pre_hooks)
        self._pre_hooks[handle.id] = hook
        return handle

    def step(self) -> None:
        for hook in tuple(self._pre_hooks.values()):
            hook(self, (), {})
        self._engine.step()
        self._step_ended()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.optimizer.zero_grad(set_to_none=set_to_none)
