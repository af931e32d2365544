# SPDX-License-Identifier: Apache-2.0
"""A streamed data set is trained on whole and saved, or the run ends with what is missing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from embodix.data.streams import IncompleteStreamError, guard_stream
from embodix.report.steps import read_steps
from embodix.testing.datasets import write_dataset
from embodix.testing.host_runs import train_here

STREAMED = ("dataset.streaming=true", "train.num_workers=1")
Overrides = Callable[..., list[str]]


def _copy(root: Path, place: Path) -> Path:
    return shutil.copytree(root, place)


def test_a_streamed_run_is_saved_and_resumed_to_the_bit(videos: Path, run_of: Overrides, tmp_path: Path) -> None:
    """Eight batches an epoch: the checkpoint that is resumed lies in the second."""
    whole = train_here(run_of(videos, *STREAMED, "train.steps=11", "train.save_freq=3")).output_dir
    resumed = shutil.copytree(whole, tmp_path / "resumed", symlinks=True)
    result = train_here([f"resume={resumed}/checkpoints/000009"])
    ours, theirs = result.records, read_steps(whole / "steps.jsonl")[9:]
    assert [(record.step, record.loss) for record in ours] == [(record.step, record.loss) for record in theirs]
    assert len(ours) == 2


def test_files_with_fewer_frames_than_they_say_end_the_run(videos: Path, run_of: Overrides, tmp_path: Path) -> None:
    short = _copy(videos, tmp_path / "short")
    (data,) = (short / "data").rglob("*.parquet")
    pq.write_table(pq.read_table(data).slice(0, 17), data)
    with pytest.raises(IncompleteStreamError, match=r"gave 17 of 24 frames that meta/info.json names"):
        train_here(run_of(short, *STREAMED, "train.steps=12", "check=off"))


def test_a_frame_that_cannot_be_read_is_named(videos: Path, run_of: Overrides, tmp_path: Path) -> None:
    """Upstream takes the decoder's error for the end of the file and goes round what it has until then."""
    cut = _copy(videos, tmp_path / "cut")
    (video,) = cut.rglob("*.mp4")
    shutil.copy(
        next(write_dataset(tmp_path / "one", cameras=("front",), tasks=("push",), video=True).rglob("*.mp4")), video
    )
    with pytest.raises(
        IncompleteStreamError, match=r"Frame \d+ of episode 1 \(videos/.*file-000.mp4 of .*/cut\) cannot"
    ):
        train_here(run_of(cut, *STREAMED, "train.steps=12", "check=off"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["dataset.episodes=[0]"], r"upstream ignores dataset.episodes=\[0\]. Set dataset.streaming=false"),
        (["train.num_workers=0"], r"upstream reads nothing and waits for ever. Set train.num_workers=1"),
        (["dataset.join={action: [left, right]}"], r"dataset.join of action. Set dataset.streaming=false"),
    ],
)
def test_what_upstream_would_ignore_is_refused(
    videos: Path, run_of: Overrides, changes: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train_here(run_of(videos, *STREAMED, *changes))


def test_a_state_of_one_dimension_is_refused(run_of: Overrides, tmp_path: Path) -> None:
    narrow = write_dataset(tmp_path / "narrow", state_dim=1, video=True)
    with pytest.raises(
        ValueError, match=r"lose their axis.*\(observation.state of .*narrow\). Set dataset.streaming=false"
    ):
        train_here(run_of(narrow, *STREAMED))


def test_images_are_refused(blobs: Path, run_of: Overrides) -> None:
    with pytest.raises(
        ValueError, match=r"no batch of streamed images \(observation.images.front of .*streaming=false"
    ):
        train_here(run_of(blobs, *STREAMED))


def _built(episodes: list[dict[str, Any]], delta_indices: dict[str, list[int]]) -> Any:
    meta = SimpleNamespace(
        episodes=episodes,
        video_keys=["front"],
        features={},
        embodix_join={},
        get_video_file_path=lambda *_: "front/file-001.mp4",
    )
    frames = SimpleNamespace(meta=meta, delta_indices=delta_indices, fps=10, tolerance_s=1e-4, root="somewhere")
    frames.make_frame = None
    return frames


def test_a_second_video_file_would_be_read_at_another_time() -> None:
    episodes = [
        {"episode_index": number, "dataset_from_index": 12 * number, "videos/front/from_timestamp": 0.0}
        for number in range(2)
    ]
    guard_stream(_built(episodes[:1], {}))
    with pytest.raises(
        ValueError, match=r"episode 1 at 1.200 s, but front/file-001.mp4 of somewhere has it at 0.000 s"
    ):
        guard_stream(_built(episodes, {}))


@pytest.mark.parametrize(
    ("deltas", "fits"), [([0, 100], True), ([0, 101], False), ([-99, 0], True), ([-100, 0], False)]
)
def test_chunks_beyond_upstreams_window_would_be_padded(deltas: list[int], fits: bool) -> None:
    built = _built([], {"action": deltas})
    if fits:
        guard_stream(built)
        return
    with pytest.raises(ValueError, match=r"pads what lies beyond; the policy asks for .* of action"):
        guard_stream(built)
