# SPDX-License-Identifier: Apache-2.0
"""The other of float32 and bfloat16, as a yardstick for what a lower precision does to the same policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from embodix.policies.support import support_of

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
    in_bfloat16 = torch.bfloat16 in dtypes or support_of(policy.config.type).own_autocast(policy.config) == "bfloat16"
    return torch.bfloat16 if in_bfloat16 else torch.float32


@contextmanager
def other_precision(policy: Any) -> Iterator[torch.dtype]:
    """The policy in bfloat16 where it computes in float32, and the other way round; put back bit for bit.

    A policy with an autocast of its own has that switched. Another one in float32 runs under autocast; one that holds
    bfloat16 weights gets them in float32, which takes their memory twice more for the duration.
    """
    own = compute_dtype(policy)
    support = support_of(policy.config.type)
    if support.own_autocast(policy.config) is not None:
        other = torch.bfloat16 if own is torch.float32 else torch.float32
        with support.switched_autocast(policy, WORDS[other]):
            yield other
    elif own is torch.float32:
        with torch.autocast(torch.device(str(policy.config.device)).type, torch.bfloat16):
            yield torch.bfloat16
    else:
        with _in_float32(policy):
            yield torch.float32


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
