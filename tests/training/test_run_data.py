# SPDX-License-Identifier: Apache-2.0
"""The data choices of a run: read from the config, followed by the loader, kept over a resume."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from embodix.config.compose import compose
from embodix.data.order import WindowShuffledOrder
from embodix.patching import replace_attribute
from embodix.report.steps import read_steps
from embodix.testing.datasets import write_dataset
from embodix.testing.host_runs import train_here
from embodix.training.loader import OrderSampler
from embodix.training.run_data import DataChoices, read_choices
from embodix_pi05.testing import small_run

PLAIN: dict[str, Any] = {
    "dataset": {"repo_id": "a/b"},
    "reads": {"name": "upstream"},
    "preprocessing": {"name": "main"},
    "sampling": {"name": "upstream"},
}


@pytest.fixture(scope="module")
def in_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four episodes of six frames, each in a data file of its own."""
    tasks = tuple(f"task number {number}" for number in range(4))
    return write_dataset(tmp_path_factory.mktemp("files") / "files", tasks=tasks, episode_length=6, episodes_per_file=1)


def test_upstreams_choices_change_nothing() -> None:
    choices = read_choices(PLAIN)
    assert choices == DataChoices()
    assert not choices.preprocesses_in_loader and not choices.orders_samples


def test_a_mixture_preprocesses_where_it_reads() -> None:
    choices = read_choices({**PLAIN, "dataset": {"members": {"arm": {"repo_id": "a/b"}}}})
    assert choices.preprocesses_in_loader and choices.orders_samples


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reads": {"name": "rows"}}, r"reads is one of upstream, columns; got 'rows'"),
        ({"preprocessing": {"name": "gpu"}}, r"preprocessing is one of main, workers; got 'gpu'"),
        ({"sampling": {"name": "random"}}, r"sampling is one of upstream, file_window; got 'random'"),
        ({"sampling": {"name": "file_window", "options": {"window": 0}}}, r"window counts files.*got 0"),
    ],
)
def test_unknown_choices_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_choices({**copy.deepcopy(PLAIN), **change})


def test_every_choice_is_an_option_of_its_group() -> None:
    overrides = ["reads=columns", "preprocessing=workers", "sampling=file_window", "sampling.options.window=3"]
    cfg = compose("train", ["policy=pi05_small", *overrides])
    assert (cfg.reads.name, cfg.preprocessing.name, cfg.sampling.name) == ("columns", "workers", "file_window")
    assert cfg.sampling.options.window == 3


def test_the_sampler_moves_on_by_epochs() -> None:
    order = WindowShuffledOrder([0, 0, 1, 1, 2], window=1, seed=0)
    sampler = OrderSampler(order)
    assert [list(sampler), list(sampler)] == [order.epoch(0).tolist(), order.epoch(1).tolist()]
    assert len(sampler) == 5 and sampler.epoch == 2


def trained_indices(overrides: list[str]) -> list[int]:
    """Dataset indices in the order in which upstream's loop trained on them."""
    from lerobot.scripts import lerobot_train

    seen: list[int] = []
    update_policy = lerobot_train.update_policy

    def keeping(metrics: Any, policy: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend(batch["index"].tolist())
        return update_policy(metrics, policy, batch, *args, **kwargs)

    undo = replace_attribute(lerobot_train, "update_policy", keeping)
    try:
        train_here(overrides)
    finally:
        undo()
    return seen


@pytest.mark.parametrize("num_workers", [0, 2])
def test_files_are_read_one_after_the_other(
    in_files: Path, demonstrations: Path, tmp_path: Path, num_workers: int
) -> None:
    options = ["sampling=file_window", "sampling.options.window=1", "train.steps=8", f"train.num_workers={num_workers}"]
    options += [f"tokenizer.directory={demonstrations}/tokenizer", "train.save_checkpoint=false"]
    seen = trained_indices(small_run(in_files, *options, f"train.output_dir={tmp_path}/run", "+plugin=embodix"))
    files = [index // 6 for index in seen]
    assert sorted(seen) == list(range(24)) and len({tuple(files[i : i + 6]) for i in range(0, 24, 6)}) == 4
    assert all(len(set(files[i : i + 6])) == 1 for i in range(0, 24, 6))
    assert seen != sorted(seen)


def test_a_streamed_data_set_is_left_to_upstream(demonstrations: Path, tmp_path: Path) -> None:
    """Of videos: upstream can't collate streamed images."""
    videos = write_dataset(tmp_path / "videos", cameras=("front",), video=True)
    options = ["dataset.streaming=true", f"tokenizer.directory={demonstrations}/tokenizer", "train.steps=2"]
    options += ["train.save_checkpoint=false", "train.num_workers=1", "+plugin=embodix"]
    assert len(train_here(small_run(videos, *options, f"train.output_dir={tmp_path}/run")).records) == 2
    with pytest.raises(ValueError, match=r"set dataset.streaming=false"):
        train_here(small_run(videos, *options, f"train.output_dir={tmp_path}/other", "sampling=file_window"))


def test_the_order_is_taken_up_where_it_was(in_files: Path, demonstrations: Path, tmp_path: Path) -> None:
    """Twelve steps of an epoch of eight batches: the checkpoint lies in the second epoch."""
    options = ["sampling=file_window", "sampling.options.window=2", "train.steps=12", "train.save_freq=2"]
    options += [f"tokenizer.directory={demonstrations}/tokenizer", "train.num_workers=2"]
    whole = tmp_path / "whole"
    seen = trained_indices(small_run(in_files, *options, f"train.output_dir={whole}"))
    resumed = shutil.copytree(whole, tmp_path / "resumed", symlinks=True)
    shutil.rmtree(resumed / "checkpoints" / "000012")
    (resumed / "checkpoints" / "last").unlink()
    (resumed / "checkpoints" / "last").symlink_to("000010")
    assert trained_indices([f"resume={resumed}"]) == seen[30:]
    ours, theirs = read_steps(resumed / "steps.jsonl"), read_steps(whole / "steps.jsonl")
    assert [record.loss for record in ours] == [record.loss for record in theirs]


def test_images_that_are_not_normalised_need_no_statistics(demonstrations: Path, tmp_path: Path) -> None:
    root = shutil.copytree(demonstrations, tmp_path / "data")
    path = root / "meta" / "stats.json"
    stats = {key: value for key, value in json.loads(path.read_text()).items() if "images" not in key}
    path.write_text(json.dumps(stats))
    options = ["train.steps=1", "train.save_checkpoint=false"]
    assert len(train_here(small_run(root, *options, f"train.output_dir={tmp_path}/run")).records) == 1
    path.write_text(json.dumps({key: value for key, value in stats.items() if key != "action"}))
    with pytest.raises(ValueError, match=r"the data set .*action lacks q01 and q99.*dataset.statistics=exact"):
        train_here(small_run(root, *options, "check=off", f"train.output_dir={tmp_path}/other"))
