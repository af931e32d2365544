# SPDX-License-Identifier: Apache-2.0
"""Restarts of simulators are counted in any sliding hour."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodix_rl.rlinf.asynchronous.gate_service import HOUR_S, RestartBudget


@settings(max_examples=100, deadline=None, derandomize=True)
@given(gaps=st.lists(st.sampled_from([0.0, 60.0, 900.0, 3000.0, 4000.0]), max_size=40), per_hour=st.integers(0, 4))
def test_no_hour_has_more_restarts_than_its_budget_and_none_is_refused_below_it(gaps, per_hour):
    budget, now, spent = RestartBudget(per_hour), 0.0, []
    for gap in gaps:
        now += gap
        recent = sum(moment > now - HOUR_S for moment in spent)
        assert budget.spend(now) == (recent < per_hour)
        if recent < per_hour:
            spent.append(now)
    assert budget.total == len(spent)
    assert all(sum(begin < moment <= begin + HOUR_S - 1 for moment in spent) <= per_hour for begin in [-1.0, *spent])


def test_a_budget_tells_what_was_spent():
    budget = RestartBudget(2)
    assert budget.spend(0.0) and budget.spend(10.0) and not budget.spend(20.0)
    assert budget.describe(20.0) == "2 of 2 restarts in the last hour, 2 in all"
    assert budget.describe(3605.0) == "1 of 2 restarts in the last hour, 2 in all"
    with pytest.raises(ValueError, match="0 or more"):
        RestartBudget(-1)
