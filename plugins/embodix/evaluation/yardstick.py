# SPDX-License-Identifier: Apache-2.0
"""The other of float32 and bfloat16, as a yardstick for what a lower precision does to the same policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WORDS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def compute_dtype(policy: Any) -> torch.dtype:
    """bfloat16 where the policy holds such weights or opens bfloat16 autocast itself, else float32.

    Raises:
        ValueError: float16 weights.
    """
    dtypes = {parameter.dtype for parameter in policy.parameters()}
    if torch.float16 in dtypes:
        raise ValueError(
            "float16 is refused: flow matching was seen to leave its path in it (its range ends at 65504 and its small "
            "values vanish). Load the checkpoint in bfloat16 or float32: policy.dtype=bfloat16."
        )
    in_bfloat16 = torch.bfloat16 in dtypes or getattr(policy.config, "use_bf16", False)
    return torch.bfloat16 if in_bfloat16 else torch.float32


@contextmanager
def other_precision(policy: Any) -> Iterator[torch.dtype]:
    """The policy in bfloat16 where it computes in float32, and the other way round; put back bit for bit.

    GR00T has a switch for its own autocast. Another policy in float32 runs under autocast; one that holds bfloat16
    weights gets them in float32, which takes their memory twice more for the duration.
    """
    own = compute_dtype(policy)
    if hasattr(policy.config, "use_bf16"):
        with _groot_switched(policy, own is torch.float32):
            yield torch.bfloat16 if own is torch.float32 else torch.float32
    elif own is torch.float32:
        with torch.autocast(torch.device(str(policy.config.device)).type, torch.bfloat16):
            yield torch.bfloat16
    else:
        with _in_float32(policy):
            yield torch.float32


@contextmanager
def _groot_switched(policy: Any, use_bf16: bool) -> Iterator[None]:
    """GR00T's autocast, and the dtype that its inputs are cast to."""
    model, before = policy._groot_model, (policy.config.use_bf16, policy._groot_model.compute_dtype)
    policy.config.use_bf16, model.compute_dtype = use_bf16, "bfloat16" if use_bf16 else "float32"
    try:
        yield
    finally:
        policy.config.use_bf16, model.compute_dtype = before


@contextmanager
def _in_float32(policy: Any) -> Iterator[None]:
    originals = [(parameter, parameter.data) for parameter in policy.parameters()]
    try:
        for parameter, data in originals:
            parameter.data = data.float()
        yield
    finally:
        for parameter, data in originals:
            parameter.data = data
