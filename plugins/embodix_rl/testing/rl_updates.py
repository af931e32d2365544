# SPDX-License-Identifier: Apache-2.0
"""What an update of reinforcement learning is tried with."""

from __future__ import annotations

from typing import Any

# Of RLinf's node ``algorithm``, what `objective_of` reads.
PPO_ALGORITHM: dict[str, Any] = {
    "adv_type": "gae",
    "logprob_type": "chunk_level",
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.2,
    "clip_ratio_c": 3.0,
    "value_clip": 0.2,
    "huber_delta": 10.0,
    "entropy_bonus": 0.01,
}
GRPO_ALGORITHM = {**PPO_ALGORITHM, "adv_type": "grpo", "entropy_bonus": 0.0}
