# SPDX-License-Identifier: Apache-2.0
"""ManiSkill and Isaac Lab by RLinf's environments: simulators that need an NVIDIA GPU."""

from __future__ import annotations

from embodix.hookspecs import Registration, hookimpl


@hookimpl
def register_environments() -> list[Registration]:
    environments = "embodix_rlinf_sims.environment"
    return [
        Registration(
            "embodix_maniskill",
            f"{environments}:RlinfManiskillConfig",
            "ManiSkill by RLinf's environment (NVIDIA GPU)",
        ),
        Registration(
            "embodix_isaaclab",
            f"{environments}:RlinfIsaaclabConfig",
            "Isaac Lab by RLinf's environment (NVIDIA RTX GPU)",
        ),
    ]


@hookimpl
def register_config_packages() -> list[Registration]:
    return [Registration("rlinf_sims", "embodix_rlinf_sims.hydra_conf:__name__", "ManiSkill and Isaac Lab")]
