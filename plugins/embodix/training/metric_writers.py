# SPDX-License-Identifier: Apache-2.0
"""Metrics of steps and evaluations to where the ``logging`` group asks, beside the run's own files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lerobot.configs.train import TrainPipelineConfig
from omegaconf import DictConfig

from embodix.report.evaluation import EvaluationRecord
from embodix.report.steps import StepRecord

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

KNOWN = ("none", "tensorboard", "wandb")


class MetricWriter(Protocol):
    """Takes the records of a run as they are made."""

    def step(self, record: StepRecord) -> None: ...
    def evaluation(self, record: EvaluationRecord) -> None: ...


class NoWriter:
    """The run's own files are enough."""

    def step(self, record: StepRecord) -> None:
        """Nothing."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Nothing."""


class WandbWriter(NoWriter):
    """Evaluations to the run that upstream's own logger has opened and writes the steps to."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Success in percent, as upstream names it; over ``eval/checkpoint_step``, since it comes steps later."""
        import wandb

        if wandb.run is None:
            return
        metrics = {f"eval/{task}/pc_success": 100 * rate.rate for task, rate in record.by_task.items()}
        wandb.run.define_metric("eval/*", step_metric="eval/checkpoint_step")
        wandb.run.log({**metrics, "eval/pc_success": 100 * record.success.rate, "eval/checkpoint_step": record.step})


class TensorboardWriter:
    """Event files in ``<run folder>/tensorboard``, opened with the first record: upstream refuses a folder that exists
    before its run starts."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / "tensorboard"
        self._opened: SummaryWriter | None = None

    @property
    def _writer(self) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        if self._opened is None:
            self._opened = SummaryWriter(self._folder)
        return self._opened

    def step(self, record: StepRecord) -> None:
        """Loss, gradient norm, learning rate and seconds by phase."""
        self._writer.add_scalar("train/loss", record.loss, record.step)
        self._writer.add_scalar("train/grad_norm", record.grad_norm, record.step)
        self._writer.add_scalar("train/lr", record.lr, record.step)
        for phase, seconds in record.wall_s.items():
            self._writer.add_scalar(f"seconds/{phase}", seconds, record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Success in percent, of all episodes and of each task."""
        self._writer.add_scalar("eval/pc_success", 100 * record.success.rate, record.step)
        for task, rate in record.by_task.items():
            self._writer.add_scalar(f"eval/{task}/pc_success", 100 * rate.rate, record.step)

    def close(self) -> None:
        """Write what is buffered."""
        if self._opened is not None:
            self._opened.close()


@contextmanager
def metric_writer(logging: DictConfig, host_cfg: TrainPipelineConfig) -> Iterator[MetricWriter]:
    """The writer that the group names.

    Raises:
        ValueError: an unknown logging name, or TensorBoard is not installed.
    """
    if logging.name not in KNOWN:
        raise ValueError(f"logging must be one of {', '.join(KNOWN)}; got {logging.name!r}.")
    if logging.name != "tensorboard":
        yield WandbWriter() if logging.name == "wandb" else NoWriter()
        return
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"logging=tensorboard needs the package tensorboard ({error}); pip install 'embodix[logging]'."
        ) from error
    assert host_cfg.output_dir is not None
    writer = TensorboardWriter(Path(host_cfg.output_dir))
    try:
        yield writer
    finally:
        writer.close()
