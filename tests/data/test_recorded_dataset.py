# SPDX-License-Identifier: Apache-2.0
"""Where a recording may be written is known before anything is recorded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from embodix.data.recorded_dataset import require_place, reuse_dataset
from embodix.data.tokenizer import require_vocab_size


def test_a_file_is_no_place(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(ValueError, match=r"notes.txt is a file; name the folder"):
        require_place(file)
    with pytest.raises(ValueError, match=r"lies below .*notes.txt, which is a file"):
        reuse_dataset(file / "dataset", {})
    assert file.read_text() == "mine"


def test_a_folder_that_can_not_be_written_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(ValueError, match="can't be written by you"):
        require_place(tmp_path / "deep" / "dataset")
    (tmp_path / "deep").mkdir()
    require_place(tmp_path / "deep" / "dataset")


def test_a_folder_that_is_not_there_yet_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    require_place(tmp_path / "a" / "b")
    require_place(Path("relative"))
    assert reuse_dataset(tmp_path / "a" / "b", {}) is None
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_below_the_smallest_is_refused() -> None:
    with pytest.raises(ValueError, match="`vocab_size` must be at least 356"):
        require_vocab_size(355)
    require_vocab_size(356)
