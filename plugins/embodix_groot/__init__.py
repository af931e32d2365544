# SPDX-License-Identifier: Apache-2.0
"""GR00T-N1.5: packed training, sampling with log-probabilities, and everything else that embodix knows of it."""

from __future__ import annotations

from embodix.hookspecs import Registration, hookimpl


@hookimpl
def register_policies() -> list[Registration]:
    return [Registration("groot", "embodix_groot.record:GrootN15", "packed GR00T-N1.5 on upstream's GrootPolicy")]


@hookimpl
def register_host_patches() -> list[Registration]:
    patches = "embodix_groot.patches"
    return [
        Registration("lerobot_groot_runs", f"{patches}.lerobot_groot_runs:PATCH", "runs with today's transformers"),
        Registration("lerobot_groot_sizes", f"{patches}.lerobot_groot_sizes:PATCH", "GR00T-N1.5 in any size"),
        Registration("lerobot_groot_samples", f"{patches}.lerobot_groot_samples:PATCH", "each sample its text"),
        Registration("lerobot_groot_strict_load", f"{patches}.lerobot_groot_strict_load:PATCH", "loads the file"),
        Registration("lerobot_groot_action_queue", f"{patches}.lerobot_groot_action_queue:PATCH", "real actions only"),
    ]


@hookimpl
def register_config_packages() -> list[Registration]:
    return [
        Registration("groot", "embodix_groot.hydra_conf:__name__", "sizes of GR00T-N1.5, experiments that train it")
    ]
