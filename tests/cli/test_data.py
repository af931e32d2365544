# SPDX-License-Identifier: Apache-2.0
"""``lerobot data``: mistakes in words, nothing half-written, and the same command goes on after an interruption."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embodix.data.recorded_dataset import MANIFEST_FILE
from embodix_metaworld.demonstrations import demonstrate

Command = Callable[..., tuple[int, str]]
SMALL = ("tasks=[reach-v3]", "~episodes", "image_size=28", "num_workers=1", "drift_fraction=0", "progress=no")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed=-1"], "`seed` must be at least 0, got -1."),
        (["episodes_per_task=0"], "Every task needs at least one episode, got 0"),
        (["noise_levels=[]"], "`noise_levels` must be one or more numbers"),
        (["hold_steps=-2"], "`hold_steps` must be at least 0, got -2."),
        (["vocab_size=10"], "`vocab_size` must be at least"),
        (["image_size=large"], "option 'image_size', is a whole number; got 'large'."),
        (["tasks=reach-v3"], "option 'tasks', is a list; got 'reach-v3'."),
        (["+sead=3"], "lerobot data metaworld has no option 'sead'. Did you mean 'seed'?"),
    ],
)
def test_a_mistake_is_said_before_anything_is_recorded(
    run_verb: Command, tmp_path: Path, words: list[str], message: str
) -> None:
    code, printed = run_verb("data", "metaworld", f"root={tmp_path}/dataset", *words)
    assert code == 1
    assert message in printed
    assert "Traceback" not in printed
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_is_kept(run_verb: Command, tmp_path: Path) -> None:
    (tmp_path / "dataset").write_text("mine")
    code, printed = run_verb("data", "metaworld", f"root={tmp_path}/dataset", *SMALL)
    assert code == 1
    assert "dataset is a file; name the folder that the data set is to be." in printed
    assert (tmp_path / "dataset").read_text() == "mine"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_recording_is_gone_on_with(
    run_verb: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    recorded: list[Any] = []

    def interrupted(scene: Any, settings: Any, episode: int) -> Any:
        if recorded:
            os.kill(os.getpid(), signum)
        recorded.append(episode)
        return demonstrate(scene, settings, episode)

    words = ("data", "metaworld", f"root={tmp_path}/dataset", *SMALL, "episodes_per_task=2")
    with monkeypatch.context() as patch:
        patch.setattr("embodix_metaworld.demonstrations.demonstrate", interrupted)
        code, printed = run_verb(*words)
    assert code == 130
    assert "Interrupted. `root` holds no half-written data set; the same command goes on" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["dataset.recording"]
    code, printed = run_verb(*words)
    assert code == 0, printed
    assert [path.name for path in tmp_path.iterdir()] == ["dataset"]
    assert len(json.loads((tmp_path / "dataset" / MANIFEST_FILE).read_text())["episodes"]) == 2
