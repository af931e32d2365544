# SPDX-License-Identifier: Apache-2.0
"""The flow policy of a LeRobot policy, by its type."""

from __future__ import annotations

from typing import Any

from embodix.policies.settings import FastPathSettings
from embodix.policies.support import require_offered
from embodix_rl.flow.chain import ChainSettings
from embodix_rl.flow.flow_policy import FlowPolicy
from embodix_rl.flow.value_head import ValueSettings


def flow_policy(
    policy: Any, settings: FastPathSettings, chain: ChainSettings, value: ValueSettings | None = None
) -> FlowPolicy:
    """A policy of LeRobot with log-probabilities.

    Args:
        policy: upstream's policy, loaded, on its device; a fast path or a quantization may be installed on it.
        settings: of the packed computation; ``attention=None`` computes upstream's dense attention.
        chain: where noise is drawn, and how much.
        value: the value head; None for none.

    Raises:
        embodix.contracts.NotOfferedError: a policy type without a flow.
        ValueError: settings that don't fit it.
    """
    policy_type = getattr(getattr(policy, "config", None), "type", type(policy).__name__)
    known = "Log-probabilities are known for policies of type"
    support = require_offered(policy_type, "flow", known, "Choose one of these.")
    return FlowPolicy(policy, support.flow(policy, settings), chain, value)
