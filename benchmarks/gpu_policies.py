# SPDX-License-Identifier: Apache-2.0
"""The policies, batches and clock of the checks on a CUDA device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from embodix_groot import testing as groot
from embodix_pi05.testing import meta_pi05, randomise_adaptive_norms, small_pi05

PROMPT_LENGTHS = (45, 52, 58, 65)
REDUCED = {
    "vision": {
        "hidden_size": 288,
        "intermediate_size": 1076,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "patch_size": 14,
    },
    "language": {
        "width": 512,
        "depth": 6,
        "mlp_dim": 4096,
        "num_heads": 8,
        "num_kv_heads": 1,
        "head_dim": 64,
        "vocab_size": 32144,
    },
    "action_expert": {
        "width": 256,
        "depth": 6,
        "mlp_dim": 1024,
        "num_heads": 8,
        "num_kv_heads": 1,
        "head_dim": 64,
    },
}
REDUCED_GROOT = {
    "vision": REDUCED["vision"] | {"image_size": 224, "intermediate_size": 1076},
    "language": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32144,
    },
    "vl_self_attention": {"num_layers": 2, "num_attention_heads": 8, "attention_head_dim": 64},
    "action_head": {
        "num_layers": 6,
        "num_attention_heads": 8,
        "attention_head_dim": 48,
        "hidden_size": 256,
        "num_future_tokens": 32,
        "num_embodiments": 32,
        "num_inference_timesteps": 4,
    },
}
PI05_OPTIONS = {
    "image_size": 224,
    "dtype": "bfloat16",
    "device": "cuda",
    "empty_cameras": 1,
    "chunk_size": 50,
    "n_action_steps": 50,
    "max_action_dim": 32,
    "action_dim": 7,
}


def seconds_of(run: Callable[[], Any], repetitions: int = 10) -> float:
    """Median wall seconds of a call, device included, after two warm-up calls."""
    for _ in range(2):
        run()
    times = []
    for _ in range(repetitions):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def reduced_pi05(**config: Any) -> Any:
    """A small π0.5 on the GPU, in bf16 unless ``config`` says otherwise, with two cameras of three."""
    return small_pi05(REDUCED, **(PI05_OPTIONS | config))


def real_pi05(**config: Any) -> Any:
    """π0.5 in its real size on the GPU with random weights, drawn there: the host never holds it."""
    policy = meta_pi05(**config)
    policy.config.device = "cuda"
    policy.to_empty(device="cuda")
    initialise(policy)
    policy.train()
    return policy


@torch.no_grad()
def initialise(policy: Any) -> None:
    """Give every parameter and buffer of a policy without storage a value."""
    for module in policy.modules():
        for parameter in module.parameters(recurse=False):
            parameter.normal_(std=0.02)
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        for name, buffer in module.named_buffers(recurse=False):
            if name == "position_ids":
                buffer.copy_(torch.arange(buffer.shape[-1]).expand_as(buffer))
            else:
                buffer.copy_(module.compute_default_rope_parameters(module.config, "cpu")[0])
    randomise_adaptive_norms(policy)


def groot_of(architecture: dict[str, Any], tuned: bool = False) -> Any:
    """GR00T-N1.5 of these sizes on the GPU, in its own bf16 autocast, without dropout."""
    sizes = {"max_state_dim": 64, "max_action_dim": 32, "action_dim": 7, "tune_llm": tuned, "tune_visual": tuned}
    with torch.device("cuda"):
        return groot.small_groot({**architecture, "dropout": 0.0}, device="cuda", use_bf16=True, **sizes)


def attempt(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A check's row, or what stopped it: one kernel that fails must not hide the others."""
    try:
        return check()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}
