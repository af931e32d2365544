# SPDX-License-Identifier: Apache-2.0
"""Sizes are checked before anything starts, and the message has legal ones."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from embodix_rl.rlinf.run_sizes import RunSizes, place, require_legal
from embodix_rl.schema import PlacementSettings

LEGAL = RunSizes(
    num_envs=8,
    num_stages=1,
    group_size=1,
    steps_per_epoch=40,
    rollout_epochs=1,
    chunk=5,
    env_workers=2,
    rollout_workers=1,
    actor_workers=1,
    micro_batch=8,
    global_batch=32,
    advantage="gae",
)


def test_legal_sizes_and_what_follows_from_them():
    require_legal(LEGAL)
    assert (LEGAL.chunks_per_step, LEGAL.frames_per_step, LEGAL.trajectories_per_actor) == (64, 320, 2)
    assert replace(LEGAL, actor_workers=4, num_stages=2).trajectories_per_actor == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_envs": 7}, r"num_envs=7 is no multiple of 2.* nearest: 6 or 8"),
        ({"num_stages": 3}, r"no multiple of 6.* nearest: 6 or 12"),
        ({"rollout_workers": 3}, r"no multiple of 6.* nearest: 6 or 12"),
        ({"steps_per_epoch": 42}, r"rollout.steps=42 is no multiple of the chunk of 5.* nearest: 40 or 45"),
        ({"steps_per_epoch": 3}, r"nearest: 5"),
        ({"advantage": "grpo"}, r"group_size must be at least 2"),
        ({"global_batch": 20}, r"no multiple of micro_batch=8 × actor_workers=1; nearest: 16 or 24"),
        ({"global_batch": 24}, r"gets 64 chunks .* nearest global_batch: 16 or 32"),
        ({"micro_batch": 3, "global_batch": 3}, r"none: no multiple of micro_batch × actor_workers = 3 divides 64"),
        ({"num_envs": 0}, r"num_envs must be at least 1; got 0"),
    ],
)
def test_illegal_sizes_are_refused_with_the_nearest_legal_ones(changes, message):
    with pytest.raises(ValueError, match=message):
        require_legal(replace(LEGAL, **changes))


def test_all_violated_rules_are_named_at_once():
    with pytest.raises(ValueError, match=r"\(1\) .*num_envs=7.* \(2\) .*rollout.steps=42.* \(3\) .*global_batch=20"):
        require_legal(replace(LEGAL, num_envs=7, steps_per_epoch=42, global_batch=20))


def test_pipeline_and_decoupled_inference_have_rules_of_their_own():
    require_legal(LEGAL, pipeline=True, decoupled=True)
    with pytest.raises(ValueError, match=r"sends 32 chunks at a time.* nearest: 16 or 32"):
        require_legal(replace(LEGAL, micro_batch=64, global_batch=64), pipeline=True)
    with pytest.raises(ValueError, match=r"advantages by GAE"):
        require_legal(replace(LEGAL, advantage="grpo", group_size=2), pipeline=True)
    with pytest.raises(ValueError, match=r"one stage"):
        require_legal(replace(LEGAL, num_stages=2), decoupled=True)
    with pytest.raises(ValueError, match=r"at least as many environment processes \(1\) as inference processes \(2\)"):
        require_legal(replace(LEGAL, env_workers=1, rollout_workers=2), decoupled=True)


SIZES = st.builds(
    RunSizes,
    num_envs=st.integers(1, 48),
    num_stages=st.integers(1, 2),
    group_size=st.sampled_from([1, 2, 4]),
    steps_per_epoch=st.integers(1, 40),
    rollout_epochs=st.integers(1, 3),
    chunk=st.sampled_from([1, 5, 8]),
    env_workers=st.integers(1, 4),
    rollout_workers=st.integers(1, 3),
    actor_workers=st.integers(1, 2),
    micro_batch=st.sampled_from([1, 2, 8]),
    global_batch=st.integers(1, 64),
    advantage=st.sampled_from(["gae", "grpo"]),
)
SUGGESTIONS = {  # the field that a rule suggests values for, and what its message looks like
    "num_envs": r"num_envs=\d+ is no multiple[^;]*; nearest: ([\d or]+)\.",
    "steps_per_epoch": r"rollout\.steps=\d+ is no multiple[^;]*; nearest: ([\d or]+)\.",
    "global_batch": r"optim\.global_batch=\d+ is no multiple[^;]*; nearest: ([\d or]+)\.",
}


@settings(deadline=None, max_examples=300)
@given(SIZES, st.sampled_from(list(SUGGESTIONS)))
def test_what_a_rule_suggests_satisfies_it(sizes, field):
    found = re.search(SUGGESTIONS[field], _message(sizes))
    assume(found is not None)
    for suggested in map(int, found[1].split(" or ")):
        assert not re.search(SUGGESTIONS[field], _message(replace(sizes, **{field: suggested})))


def _message(sizes: RunSizes) -> str:
    try:
        require_legal(sizes)
    except ValueError as error:
        return str(error)
    return ""


def test_processes_without_accelerators_are_on_the_node():
    placed = place(PlacementSettings("colocated", env_workers=4, rollout_workers=2))
    assert placed.component_placement == {"env": "0:0-3", "rollout": "0:0-1", "actor": "0:0"}
    assert placed.workers == {"env": 4, "rollout": 2, "actor": 1}


@pytest.mark.parametrize(
    ("settings_", "expected"),
    [
        (PlacementSettings("colocated", 4), {"env": "0-3:0-3", "rollout": "0-3:0-3", "actor": "0-3:0-3"}),
        (PlacementSettings("disaggregated", 8), {"env": "0-3:0-3", "rollout": "0-3:0-3", "actor": "4-7:0-3"}),
        (
            PlacementSettings("disaggregated", 4, own_accelerators=1),
            {"env": "0-2:0-2", "rollout": "0-2:0-2", "actor": "3:0"},
        ),
        (
            PlacementSettings("hybrid", 8, own_accelerators=6),
            {"env": "0-5:0-5", "rollout": "6-7:0-1", "actor": "0-7:0-7"},
        ),
        (
            PlacementSettings("colocated", 2, env_workers=4),
            {"env": "0-1:0-3", "rollout": "0-1:0-1", "actor": "0-1:0-1"},
        ),
    ],
)
def test_accelerators_are_divided_as_the_placement_says(settings_, expected):
    assert place(settings_).component_placement == expected


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        (PlacementSettings("scattered"), "colocated, disaggregated, hybrid"),
        (PlacementSettings("hybrid", 1), "at least 2 accelerators"),
        (PlacementSettings("hybrid", 4, own_accelerators=4), "nearest: 3"),
        (PlacementSettings("disaggregated", 4, own_accelerators=0), "nearest: 1"),
        (PlacementSettings("colocated", 4, env_workers=6), "nearest: 4 or 8"),
        (PlacementSettings("colocated", env_workers=-1), "at least 1"),
        (PlacementSettings("colocated", -1), "0 or more"),
    ],
)
def test_impossible_placements_are_refused_with_the_nearest_legal(settings_, message):
    with pytest.raises(ValueError, match=message):
        place(settings_)
