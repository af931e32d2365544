# SPDX-License-Identifier: Apache-2.0
"""Which samples the accuracy gate measures on: episodes that training left out, several of them, spread evenly."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from embodix.quantization.held_out import _trained_on, choose_episodes, spread_frames

ONE_TASK, TWO_TASKS = ["open"] * 40, ["open"] * 20 + ["close"] * 20


def test_episodes_that_training_left_out_come_first():
    episodes, words = choose_episodes(ONE_TASK, list(range(5, 40)))
    assert episodes == [0, 1, 2, 3, 4]
    assert words == "5 episodes that training left out, of the tasks that it knows"


def test_episodes_of_tasks_that_training_never_saw_are_none():
    episodes, words = choose_episodes(TWO_TASKS, list(range(20)))
    assert episodes == [18, 19]
    assert words.startswith("the last 2 of the 20 episodes that training saw")


def test_where_training_left_none_out_it_is_the_last_tenth_and_said():
    episodes, words = choose_episodes(ONE_TASK, None)
    assert episodes == [36, 37, 38, 39]
    assert "that training saw: of their tasks it left fewer than two out" in words
    assert choose_episodes(ONE_TASK[:3], None)[0] == [1, 2]
    assert choose_episodes(ONE_TASK, list(range(39)))[0] == [35, 36, 37, 38]


def test_of_another_recording_all_are_taken():
    assert choose_episodes(TWO_TASKS, []) == (list(range(40)), "40 episodes of another recording than training's")


def test_a_folder_is_another_recording_where_the_run_has_its_own(tmp_path):
    source = SimpleNamespace(
        train_config={"dataset": {"repo_id": "a/b", "root": str(tmp_path / "own"), "episodes": [3]}}
    )
    cfg = OmegaConf.create({"dataset": {"name": "lerobot"}})
    for name in ("own", "other"):
        (tmp_path / name / "meta").mkdir(parents=True)
        (tmp_path / name / "meta" / "info.json").write_text("{}")
    assert _trained_on(source, cfg, str(tmp_path / "other")).episodes == []
    assert _trained_on(source, cfg, str(tmp_path / "own" / ".." / "own")).episodes == [3]
    shutil.rmtree(tmp_path / "own")
    assert _trained_on(source, cfg, str(tmp_path / "other")).episodes == [3], "its own, moved"


def test_a_single_episode_is_refused():
    with pytest.raises(ValueError, match=r"two episodes at least, and the data set has 1"):
        choose_episodes(["open"], None)


@given(st.lists(st.integers(1, 60), min_size=2, max_size=30), st.integers(2, 100))
def test_frames_are_distinct_and_spread_over_the_episodes(lengths, num_samples):
    bounds, start = {}, 100
    for episode, length in enumerate(lengths, start=7):
        bounds[episode] = (start, start + length)
        start += length
    frames = spread_frames(bounds, num_samples)
    assert len({frame for _, frame in frames}) == len(frames) <= num_samples
    assert all(bounds[episode][0] <= frame < bounds[episode][1] for episode, frame in frames)
    assert len({episode for episode, _ in frames}) == min(len(lengths), num_samples)
    if min(lengths) >= -(-num_samples // len(lengths)):
        assert len(frames) == num_samples
        counts = [sum(episode == e for e, _ in frames) for episode in {e for e, _ in frames}]
        assert max(counts) - min(counts) <= 1
