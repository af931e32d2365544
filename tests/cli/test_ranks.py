# SPDX-License-Identifier: Apache-2.0
"""Ranks that start in different seconds write into one folder: the first one's."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from embodix.cli.ranks import OTHERS_LOG, resolved_folders, with_first_ranks_folder


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """As a rank of torchrun, with the launcher's store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**values, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def test_the_others_take_the_first_ones_folder(launched: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    first = with_first_ranks_folder("train", ["-m", "train.steps=3"])
    run, sweep = (word.partition("=")[2] for word in first[1:3])
    assert json.loads(run).startswith(str(Path.cwd() / "outputs" / "train" / "20"))
    assert json.loads(sweep).startswith(str(Path.cwd() / "outputs" / "sweep" / "20"))
    assert [first[0], *first[3:]] == ["-m", "train.steps=3"]
    monkeypatch.setenv("RANK", "1")
    second = with_first_ranks_folder("train", ["train.steps=3"])
    assert second == [*first[1:3], *OTHERS_LOG, "train.steps=3"]


@pytest.mark.parametrize("variables", [{}, {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "1"}])
def test_one_process_is_left_alone(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert with_first_ranks_folder("train", ["train.steps=3"]) == ["train.steps=3"]


def test_a_folder_that_is_given_is_kept_and_a_mistake_is_left_to_the_command(tmp_path: Path) -> None:
    assert resolved_folders("train", [f"hydra.run.dir={tmp_path}"])[0] == f'hydra.run.dir="{tmp_path}"'
    assert resolved_folders("train", ["train.stepz=3"]) == []
