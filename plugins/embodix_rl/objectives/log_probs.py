# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of action chunks at the level that ratios are taken at, and the proximal policy's.

Shape suffixes: B chunks, T action steps, A action dimensions.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

LogProbLevel = Literal["chunk", "action", "element"]


def at_level(log_probs_BTA: Tensor, level: LogProbLevel, executed_BT: Tensor | None = None) -> Tensor:
    """Log-probabilities with one ratio a chunk ``[B]``, an action step ``[B, T]`` or an element ``[B, T, A]``.

    A chunk is what was decided at once, so its level is the exact one; finer levels clip each part by itself.

    Args:
        executed_BT: bool, action steps that were executed; the others (after the end of an episode) count as certain.

    Raises:
        ValueError: an unknown level.
    """
    if level not in get_args(LogProbLevel):
        raise ValueError(
            f"The level of log-probabilities is one of {', '.join(get_args(LogProbLevel))}; got {level!r}."
        )
    if executed_BT is not None:
        log_probs_BTA = torch.where(executed_BT[..., None], log_probs_BTA, 0.0)
    if level == "chunk":
        return log_probs_BTA.sum(dim=(1, 2))
    return log_probs_BTA.sum(dim=2) if level == "action" else log_probs_BTA


def interpolated_proximal(behaviour: Tensor, current: Tensor, versions_B: Tensor, version: int) -> Tensor:
    """Log-probabilities of the policy one version back, between those of the rollout and of now, without gradient.

    A chunk of version v lies ``version - v`` updates back and the proximal policy one, so it takes the share
    ``(version - 1 - v) / (version - v)`` of the way. Log-probabilities are not linear in the version: this saves the
    forward pass that recomputing takes, and is exact for chunks that are one version old. (RLinf 0.3.0,
    ``algorithms/losses.py``, ``compute_decoupled_ppo_actor_loss``.)

    Args:
        versions_B: int64, the policy version that each chunk was sampled with.
        version: of the policy that is being trained.

    Raises:
        ValueError: a chunk of a version that does not exist yet.
    """
    age_B = version - versions_B
    if bool((age_B < 0).any()):
        raise ValueError(f"Chunks are of version {version} at most; got {int(versions_B.max())}.")
    share_B = torch.where(age_B > 0, (age_B - 1) / age_B.clamp(min=1), 0.0)
    share = share_B.reshape(-1, *[1] * (behaviour.ndim - 1))
    return (behaviour + share * (current - behaviour)).detach()
