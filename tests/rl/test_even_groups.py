# SPDX-License-Identifier: Apache-2.0
"""GRPO's groups that all fail or all succeed are found, counted, and left out where that is chosen."""

from __future__ import annotations

import pytest
import torch

from embodix_rl.objectives.even_groups import even_groups
from embodix_rl.objectives.groups import GroupCount
from embodix_rl.rlinf.asynchronous.rl_vla3 import AsyncSettings

GROUP = 4


def advantages_of(rewards_E):
    groups = torch.tensor(rewards_E).reshape(-1, GROUP)
    of_group = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    return of_group.reshape(1, -1).repeat(3, 1)  # of three chunk steps


def test_groups_that_all_fail_or_all_succeed_are_even():
    advantages_SE = advantages_of([0.0] * 4 + [1.0] * 4 + [0.0, 1.0, 0.0, 0.0])
    even_E, counted = even_groups(advantages_SE, torch.ones_like(advantages_SE, dtype=torch.bool), GROUP)
    assert even_E.tolist() == [True] * 8 + [False] * 4
    assert counted == GroupCount(2, 3)
    assert counted.metrics() == {"rollout/even_group_share": pytest.approx(2 / 3)}


def test_chunks_that_do_not_count_decide_nothing():
    advantages_SE = advantages_of([0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    valid_SE = torch.ones_like(advantages_SE, dtype=torch.bool)
    advantages_SE[0, :4], valid_SE[:, :4] = float("nan"), False  # masked, as a filter of rewards does
    even_E, counted = even_groups(advantages_SE, valid_SE, GROUP)
    assert not even_E.any()
    assert counted == GroupCount(0, 1)
    assert GroupCount().metrics() == {}
    assert GroupCount(1, 2) + GroupCount(0, 2) == GroupCount(1, 4)


def test_whole_groups_and_known_treatments():
    with pytest.raises(ValueError, match="whole groups of 4 environments; got 6"):
        even_groups(torch.zeros(2, 6), torch.ones(2, 6, dtype=torch.bool), GROUP)
    with pytest.raises(ValueError, match=r"runner.options.even_groups is one of count, leave_out; got 'drop'"):
        AsyncSettings(even_groups="drop")
    assert AsyncSettings().even_groups == "count"  # as the host has it
