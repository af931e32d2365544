# SPDX-License-Identifier: Apache-2.0
"""What this plugin offers. Imports no torch: the targets are imported when they are chosen."""

from embodix import Registration, hookimpl


@hookimpl
def register_packers() -> list[Registration]:
    target = "embodix_example_plugin.packer:BucketedPacker"
    return [Registration("bucketed", target, "valid rows, filled up with padding to a multiple of a fixed number")]


@hookimpl
def register_attention_backends() -> list[Registration]:
    target = "embodix_example_plugin.attention:PaddedSdpa"
    return [Registration("padded_sdpa", target, "one masked SDPA call over segments padded to the longest")]
