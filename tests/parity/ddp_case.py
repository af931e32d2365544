# SPDX-License-Identifier: Apache-2.0
"""The policies that are trained on two ranks: a small one, its wrapper, and a rank's batches with padded actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from embodix_groot import testing as groot
from embodix_groot.wrapper import GrootN15Wrapper
from embodix_pi05 import testing as pi05
from embodix_pi05.wrapper import Pi05Wrapper


@dataclass(frozen=True)
class DdpCase:
    build: Callable[[], Any]
    wrapper: Callable[[], Any]
    batch: Callable[[Any, int, int], dict[str, Any]]  # policy, rank, seed


def pi05_batch(policy, rank, seed):
    batch = pi05.random_batch(policy, [3, 8], seed=seed)
    batch["action_is_pad"][:, 2 if rank else 5 :] = True
    return batch


def groot_batch(policy, rank, seed):
    batch = groot.random_batch(policy, [5, 5], [2, 2], seed=seed)
    batch["action_is_pad"] = (torch.arange(16) >= (4 if rank else 11)).expand(2, -1)
    return batch


CASES = {
    "pi05": DdpCase(lambda: pi05.small_pi05(empty_cameras=1), Pi05Wrapper, pi05_batch),
    "groot": DdpCase(lambda: groot.small_groot(tune_llm=True, tune_visual=True), GrootN15Wrapper, groot_batch),
}
