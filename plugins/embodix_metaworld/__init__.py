# SPDX-License-Identifier: Apache-2.0
"""MetaWorld: the simulator with several cameras and honoured seeds, and the recorder of its scripted experts."""

from __future__ import annotations

from embodix.hookspecs import Registration, hookimpl


@hookimpl
def register_environments() -> list[Registration]:
    target = "embodix_metaworld.environment:EmbodixMetaworldConfig"
    return [Registration("embodix_metaworld", target, "MetaWorld with several cameras and honoured seeds")]


@hookimpl
def register_data_sources() -> list[Registration]:
    target = "embodix_metaworld.recorder:record_metaworld"
    return [Registration("metaworld", target, "demonstrations of MetaWorld's scripted experts")]


@hookimpl
def register_config_packages() -> list[Registration]:
    return [Registration("metaworld", "embodix_metaworld.hydra_conf:__name__", "MetaWorld's tasks and recordings")]
