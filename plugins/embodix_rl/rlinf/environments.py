# SPDX-License-Identifier: Apache-2.0
"""The environments that `rlinf_environment_registry` gives to RLinf's environment workers."""

from __future__ import annotations

import importlib
from typing import Any

ENVIRONMENTS = {
    "latency": "embodix_rl.rlinf.latency_env:LatencyEnv",
    "simulators": "embodix_rl.rlinf.simulator_env:SimulatorEnv",
}


def environment_class(env_cfg: Any) -> Any:
    """The class for a config whose node ``embodix`` names it.

    Raises:
        ValueError: an unknown name.
    """
    name = str(env_cfg.embodix.environment)
    if name not in ENVIRONMENTS:
        raise ValueError(f"No environment is called {name!r}; known: {', '.join(ENVIRONMENTS)}.")
    module, _, attribute = ENVIRONMENTS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
