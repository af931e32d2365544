# SPDX-License-Identifier: Apache-2.0
"""embodix's own implementations, registered through the same hooks as a third party's."""

from __future__ import annotations

from embodix.hookspecs import Registration, hookimpl


@hookimpl
def register_packers() -> list[Registration]:
    packing = "embodix.packing.packers"
    return [
        Registration("none", f"{packing}:PaddedPacker", "compute every prefix row, padding included, as upstream"),
        Registration("padding_free", f"{packing}:PaddingFreePacker", "compute valid prefix rows only, same batches"),
        Registration(
            "token_budget",
            "embodix.packing.token_budget:TokenBudgetPacker",
            "compose batches of equal cost, compute valid prefix rows only",
        ),
        Registration(
            "sequence_length",
            "embodix.packing.sequence_length:SequenceLengthPacker",
            "compose batches up to a number of prefix rows, compute them in few fixed shapes",
        ),
    ]


@hookimpl
def register_attention_backends() -> list[Registration]:
    cpu, cuda = "embodix.attention.segment", "embodix.attention.cuda"
    return [
        Registration("segment_gemm", f"{cpu}:SegmentGemm", "one GEMM pair a segment, grouped heads folded (CPU)"),
        Registration("segment_sdpa", f"{cpu}:SegmentSdpa", "torch SDPA a segment, no mask (any device)"),
        Registration("segment_auto", f"{cpu}:SegmentAuto", "GEMMs or SDPA, whichever was measured to be faster (CPU)"),
        Registration("flash_attn_2", f"{cuda}:FlashAttention2", "flash_attn_varlen_func of flash-attn 2 (CUDA)"),
        Registration("flash_attn_4", f"{cuda}:FlashAttention4", "flash_attn_varlen_func of flash-attn-4 (CUDA)"),
        Registration("torch_varlen", f"{cuda}:TorchVarlen", "torch.nn.attention.varlen.varlen_attn (CUDA)"),
        Registration("flex", f"{cuda}:Flex", "FlexAttention with a document mask (CUDA)"),
    ]


@hookimpl
def register_policy_wrappers() -> list[Registration]:
    pi05, groot = "embodix.policies.pi05.wrapper", "embodix.policies.groot_n15.wrapper"
    return [
        Registration("pi05", f"{pi05}:Pi05Wrapper", "packed π0.5 on upstream's PI05Policy"),
        Registration("groot", f"{groot}:GrootN15Wrapper", "packed GR00T-N1.5 on upstream's GrootPolicy"),
    ]


@hookimpl
def register_quantizers() -> list[Registration]:
    return [
        Registration(
            "fp8_block",
            "embodix.quantization.fp8_block:Fp8BlockQuantizer",
            "the language model's linear layers in e4m3, one scale a block of 128 x 128 weights",
        )
    ]


@hookimpl
def register_precisions() -> list[Registration]:
    precision = "embodix.quantization.precision"
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
def register_runners() -> list[Registration]:
    runners = "embodix.rl.rlinf.runners"
    return [
        Registration("sync", f"{runners}:SyncRunner", "RLinf's synchronous runner"),
        Registration("pipeline", f"{runners}:PipelineRunner", "RLinf's synchronous runner, trained as rollouts arrive"),
        Registration("rlinf_async", f"{runners}:RlinfAsyncRunner", "RLinf's asynchronous PPO as shipped"),
        Registration(
            "rl_vla3",
            "embodix.rl.rlinf.asynchronous.settings:RlVla3Runner",
            "RL-VLA3: asynchronous training, dynamic batching, streaming, each by a switch",
        ),
    ]


@hookimpl
def register_environments() -> list[Registration]:
    return [
        Registration(
            "embodix_metaworld",
            "embodix.evaluation.metaworld:EmbodixMetaworldConfig",
            "MetaWorld with several cameras and honoured seeds",
        ),
        Registration(
            "embodix_libero",
            "embodix.evaluation.libero:EmbodixLiberoConfig",
            "LIBERO as upstream's, seeds honoured, resets and rendering only when needed",
        ),
        Registration(
            "embodix_maniskill",
            "embodix.evaluation.rlinf_environments:RlinfManiskillConfig",
            "ManiSkill by RLinf's environment (NVIDIA GPU)",
        ),
        Registration(
            "embodix_isaaclab",
            "embodix.evaluation.rlinf_environments:RlinfIsaaclabConfig",
            "Isaac Lab by RLinf's environment (NVIDIA RTX GPU)",
        ),
    ]


@hookimpl
def register_data_sources() -> list[Registration]:
    return [
        Registration(
            "metaworld", "embodix.data.metaworld:record_metaworld", "demonstrations of MetaWorld's scripted experts"
        ),
        Registration(
            "libero", "embodix.data.libero:record_libero", "demonstrations of a scripted controller in LIBERO"
        ),
    ]
