# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO: optimizer state, gradients and parameters cut across processes."""

from __future__ import annotations

from embodix.hookspecs import Registration, hookimpl


@hookimpl
def register_parallel_strategies() -> list[Registration]:
    strategies = "embodix_deepspeed.strategies"
    return [
        Registration("zero1", f"{strategies}:Zero1Strategy", "optimizer state cut across processes (DeepSpeed)"),
        Registration("zero2", f"{strategies}:Zero2Strategy", "gradients too (DeepSpeed)"),
        Registration("zero3", f"{strategies}:Zero3Strategy", "parameters too (DeepSpeed)"),
    ]


@hookimpl
def register_config_packages() -> list[Registration]:
    return [Registration("deepspeed", "embodix_deepspeed.hydra_conf:__name__", "options of parallel by DeepSpeed")]
