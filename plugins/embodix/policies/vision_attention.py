# SPDX-License-Identifier: Apache-2.0
"""SigLIP's attention on a CPU, with head dimensions that torch's kernel likes.

torch's fused CPU attention is about twice as slow where head_dim is no multiple of 8. Zeros appended to q, k and v
change no score and no output, so the function stays the same; a real SigLIP (72) needs no padding.

Shape suffixes: B images, H heads, L patches, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

ALIGNED_ATTENTION = "embodix_aligned_sdpa"
HEAD_DIM_STEP = 8


def aligned_attention(
    module: Any,
    query_BHLD: Tensor,
    key_BHLD: Tensor,
    value_BHLD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Bidirectional attention with the signature of ``transformers.AttentionInterface``: output ``[B, L, H, D]``."""
    head_dim = query_BHLD.shape[-1]
    padding = (0, -head_dim % HEAD_DIM_STEP)
    out_BHLD = F.scaled_dot_product_attention(
        F.pad(query_BHLD, padding),
        F.pad(key_BHLD, padding),
        F.pad(value_BHLD, padding),
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=head_dim**-0.5 if scaling is None else scaling,
    )
    return out_BHLD[..., :head_dim].transpose(1, 2).contiguous(), None


def align_vision_attention(tower: Any) -> Callable[[], None]:
    """Use ``aligned_attention`` in a ``SiglipVisionModel`` where it pays; returns the undo."""
    from transformers import AttentionInterface

    attention = tower.vision_model.encoder.layers[0].self_attn
    config = attention.config
    before = config._attn_implementation
    unaligned = attention.head_dim % HEAD_DIM_STEP != 0
    on_cpu = attention.q_proj.weight.device.type == "cpu"
    if not (unaligned and on_cpu and before == "sdpa"):
        return lambda: None
    AttentionInterface.register(ALIGNED_ATTENTION, aligned_attention)
    config._attn_implementation = ALIGNED_ATTENTION

    def undo() -> None:
        config._attn_implementation = before

    return undo
