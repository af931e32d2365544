# SPDX-License-Identifier: Apache-2.0
"""Success reaches the loggers beside the loss."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from embodix.report.evaluation import EvaluationRecord, SuccessRate
from embodix.report.steps import StepRecord
from embodix.training.run import metric_writer

RATE = SuccessRate.of([True, False, False, False])
EVALUATION = EvaluationRecord(20, "checkpoints/000020", RATE, {"reach-v3": RATE}, wall_s=1.0)


def host(folder: Path) -> Any:
    return SimpleNamespace(output_dir=folder)


def test_tensorboard_gets_loss_and_success(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with metric_writer(OmegaConf.create({"name": "tensorboard"}), host(tmp_path)) as writer:
        assert not (tmp_path / "tensorboard").exists()
        writer.step(StepRecord(20, 0.5, 1.0, 1e-3, 8, {"forward": 0.1}, {"forward": 0.1}))
        writer.evaluation(EVALUATION)
    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for name, value in (("train/loss", 0.5), ("eval/pc_success", 25.0), ("eval/reach-v3/pc_success", 25.0)):
        assert [(event.step, event.value) for event in events.Scalars(name)] == [(20, value)]


def test_wandb_gets_success_over_the_checkpoints_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, Any]] = []
    run = SimpleNamespace(define_metric=lambda *a, **k: None, log=logged.append)
    monkeypatch.setattr("wandb.run", run)
    with metric_writer(OmegaConf.create({"name": "wandb"}), host(tmp_path)) as writer:
        writer.evaluation(EVALUATION)
    assert logged == [{"eval/reach-v3/pc_success": 25.0, "eval/pc_success": 25.0, "eval/checkpoint_step": 20}]


def test_an_unknown_logger_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="one of none, tensorboard, wandb; got 'csv'"),
        metric_writer(OmegaConf.create({"name": "csv"}), host(tmp_path)),
    ):
        pass
