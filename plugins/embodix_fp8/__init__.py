# SPDX-License-Identifier: Apache-2.0
"""FP8: checkpoints with block-scaled weights, and training with FP8 matrix products."""

from __future__ import annotations

from embodix.hookspecs import Registration, hookimpl


@hookimpl
def register_quantizers() -> list[Registration]:
    return [
        Registration(
            "fp8_block",
            "embodix_fp8.fp8_block:Fp8BlockQuantizer",
            "the language model's linear layers in e4m3, one scale a block of 128 x 128 weights",
        )
    ]


@hookimpl
def register_precisions() -> list[Registration]:
    precision = "embodix_fp8.precision"
    return [
        Registration(
            "torchao",
            f"{precision}.torchao_float8:TorchaoFloat8",
            "FP8 products by torchao, one scale a tensor or a row (emulated without FP8 units)",
        ),
        Registration(
            "block",
            f"{precision}.block_scaling:BlockScaledFp8",
            "FP8 products by Transformer Engine, one scale a block (emulated without it)",
        ),
    ]


@hookimpl
def register_config_packages() -> list[Registration]:
    return [Registration("fp8", "embodix_fp8.hydra_conf:__name__", "formats of weights and precisions of training")]
