# SPDX-License-Identifier: Apache-2.0
"""Step metrics to TensorBoard, as the ``logging`` group asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lerobot.configs.train import TrainPipelineConfig
from omegaconf import DictConfig

from embodix.report.steps import StepRecord

KNOWN = ("none", "tensorboard", "wandb")


@contextmanager
def step_writer(logging: DictConfig, host_cfg: TrainPipelineConfig) -> Iterator[Callable[[StepRecord], None] | None]:
    """A function that writes one step's metrics, or None when only ``steps.jsonl`` is wanted.

    Weights & Biases is upstream's own logger and needs nothing here.

    Raises:
        ValueError: an unknown logging name, or TensorBoard is not installed.
    """
    if logging.name not in KNOWN:
        raise ValueError(f"logging must be one of {', '.join(KNOWN)}; got {logging.name!r}.")
    if logging.name != "tensorboard":
        yield None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            f"logging=tensorboard needs the package tensorboard ({error}); pip install 'embodix[logging]'."
        ) from error
    writer: SummaryWriter | None = None

    def write(record: StepRecord) -> None:
        nonlocal writer
        if writer is None:  # upstream refuses an output folder that exists before its run starts
            assert host_cfg.output_dir is not None
            writer = SummaryWriter(Path(host_cfg.output_dir) / "tensorboard")
        writer.add_scalar("train/loss", record.loss, record.step)
        writer.add_scalar("train/grad_norm", record.grad_norm, record.step)
        writer.add_scalar("train/lr", record.lr, record.step)
        for phase, seconds in record.wall_s.items():
            writer.add_scalar(f"seconds/{phase}", seconds, record.step)

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()
