# SPDX-License-Identifier: Apache-2.0
"""Preprocessing in the loader: the batches, losses and weights of preprocessing in the loop, resumed too."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from embodix.data.preprocessing import LoopPreprocessor, MicroBatches, PreprocessedBatch
from embodix.patching import replace_attribute
from embodix.report.steps import read_steps
from embodix.testing.host_runs import train_here
from embodix_groot.testing import small_groot_run
from embodix_pi05.testing import small_run

RUNS = {"pi05": small_run, "groot": small_groot_run}
Weights = dict[str, torch.Tensor]


@contextmanager
def trained_batches() -> Iterator[list[tuple[type, dict[str, Any]]]]:
    """What upstream's ``update_policy`` is given, and what came out of the loader."""
    from lerobot.scripts import lerobot_train

    batches: list[tuple[type, dict[str, Any]]] = []
    update_policy = lerobot_train.update_policy

    def keeping(metrics: Any, policy: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append((type(batch), {k: v.clone() if torch.is_tensor(v) else v for k, v in batch.items()}))
        return update_policy(metrics, policy, batch, *args, **kwargs)

    undo = replace_attribute(lerobot_train, "update_policy", keeping)
    try:
        yield batches
    finally:
        undo()


def run(policy: str, dataset: Path, folder: Path, *options: str) -> tuple[list[Any], list[Any]]:
    with trained_batches() as batches:
        result = train_here(RUNS[policy](dataset, f"train.output_dir={folder}", *options))
    return batches, [(r.loss, r.grad_norm, r.lr) for r in result.records]


@pytest.mark.parametrize("policy", RUNS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_and_losses_are_those_of_the_loop(
    demonstrations: Path, tmp_path: Path, policy: str, num_workers: int
) -> None:
    options = ("+plugin=embodix", f"train.num_workers={num_workers}", "train.save_checkpoint=false")
    main, expected = run(policy, demonstrations, tmp_path / "main", *options, "preprocessing=main")
    workers, found = run(policy, demonstrations, tmp_path / "workers", *options, "preprocessing=workers")
    assert found == expected
    assert [kind for kind, _ in workers] == [PreprocessedBatch] * 3 and {kind for kind, _ in main} == {dict}
    for (_, mine), (_, theirs) in zip(workers, main, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(mine[key], value) if torch.is_tensor(value) else mine[key] == value, key


def test_a_resumed_run_is_the_uninterrupted_one(
    demonstrations: Path, tmp_path: Path, weights_of: Callable[[Path], Weights]
) -> None:
    options = ("preprocessing=workers", "train.num_workers=2", "train.steps=4", "train.save_freq=2", "+plugin=embodix")
    run("pi05", demonstrations, tmp_path / "whole", *options)
    resumed = shutil.copytree(tmp_path / "whole", tmp_path / "resumed", symlinks=True)
    shutil.rmtree(resumed / "checkpoints" / "000004")
    (resumed / "checkpoints" / "last").unlink()
    (resumed / "checkpoints" / "last").symlink_to("000002")
    train_here([f"resume={resumed}"])
    ours, theirs = (read_steps(tmp_path / name / "steps.jsonl") for name in ("resumed", "whole"))
    assert [record.loss for record in ours] == [record.loss for record in theirs]
    mine, whole = weights_of(resumed), weights_of(tmp_path / "whole")
    assert all(torch.equal(mine[name], whole[name]) for name in whole)


def test_the_loops_preprocessor_leaves_done_batches_and_serves_raw_ones() -> None:
    class Upstream:
        steps = ("normalise",)

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"action": batch["action"] * 2}

    loop = LoopPreprocessor(Upstream(), torch.device("cpu"))
    done = PreprocessedBatch(action=torch.ones(2), task=["a", "b"])
    assert torch.equal(loop(done)["action"], done["action"]) and loop(done)["task"] == ["a", "b"]
    assert isinstance(loop(done), PreprocessedBatch)
    parts = loop(MicroBatches([done, {"action": torch.ones(2)}]))
    assert isinstance(parts, MicroBatches)
    assert [part["action"].tolist() for part in parts] == [[1.0, 1.0], [2.0, 2.0]]
    assert loop.steps == ("normalise",)
