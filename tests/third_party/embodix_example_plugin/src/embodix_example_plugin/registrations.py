# SPDX-License-Identifier: Apache-2.0
"""What this plugin offers. Imports no torch: the targets are imported when they are chosen."""

from embodix import Registration, hookimpl


@hookimpl
def register_packers() -> list[Registration]:
    package = "embodix_example_plugin"
    return [
        Registration(
            "bucketed", f"{package}.packer:BucketedPacker", "valid rows, filled up to a multiple of a fixed number"
        ),
        Registration("length_sorted", f"{package}.composer:LengthSortedPacker", "batches of samples of similar length"),
    ]


@hookimpl
def register_attention_backends() -> list[Registration]:
    target = "embodix_example_plugin.attention:PaddedSdpa"
    return [Registration("padded_sdpa", target, "one masked SDPA call over segments padded to the longest")]
