# SPDX-License-Identifier: Apache-2.0
"""Where a fast path computes a layer outside of the layer's own ``forward``, so that a sharder still sees it entered.

Sharders gather parameters in hooks on a module's call. A fast path reads the parts of a layer from a function, and
calls that function through ``call_unit``; a sharder that owns the layer puts itself in between with ``enter_by``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

UNIT_CALL = "embodix_unit_call"


def call_unit(entry: nn.Module, function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(entry, *arguments)``, through the sharder of the entry's unit where there is one."""
    entered = entry.__dict__.get(UNIT_CALL)
    return function(entry, *arguments) if entered is None else entered(function, *arguments)


def enter_by(entry: nn.Module) -> str:
    """Give an entry a method that runs functions on it, and return its name for the sharder's hooks."""

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(entry, *arguments)

    entry.__dict__[UNIT_CALL] = run
    return UNIT_CALL
