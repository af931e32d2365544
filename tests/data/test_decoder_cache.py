# SPDX-License-Identifier: Apache-2.0
"""The bounded decoder cache: upstream's frames, few open files, no decoder taken over by a fork."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from lerobot.datasets import video_utils
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from torch.utils.data import DataLoader

from embodix.data.order import ShuffledOrder, WindowShuffledOrder, count_opens, files_of_samples
from embodix.patching import patched
from embodix.testing.datasets import write_dataset

FRONT = "observation.images.front"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Six episodes of one camera, a video file each."""
    tasks = tuple(f"task number {number}" for number in range(6))
    folder = tmp_path_factory.mktemp("videos") / "videos"
    return write_dataset(folder, cameras=("front",), tasks=tasks, episode_length=8, video=True, episodes_per_file=1)


def load(root):
    return LeRobotDataset("embodix/videos", root=root, video_backend="torchcodec")


def open_videos():
    """Paths of the video files that this process holds open."""
    links = Path("/proc/self/fd").iterdir()
    return [path for path in (str(link.readlink()) for link in links if os.path.lexists(link)) if path.endswith(".mp4")]


def test_frames_are_upstreams_and_files_stay_bounded(root):
    dataset = load(root)
    assert len({str(dataset.meta.get_video_file_path(episode, FRONT)) for episode in range(6)}) == 6
    order = ShuffledOrder(len(dataset), seed=0).epoch(0).tolist()
    expected = [dataset[index][FRONT] for index in order]
    video_utils._default_decoder_cache.clear()
    with patched({"lerobot_decoder_cache": {"max_decoders": 2}}):
        for index, frame in zip(order, expected, strict=True):
            assert torch.equal(dataset[index][FRONT], frame)
            assert len(open_videos()) == video_utils._default_decoder_cache.size() <= 2
        cache = video_utils._default_decoder_cache
        assert cache.num_opens == count_opens(files_of_samples(dataset)[order], 2) > 6
    assert not open_videos()


def test_windows_of_files_open_each_file_once(root):
    dataset = load(root)
    order = WindowShuffledOrder(files_of_samples(dataset), window=2, seed=0).epoch(0)
    with patched({"lerobot_decoder_cache": {"max_decoders": 2}}):
        for index in order.tolist():
            dataset[index]
        assert video_utils._default_decoder_cache.num_opens == 6


def test_workers_open_their_own(root):
    """After the parent has read a video, a forked worker that took its decoder over could not decode."""
    dataset = load(root)
    expected = torch.stack([dataset[index][FRONT] for index in range(len(dataset))])
    with patched({"lerobot_decoder_cache": {"max_decoders": 3}}):
        dataset[0]
        loader = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork")
        found = torch.cat([batch[FRONT] for batch in loader])
    assert torch.equal(found, expected)


def test_upstreams_cache_is_restored(root):
    before = video_utils._default_decoder_cache, video_utils.VideoDecoderCache
    with patched({"lerobot_decoder_cache": {}}):
        assert video_utils._default_decoder_cache is not before[0]
    assert (video_utils._default_decoder_cache, video_utils.VideoDecoderCache) == before


def test_a_cache_without_decoders_is_refused():
    with (
        pytest.raises(ValueError, match=r"one open decoder at least; got max_decoders=0"),
        patched({"lerobot_decoder_cache": {"max_decoders": 0}}),
    ):
        pass


def test_samples_of_one_file_share_a_number(root: Path, recorded):
    assert files_of_samples(load(root)).tolist() == [episode for episode in range(6) for _ in range(8)]
    assert set(files_of_samples(LeRobotDataset("embodix/metaworld", root=recorded.root))) == {0}
