# SPDX-License-Identifier: Apache-2.0
"""A resumed run is the run that wrote its checkpoint: what has changed is named, and taken where it is accepted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embodix.data.content import dataset_content, files_content
from embodix.data.tokenizer import build_tokenizer
from embodix.testing.datasets import write_dataset
from embodix.testing.host_runs import VOCAB_SIZE, train_here
from embodix.training.identity import RunIdentity
from embodix_pi05.testing import small_run

IDENTITY = "checkpoints/last/training_state/embodix_identity.json"


@pytest.fixture(scope="module")
def trained(blobs: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of an epoch of eight, on a copy of the data that a test may replace."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(blobs, folder / "data")
    shutil.copytree(tokenizer, folder / "tokenizer")
    options = (f"tokenizer.directory={folder}/tokenizer", f"train.output_dir={folder}/run")
    train_here(small_run(folder / "data", *options))
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained / "run", tmp_path / "run", symlinks=True)


def _resume(run: Path, *more: str) -> Any:
    return train_here([f"resume={run}", "train.steps=5", "schedule.on_resume=keep", *more])


def _change_one_state(root: Path) -> None:
    (data,) = (root / "data").rglob("*.parquet")
    table = pq.read_table(data)
    column = table.column_names.index("observation.state")
    states = table.column(column).to_pylist()
    states[3][0] += 1e-3
    field = table.schema.field(column)
    pq.write_table(table.set_column(column, field, pa.array(states, type=field.type)), data)


def _change_statistics(root: Path) -> None:
    path = root / "meta" / "stats.json"
    stats = json.loads(path.read_text())
    stats["action"]["mean"][0] += 1
    path.write_text(json.dumps(stats))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_change_one_state, r"data: numbers was \w+, is \w+"),
        (_change_statistics, r"data: statistics was \w+, is \w+\n"),
    ],
)
def test_data_that_has_changed_is_named(
    run: Path, trained: Path, tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    changed = shutil.copytree(trained / "data", tmp_path / "data")
    change(changed)
    with pytest.raises(ValueError, match=rf"not the run that wrote .*000003:(?s:.*){message}(?s:.*)=\[data\]"):
        _resume(run, f"dataset.root={changed}")


def test_another_episode_is_named_and_may_be_accepted(run: Path, tmp_path: Path) -> None:
    longer = write_dataset(
        tmp_path / "longer", cameras=("front",), episodes_per_task=2, tasks=("push the button", "pull")
    )
    with pytest.raises(ValueError, match=r"data: total_episodes was 2, is 4\n  data: total_frames was 24, is 48"):
        _resume(run, f"dataset.root={longer}")
    assert [record.step for record in _resume(run, f"dataset.root={longer}", "accept_changes=[data]").records] == [4, 5]
    recorded = json.loads((run / IDENTITY).read_text())
    assert recorded["aspects"]["data"]["total_frames"] == 48
    (frames,) = [change for change in recorded["accepted"] if change["name"] == "total_frames"]
    assert frames == {"step": 3, "aspect": "data", "name": "total_frames", "recorded": 24, "found": 48}
    overrides = json.loads((run / "checkpoints/last/pretrained_model/embodix_overrides.json").read_text())
    assert not [override for override in overrides if "accept" in override], "the next resumption accepts for itself"
    _resume(run, "train.steps=6")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batch_size=4", r"batch: batch_size was 3, is 4(?s:.*)=\[batch\](?s:.*)The epoch then begins again"),
        ("train.seed=7", r"batch: seed was 1000, is 7"),
        ("policy.chunk_size=7", r"policy: chunk_size was 6, is 7(?s:.*)=\[policy\]"),
        ("action_pad=mask", r"algorithm: action_pad was \{'name': 'host'.*\[algorithm\]"),
        ("dataset.episodes=[0]", r"data: episodes was absent, is \[0\]"),
        ("dataset.statistics=exact", r"data: dataset.statistics was absent, is exact(?s:.*)=\[data\]"),
        ("dataset.join={action: [action]}", r"data: dataset.join was absent, is \{'action': \['action'\]\}"),
        (
            "+optimizer.lr=0.5",
            r"optimizer: optimizer.lr was 0.001, is 0.5\nA resumed run keeps the checkpoint's optimizer",
        ),
        ("+scheduler.peak_lr=0.5", r"optimizer: scheduler.peak_lr was 0.001, is 0.5"),
        ("policy.optimizer_lr=0.5", r"optimizer: policy.optimizer_lr was 0.001, is 0.5"),
    ],
)
def test_a_setting_that_has_changed_is_named(run: Path, override: str, message: str) -> None:
    before = (run / IDENTITY).read_bytes()
    with pytest.raises(ValueError, match=message.replace("\\[algorithm", "(?s:.*)\\[algorithm")):
        _resume(run, override)
    assert (run / IDENTITY).read_bytes() == before


def test_what_upstream_restores_cannot_be_accepted(run: Path) -> None:
    with pytest.raises(ValueError, match=r"accept_changes takes data, .*; got optimizer"):
        _resume(run, "+optimizer.lr=0.5", "accept_changes=[optimizer]")
    with pytest.raises(ValueError, match=r"optimizer.lr was 0.001, is 0.5"):
        _resume(run, "+optimizer.lr=0.5", "accept_changes=[policy]")


def test_another_tokenizer_is_named(run: Path, tmp_path: Path) -> None:
    build_tokenizer(["quite other words"], tmp_path / "other", vocab_size=VOCAB_SIZE)
    with pytest.raises(ValueError, match=r"tokenizer: directory was \w+, is \w+"):
        _resume(run, f"tokenizer.directory={tmp_path}/other")


def test_other_processes_inside_an_epoch_are_named(run: Path) -> None:
    """As if two had trained: half an epoch of each would be skipped."""
    path = run / IDENTITY
    recorded = json.loads(path.read_text())
    recorded["aspects"]["batch"]["processes"] = 2
    path.write_text(json.dumps(recorded))
    with pytest.raises(ValueError, match=r"batch: processes was 2, is 1"):
        _resume(run)


def test_another_version_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodix.__version__", "9.9")
    with pytest.raises(ValueError, match=r"versions: embodix was .*, is 9.9(?s:.*)=\[versions\]"):
        _resume(run)


def test_the_same_elsewhere_is_the_same(run: Path, trained: Path, tmp_path: Path) -> None:
    """Data, tokenizer and run moved; other workers, logs and saves; further steps."""
    moved = [shutil.copytree(trained / name, tmp_path / f"moved_{name}") for name in ("data", "tokenizer")]
    places = (f"dataset.root={moved[0]}", f"tokenizer.directory={moved[1]}")
    result = _resume(run, *places, "train.num_workers=1", "train.log_freq=1", "train.save_freq=1")
    assert [record.step for record in result.records] == [4, 5]
    assert json.loads((run / IDENTITY).read_text())["accepted"] == []


def test_a_damaged_identity_is_named(run: Path) -> None:
    (run / IDENTITY).write_text('{"aspect": {}}')
    with pytest.raises(ValueError, match=r"embodix_identity.json must hold the identity of a run as JSON"):
        _resume(run)


def test_accepting_is_for_resuming(blobs: Path, run_of: Callable[..., list[str]]) -> None:
    with pytest.raises(ValueError, match="accept_changes is for a run that is resumed"):
        train_here(run_of(blobs, "accept_changes=[data]"))


def test_content_is_that_of_the_files(blobs: Path, videos: Path, tmp_path: Path) -> None:
    before = dataset_content(blobs)
    assert before == dataset_content(shutil.copytree(blobs, tmp_path / "copy"))
    assert (before["total_frames"], before["fps"]) == (24, 10)
    cut = shutil.copytree(videos, tmp_path / "cut")
    (video,) = cut.rglob("*.mp4")
    video.write_bytes(video.read_bytes()[:-1])
    differing = {name for name, value in dataset_content(cut).items() if value != dataset_content(videos)[name]}
    assert differing == {"files"}
    (tmp_path / "copy" / ".hidden").write_text("x")
    assert files_content(tmp_path / "copy") == files_content(blobs)


def test_a_cut_off_data_file_is_named(blobs: Path, tmp_path: Path) -> None:
    cut = shutil.copytree(blobs, tmp_path / "cut")
    (data,) = (cut / "data").rglob("*.parquet")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"cut/data/chunk-000/file-000.parquet is no whole parquet file"):
        dataset_content(cut)


def test_aspects_are_compared_both_ways() -> None:
    recorded = RunIdentity({"data": {"a": 1, "b": [1]}, "policy": {"width": 3}})
    found = RunIdentity({"data": {"a": 1, "b": (1,), "c": 2}, "policy": {}})
    assert [str(change) for change in recorded.changes(found)] == [
        "data: c was absent, is 2",
        "policy: width was 3, is absent",
    ]
