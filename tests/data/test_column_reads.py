# SPDX-License-Identifier: Apache-2.0
"""The column-read patch: the same samples, without decoding what nobody asked for."""

from __future__ import annotations

import pytest
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from PIL import Image, PngImagePlugin

from embodix.patching import patched

CHUNK = {"action": [step / 80 for step in range(10)]}


def load(root, episodes=None):
    return LeRobotDataset("embodix/metaworld", root=root, delta_timestamps=CHUNK, episodes=episodes)


@pytest.mark.parametrize("episodes", [None, [1]])
def test_samples_are_equal(recorded, episodes):
    plain = load(recorded.root, episodes)
    expected = [plain[index] for index in range(0, len(plain), 7)]
    with patched({"lerobot_column_reads": {}}):
        narrow = load(recorded.root, episodes)
        found = [narrow[index] for index in range(0, len(narrow), 7)]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(mine[key], value) if torch.is_tensor(value) else mine[key] == value, key


def test_a_sample_decodes_each_camera_once(recorded, monkeypatch):
    decoded = []
    load_image = PngImagePlugin.PngImageFile.load
    monkeypatch.setattr(
        PngImagePlugin.PngImageFile, "load", lambda image: decoded.append(id(image)) or load_image(image)
    )
    dataset = load(recorded.root)
    with patched({"lerobot_column_reads": {}}):
        dataset[0]
    assert len(set(decoded)) <= 2
    assert Image is not None


def test_upstream_is_restored(recorded):
    from lerobot.datasets.dataset_reader import DatasetReader

    before = DatasetReader._query_hf_dataset
    with patched({"lerobot_column_reads": {}}):
        assert DatasetReader._query_hf_dataset is not before
    assert DatasetReader._query_hf_dataset is before
