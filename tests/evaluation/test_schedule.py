# SPDX-License-Identifier: Apache-2.0
"""Every episode once, slots that keep their task, and the same hand-out every time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodix.evaluation.engine import EpisodeSchedule
from embodix.evaluation.episodes import Episode, plan_episodes

episodes_of_tasks = st.lists(st.integers(1, 7), min_size=1, max_size=5).map(
    lambda counts: [Episode(f"task{task}", seed) for task, count in enumerate(counts) for seed in range(count)]
)


def hand_out(episodes, num_slots, num_groups, order):
    """What each slot gets when the slots finish in an order drawn from `order`."""
    schedule = EpisodeSchedule(episodes, num_slots, num_groups)
    taken = {slot: [schedule.next(slot)] for slots in schedule.groups for slot in slots}
    busy = sorted(taken)
    while busy:
        slot = busy[order.pop() % len(busy)] if order else busy[0]
        index = schedule.next(slot)
        if index is None:
            busy.remove(slot)
        else:
            taken[slot].append(index)
    return schedule, taken


@given(episodes_of_tasks, st.integers(1, 9), st.integers(1, 4), st.lists(st.integers(0, 99), max_size=40))
def test_every_episode_is_handed_out_once_whoever_finishes_first(episodes, num_slots, num_groups, order):
    schedule, taken = hand_out(episodes, num_slots, num_groups, list(order))
    assert Counter(index for indices in taken.values() for index in indices) == Counter(range(len(episodes)))
    assert hand_out(episodes, num_slots, num_groups, list(order))[1] == taken
    slots = [slot for group in schedule.groups for slot in group]
    assert sorted(slots) == list(range(min(num_slots, len(episodes))))
    assert all(schedule.groups)
    assert max(map(len, schedule.groups)) - min(map(len, schedule.groups)) <= 1


@given(episodes_of_tasks, st.integers(1, 9), st.lists(st.integers(0, 99), max_size=40))
def test_a_slot_leaves_a_task_only_when_nothing_of_it_is_left(episodes, num_slots, order):
    schedule = EpisodeSchedule(episodes, num_slots, 2)
    left = Counter(episode.task for episode in episodes)
    current = {}
    for slot in range(schedule.num_slots):
        current[slot] = episodes[schedule.next(slot)].task
        left[current[slot]] -= 1
    while current:
        slots = sorted(current)
        slot = slots[order.pop() % len(slots)] if order else slots[0]
        index = schedule.next(slot)
        if index is None:
            assert not left.total()
            del current[slot]
            continue
        task = episodes[index].task
        assert task == current[slot] or not left[current[slot]]
        left[task] -= 1
        current[slot] = task


def test_slots_are_spread_over_the_tasks():
    schedule = EpisodeSchedule(plan_episodes(["a", "b", "c"], 4, 0), num_slots=6, num_groups=2)
    firsts = [schedule.next(slot) for slot in range(6)]
    assert [index // 4 for index in firsts] == [0, 1, 2, 0, 1, 2]


def test_episodes_are_planned_task_by_task_with_the_same_seeds():
    assert plan_episodes(["a", "b"], 2, 7) == [Episode("a", 7), Episode("a", 8), Episode("b", 7), Episode("b", 8)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 1, 0), "at least one and all different"),
        ((["a", "a"], 1, 0), "all different"),
        ((["a"], 0, 0), "at least 1 episode"),
        ((["a"], 1, -1), "seeds from 0"),
    ],
)
def test_plans_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_episodes(*arguments)
