# SPDX-License-Identifier: Apache-2.0
"""π0.5: packed training, sampling with log-probabilities, and everything else that embodix knows of it."""

from __future__ import annotations

from embodix.hookspecs import Registration, hookimpl


@hookimpl
def register_policies() -> list[Registration]:
    return [Registration("pi05", "embodix_pi05.record:Pi05", "packed π0.5 on upstream's PI05Policy")]


@hookimpl
def register_host_patches() -> list[Registration]:
    patches = "embodix_pi05.patches"
    return [
        Registration("lerobot_pi05_sizes", f"{patches}.lerobot_pi05_sizes:PATCH", "π0.5 in any size"),
        Registration("lerobot_pi05_prompts", f"{patches}.lerobot_pi05_prompts:PATCH", "prompts keep their state"),
        Registration("lerobot_pi05_strict_load", f"{patches}.lerobot_pi05_strict_load:PATCH", "a failed load fails"),
    ]


@hookimpl
def register_config_packages() -> list[Registration]:
    return [Registration("pi05", "embodix_pi05.hydra_conf:__name__", "sizes of π0.5 and the experiments that train it")]
