# SPDX-License-Identifier: Apache-2.0
"""Model types that RLinf's workers build through its ``register_model`` hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embodix_rl.rlinf.task_config import FLOW_MODEL, LATENCY_MODEL


def build_latency_policy(cfg: Any, torch_dtype: Any) -> Any:
    """The policy with declared times."""
    from embodix_rl.rlinf.latency_policy import LatencyPolicy

    return LatencyPolicy.of(cfg)


def build_flow_policy(cfg: Any, torch_dtype: Any) -> Any:
    """A flow-matching policy of LeRobot."""
    from embodix_rl.rlinf.flow_model import build_flow_model

    return build_flow_model(cfg)


MODEL_BUILDERS: dict[str, Callable[[Any, Any], Any]] = {
    LATENCY_MODEL: build_latency_policy,
    FLOW_MODEL: build_flow_policy,
}
