# SPDX-License-Identifier: Apache-2.0
"""A plugin whose hook asks for an argument that the specification does not offer."""

from embodix import Registration, hookimpl


@hookimpl
def register_packers(policy_type: str) -> list[Registration]:
    return [Registration("lost", "embodix_broken_arguments:Lost", f"never registered for {policy_type}")]
