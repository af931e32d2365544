# SPDX-License-Identifier: Apache-2.0
"""LIBERO: the simulator as upstream's with honoured seeds, its set-up without network, and a scripted recorder."""

from __future__ import annotations

from embodix.hookspecs import Registration, hookimpl

RENDERINGS = ("upstream", "fast")


@hookimpl
def register_environments() -> list[Registration]:
    return [
        Registration(
            "embodix_libero",
            "embodix_libero.environment:EmbodixLiberoConfig",
            "LIBERO as upstream's, seeds honoured, resets and rendering only when needed",
        )
    ]


@hookimpl
def register_data_sources() -> list[Registration]:
    target = "embodix_libero.recorder:record_libero"
    return [Registration("libero", target, "demonstrations of a scripted controller in LIBERO")]


@hookimpl
def register_config_packages() -> list[Registration]:
    return [Registration("libero", "embodix_libero.hydra_conf:__name__", "LIBERO's suites, rendering, recordings")]
