# SPDX-License-Identifier: Apache-2.0
"""GRPO's groups that all fail or all succeed: their advantages are zero, so that nothing is learnt from them.

Shape suffixes: S chunk steps, E environments, a group being ``group_size`` neighbours, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodix_rl.objectives.groups import GroupCount

NOTHING = 1e-6  # advantages of a comparison are of the order of 1


def even_groups(advantages_SE: Tensor, valid_SE: Tensor, group_size: int) -> tuple[Tensor, GroupCount]:
    """Which environments are of a group without any difference, bool ``[E]``, and how many groups those are.

    Args:
        advantages_SE: as they were estimated.
        valid_SE: bool, chunks that count. A group without any is not compared, and none of the even ones.

    Raises:
        ValueError: environments that are no whole groups.
    """
    steps, envs = advantages_SE.shape
    if group_size < 1 or envs % group_size:
        raise ValueError(f"GRPO compares whole groups of {group_size} environments; got {envs} environments.")
    by_group = torch.where(valid_SE, advantages_SE, 0.0).abs().reshape(steps, -1, group_size)
    compared_G = valid_SE.reshape(steps, -1, group_size).any(dim=2).any(dim=0)
    even_G = compared_G & (by_group.amax(dim=(0, 2)) <= NOTHING)
    counted = GroupCount(int(even_G.sum()), int(compared_G.sum()))
    return even_G.repeat_interleave(group_size), counted
