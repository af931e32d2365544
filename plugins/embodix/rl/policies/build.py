# SPDX-License-Identifier: Apache-2.0
"""The flow policy of a LeRobot policy, by its type."""

from __future__ import annotations

from typing import Any

from embodix.policies.settings import FastPathSettings
from embodix.rl.policies.chain import ChainSettings
from embodix.rl.policies.flow import FlowHost
from embodix.rl.policies.flow_policy import FlowPolicy
from embodix.rl.policies.groot_n15 import GrootFlow
from embodix.rl.policies.pi05 import Pi05Flow
from embodix.rl.policies.value_head import ValueSettings

FLOWS: dict[str, type[Pi05Flow] | type[GrootFlow]] = {"pi05": Pi05Flow, "groot": GrootFlow}


def flow_policy(
    policy: Any, settings: FastPathSettings, chain: ChainSettings, value: ValueSettings | None = None
) -> FlowPolicy:
    """A π0.5 or GR00T-N1.5 of LeRobot with log-probabilities.

    Args:
        policy: upstream's policy, loaded, on its device; a fast path or a quantization may be installed on it.
        settings: of the packed computation; ``attention=None`` computes upstream's dense attention.
        chain: where noise is drawn, and how much.
        value: the value head; None for none.

    Raises:
        ValueError: another policy type, or settings that don't fit it.
    """
    policy_type = getattr(getattr(policy, "config", None), "type", type(policy).__name__)
    if policy_type not in FLOWS:
        raise ValueError(
            f"Log-probabilities are known for policies of type {' and '.join(FLOWS)}; got {policy_type!r}."
        )
    host: FlowHost = FLOWS[policy_type](policy, settings)
    return FlowPolicy(policy, host, chain, value)
