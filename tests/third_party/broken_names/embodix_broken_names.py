# SPDX-License-Identifier: Apache-2.0
"""A plugin that takes a name which another has registered."""

from embodix import Registration, hookimpl


@hookimpl
def register_packers() -> list[Registration]:
    return [Registration("padding_free", "embodix_broken_names:Mine", "a name that is taken")]
