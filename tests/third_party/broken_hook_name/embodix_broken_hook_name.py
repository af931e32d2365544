# SPDX-License-Identifier: Apache-2.0
"""A plugin that misspells a hook."""

from embodix import Registration, hookimpl


@hookimpl
def register_packer() -> list[Registration]:
    return [Registration("lost", "embodix_broken_hook_name:Lost", "never registered")]
