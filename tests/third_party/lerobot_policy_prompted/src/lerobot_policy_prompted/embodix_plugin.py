# SPDX-License-Identifier: Apache-2.0
"""What this distribution offers to embodix. Imports no torch: the targets are imported when they are chosen."""

from embodix import Registration, hookimpl


@hookimpl
def register_policies() -> list[Registration]:
    return [
        Registration("prompted", "lerobot_policy_prompted.record:Prompted", "packed rows of image, state and prompt")
    ]


@hookimpl
def register_config_packages() -> list[Registration]:
    return [Registration("prompted", "lerobot_policy_prompted.hydra_conf:__name__", "the policy's option")]
