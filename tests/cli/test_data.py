# SPDX-License-Identifier: Apache-2.0
"""``lerobot data``: mistakes in words, nothing half-written, and the same command goes on after an interruption."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from embodix.checks.catalogue import KINDS
from embodix.cli.data import MATTERS_OF_A_RUN, data_task
from embodix.config.compose import compose
from embodix.data.recorded_dataset import MANIFEST_FILE, RecordedDataset
from embodix.testing.datasets import write_dataset
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


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    """Python's own handler of Ctrl-C: a shell starts what runs in its background without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard_interrupts")
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


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the source hands over, for a test to damage."""
    root = write_dataset(tmp_path / "dataset", cameras=("front",))
    recorded = RecordedDataset(root, root, num_episodes=2, num_frames=24, num_failed=0, reused=False)
    monkeypatch.setattr("embodix_metaworld.recorder.record_metaworld", lambda _: recorded)
    return root


def _without_statistics(root: Path) -> None:
    path = root / "meta" / "stats.json"
    stats = json.loads(path.read_text())
    del stats["action"]
    path.write_text(json.dumps(stats))


def _under_another_name(root: Path) -> None:
    for path in (*root.rglob("*.json"), *(root / "data").rglob("*.parquet")):
        if path.suffix == ".json":
            path.write_text(path.read_text().replace('"action"', '"action.arm"'))
            continue
        table = pq.read_table(path)
        pq.write_table(table.rename_columns([n.replace("action", "action.arm") for n in table.column_names]), path)


@pytest.mark.parametrize(
    ("change", "kind"), [(_without_statistics, "statistics_missing"), (_under_another_name, "key_missing")]
)
def test_what_a_run_decides_about_is_printed(
    recording: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Path], None], kind: str
) -> None:
    change(recording)
    data_task(compose("data", ["data=metaworld", f"root={recording}"]))
    printed = capsys.readouterr().out
    assert f"[{kind}]" in printed
    assert "`lerobot check` judges it for the policy of a run." in printed
    assert "check=warn" not in printed
    assert set(MATTERS_OF_A_RUN) <= set(KINDS)


@pytest.mark.parametrize(
    ("pattern", "kind"), [("data/**/*.parquet", "file_unreadable"), ("meta/info.json", "info_unreadable")]
)
def test_a_damaged_recording_is_refused(recording: Path, pattern: str, kind: str) -> None:
    (path,) = recording.glob(pattern)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(
        ValueError, match=rf"{recording} is damaged; remove it and record it again:\n.*\[{kind}\]"
    ) as refused:
        data_task(compose("data", ["data=metaworld", f"root={recording}"]))
    assert "check=warn" not in str(refused.value)
