# SPDX-License-Identifier: Apache-2.0
"""embodix's own implementations, registered through the same hooks as a third party's."""

from __future__ import annotations

from embodix.hookspecs import Registration, hookimpl


@hookimpl
def register_packers() -> list[Registration]:
    packing = "embodix.packing.layout"
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
    cpu, cuda = "embodix.attention.cpu", "embodix.attention.cuda"
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
def register_parallel_strategies() -> list[Registration]:
    parallel = "embodix.parallel"
    replicated, mesh = f"{parallel}.replicated", f"{parallel}.mesh"
    return [
        Registration("auto", f"{replicated}:HostStrategy", "as upstream: one process, or DDP over several"),
        Registration("single", f"{replicated}:SingleStrategy", "one process"),
        Registration("ddp", f"{replicated}:DataParallelStrategy", "a copy of the policy in each process"),
        Registration("fsdp2", f"{mesh}:FullyShardedStrategy", "parameters and optimizer cut across processes (FSDP2)"),
        Registration("pipeline", f"{parallel}.pipeline:PipelineStrategy", "each process holds some layers (1F1B)"),
        Registration("tensor", f"{parallel}.tensor:TensorParallelStrategy", "every layer cut across processes"),
    ]


@hookimpl
def register_host_patches() -> list[Registration]:
    summaries = {
        "lerobot_atomic_checkpoint": "a checkpoint is whole or not there",
        "lerobot_column_reads": "action chunks without their images",
        "lerobot_dataset_metadata": "columns joined to one vector, statistics though some are missing",
        "lerobot_dataset_factory": "the run decides on its data set",
        "lerobot_decoder_cache": "a bounded number of video decoders",
        "lerobot_peft_alpha": "LoRA's adapters are scaled as asked",
        "lerobot_peft_resume": "a resumed run goes on with its adapters",
        "lerobot_sharded_resume": "a run goes on from what its processes saved, each its part",
        "lerobot_quantized_checkpoint": "upstream loads a checkpoint in low precision",
        "lerobot_worker_preprocessing": "the run decides where samples are preprocessed",
    }
    return [Registration(name, f"embodix.patches.{name}:PATCH", summary) for name, summary in summaries.items()]


@hookimpl
def register_verbs() -> list[Registration]:
    summaries = {
        "train": "train a policy through upstream LeRobot, with or without +plugin=embodix",
        "eval": "success of checkpoints in simulation, with interval, controls and pairs",
        "quantize": "write a checkpoint in a low-precision format, and what that saves",
        "merge": "make a plain policy of a checkpoint with adapters",
        "compare": "train variants side by side, step by step on the same samples, and report",
        "plan": "tokens, waste, FLOP bound and memory of each variant, before any training",
        "check": "whether the data can be trained on: statistics, values, names, metadata, episodes, images",
        "data": "record demonstrations from a simulator into a LeRobotDataset",
        "doctor": "what is installed, what can run here, and why not",
    }
    return [Registration(verb, f"embodix.cli.{verb}:run", summary) for verb, summary in summaries.items()]


@hookimpl
def register_schemas() -> list[Registration]:
    return [
        Registration("train", "embodix.config.train_schema:register", "`lerobot train`, `compare` and `plan`"),
        Registration("eval", "embodix.config.eval_schema:register", "`lerobot eval`"),
        Registration("quantize", "embodix.schema.quantize:register", "`lerobot quantize`"),
        Registration("merge", "embodix.schema.merge:register", "`lerobot merge`"),
    ]


@hookimpl
def register_config_packages() -> list[Registration]:
    return [Registration("embodix", "embodix.hydra_conf:__name__", "the verbs' configs and the groups of the core")]
