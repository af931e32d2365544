# SPDX-License-Identifier: Apache-2.0
"""PushT: LeRobot's own environment, which honours seeds, as a choice of the group ``env``."""

from __future__ import annotations

from embodix.hookspecs import Registration, hookimpl


@hookimpl
def register_config_packages() -> list[Registration]:
    return [Registration("pusht", "embodix_pusht.hydra_conf:__name__", "PushT")]
