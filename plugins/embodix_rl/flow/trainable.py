# SPDX-License-Identifier: Apache-2.0
"""Train a part of a policy."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn


def train_only(policy: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze every parameter whose name none of some regular expressions is found in.

    Raises:
        ValueError: nothing would be trained; the message has the names of the modules that could be.
    """
    named = dict(policy.named_parameters())
    chosen = {name for name in named if any(re.search(pattern, name) for pattern in patterns)}
    if not chosen:
        modules = sorted({name.rpartition(".")[0] for name in named})
        raise ValueError(f"trainable={list(patterns)} names no parameter of the policy; its modules: {modules}.")
    for name, parameter in named.items():
        parameter.requires_grad_(name in chosen)
