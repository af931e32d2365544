# SPDX-License-Identifier: Apache-2.0
"""Column reads: the samples of upstream on every index, without decoding what nobody asked for."""

from __future__ import annotations

import pickle

import pytest
import torch
from lerobot.datasets.dataset_reader import DatasetReader
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from PIL import PngImagePlugin

from embodix.data import column_reads
from embodix.data.column_reads import EpisodeRows, read_columns
from embodix.patching import patched

FRONT = "observation.images.front"
CHUNKS = {
    "actions": {"action": range(10)},
    "history_and_future": {"action": range(-3, 7), "observation.state": [-5, -1, 0]},
    "longer_than_an_episode": {"action": range(0, 120, 3)},
    "scalars": {"timestamp": [-1, 0], "frame_index": [0, 4], "action": [0]},
}


def load(root, deltas, episodes=None):
    seconds = {key: [step / 80 for step in steps] for key, steps in deltas.items()}
    return LeRobotDataset("embodix/metaworld", root=root, delta_timestamps=seconds, episodes=episodes)


def without_images(dataset):
    """Upstream's reading takes seconds a sample with images: every index is compared on the other columns."""
    cameras = dataset.meta.camera_keys
    dataset.reader.hf_dataset = dataset.reader.hf_dataset.remove_columns(cameras)
    for camera in cameras:
        del dataset.meta.info["features"][camera]
    return dataset


def assert_equal(mine, theirs):
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        if torch.is_tensor(value):
            assert mine[key].dtype == value.dtype and torch.equal(mine[key], value), key
        else:
            assert mine[key] == value, key


@pytest.mark.parametrize("episodes", [None, [1], [2, 0]])
@pytest.mark.parametrize("deltas", CHUNKS.values(), ids=CHUNKS)
def test_every_index_equals_upstreams(demonstrations, deltas, episodes):
    plain, narrow = (without_images(load(demonstrations, deltas, episodes)) for _ in range(2))
    read_columns(narrow)
    assert len(plain) > 50 and len(plain) == len(narrow)
    for index in range(len(plain)):
        assert_equal(narrow[index], plain[index])


@pytest.mark.parametrize("episodes", [None, [1]])
def test_samples_with_images_are_equal(recorded, episodes):
    deltas = {"action": range(10), FRONT: [-1, 0]}
    plain = load(recorded.root, deltas, episodes)
    narrow = load(recorded.root, deltas, episodes)
    read_columns(narrow)
    for index in range(0, len(plain), 17):
        assert_equal(narrow[index], plain[index])


def test_the_patch_covers_readers_that_exist_already(recorded):
    dataset = load(recorded.root, CHUNKS["actions"])
    expected = dataset[3]
    before = vars(DatasetReader)["_query_hf_dataset"], vars(DatasetReader)["_get_query_indices"]
    with patched({"lerobot_column_reads": {}}):
        assert vars(DatasetReader)["_query_hf_dataset"] is not before[0]
        assert_equal(dataset[3], expected)
        assert column_reads.known_readers[dataset.reader].columns.keys() == {"action"}
    assert (vars(DatasetReader)["_query_hf_dataset"], vars(DatasetReader)["_get_query_indices"]) == before


def test_one_data_set_alone_may_read_columns(recorded):
    narrow, plain = (load(recorded.root, CHUNKS["actions"]) for _ in range(2))
    read_columns(narrow)
    assert_equal(narrow[0], plain[0])
    assert narrow.reader in column_reads.known_readers and plain.reader not in column_reads.known_readers


def test_episode_rows_are_the_tables(demonstrations):
    table = load(demonstrations, CHUNKS["actions"]).meta.episodes
    rows = EpisodeRows(table)
    assert [rows[index] for index in (0, 3, 0, -1)] == [table[index] for index in (0, 3, 0, -1)]
    assert rows["dataset_from_index"][:] == table["dataset_from_index"][:] and len(rows) == len(table) == 4
    assert rows.column_names == table.column_names and rows[1] is rows[1]


def test_a_data_set_can_be_sent_to_a_spawned_worker(recorded):
    narrow = load(recorded.root, CHUNKS["actions"])
    read_columns(narrow)
    expected = narrow[5]
    sent = pickle.loads(pickle.dumps(narrow))
    assert sent.reader._query_hf_dataset.args[0] is sent.reader
    assert_equal(sent[5], expected)


def test_a_sample_decodes_each_camera_once(recorded, monkeypatch):
    decoded = []
    load_image = PngImagePlugin.PngImageFile.load
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda image: decoded.append(image) or load_image(image))
    dataset = load(recorded.root, CHUNKS["actions"])
    read_columns(dataset)
    dataset[0]
    assert len({id(image) for image in decoded}) == 2
    plain = load(recorded.root, CHUNKS["actions"])
    decoded.clear()
    plain[0]
    assert len({id(image) for image in decoded}) > 2
