# SPDX-License-Identifier: Apache-2.0
"""``lerobot train``: one run of upstream's ``train()`` from a Hydra config, and where its metrics go."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list
from lerobot.configs.train import TrainPipelineConfig
from omegaconf import DictConfig, OmegaConf

from embodix.checks.guard import require_sound_data
from embodix.config.compose import compose_train, merge_overrides
from embodix.launched_rank import is_first_rank, launched_processes
from embodix.parallel.choice import choose_parallel
from embodix.parallel.effective import require_one_run
from embodix.policies.support import support_of
from embodix.report.evaluation import EvaluationRecord
from embodix.report.run_page import write_run_page
from embodix.report.steps import StepRecord
from embodix.training.accelerator import ObservedAccelerator
from embodix.training.adapters import settle_adapters
from embodix.training.checkpoint import Checkpoint, find_checkpoint
from embodix.training.checkpoint_evaluation import CheckpointEvaluation, plan_evaluation
from embodix.training.config_checks import require_sound_config, say_what_differs, sound_host_config
from embodix.training.features import named_choice, run_traits, select_training_features
from embodix.training.host_config import (
    fill_missing_preset,
    host_config_of_checkpoint,
    require_landed_groups,
)
from embodix.training.host_context import host_context
from embodix.training.interruption import Interruption
from embodix.training.resumption import Resumption
from embodix.training.run_data import require_trainable_dataset
from embodix.training.run_folder import owned_folder
from embodix.training.schedule import RunSchedule, fresh_schedule, resumed_schedule
from embodix.training.session import TrainingSession
from embodix.training.stopped import RunInterrupted

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


FIXED_GROUPS = ("optimizer", "scheduler", "env", "peft", "rename_map")  # of a run that is resumed
FIXED_FIELDS = ("peft.", "rename_map.", "logging.options.")  # those of the other groups reach upstream's config


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        output_dir: the run folder.
        records: the steps trained by this call.
        final_loss: mean loss of the last tenth of them (NaN when none was trained).
    """

    output_dir: Path
    records: list[StepRecord]

    @property
    def final_loss(self) -> float:
        tail = self.records[-max(1, len(self.records) // 10) :]
        return statistics.fmean(record.loss for record in tail) if tail else float("nan")


def run_training(cfg: DictConfig, overrides: list[str], begun: Callable[[], None] = lambda: None) -> RunResult:
    """Train as the config says and return what was recorded.

    Args:
        cfg: the composed ``train`` config.
        overrides: the Hydra overrides of this command, kept in the checkpoint.
        begun: called in the first rank once nothing refuses the command any more, before anything is written.

    Raises:
        ValueError: a mistake in the config, the dataset or the checkpoint; the message says what to do.
    """
    if cfg.resume is None:
        if cfg.accept_changes:
            raise ValueError("accept_changes is for a run that is resumed; leave it out or name one with resume=... .")
        host_cfg = sound_host_config(cfg)
        return _run(cfg, host_cfg, overrides, begun, fresh_schedule(cfg.schedule, host_cfg))
    checkpoint = find_checkpoint(cfg.resume)
    resumption = checkpoint.resumption(cfg.accept_changes)
    recorded = [override for override in checkpoint.overrides() or [] if not _is_of_one_start(override)]
    of_this_command = ("resume=", "accept_changes=")
    added = [override for override in overrides if not override.lstrip("+").startswith(of_this_command)]
    _require_resumable(checkpoint, recorded, added)
    merged = merge_overrides(recorded, added)
    cfg = compose_train(merged)
    require_landed_groups(cfg)
    host_cfg = host_config_of_checkpoint(checkpoint.config_path, added)
    host_cfg.output_dir = checkpoint.folder.parent.parent
    require_sound_config(cfg, host_cfg)
    if checkpoint.step >= host_cfg.steps:
        logging.warning(
            f"{checkpoint.folder} has all of its {host_cfg.steps} steps: nothing is left to train. "
            f"train.steps={2 * host_cfg.steps} would train as many again."
        )
    schedule = resumed_schedule(cfg.schedule, host_cfg, checkpoint.folder)
    return _run(cfg, host_cfg, merged, begun, schedule, resumption, checkpoint.config_path)


def _is_of_one_start(override: str) -> bool:
    return override.lstrip("+").startswith("schedule.on_resume=")


def _require_resumable(checkpoint: Checkpoint, recorded: list[str], added: list[str]) -> None:
    """A resumed run keeps the checkpoint's policy, optimizer, schedule and simulator; asking for others is refused.

    Raises:
        ValueError: another policy type, or a group that would silently change nothing.
    """
    names = {override.lstrip("+").partition("=")[0] for override in added}
    if names & {"policy", "policy.type"}:
        asked = OmegaConf.to_container(compose_train(added).policy)
        assert isinstance(asked, dict)
        if asked["type"] not in ("???", checkpoint.policy_type()):
            raise ValueError(
                f"resume={checkpoint.folder} holds a policy of type {checkpoint.policy_type()!r}, but this command "
                f"asks for {asked['type']!r}. Leave the policy out when resuming, or resume another checkpoint."
            )
    fixed = [override for override in added if _is_fixed_on_resume(override) and override not in recorded]
    if fixed:
        raise ValueError(
            f"{', '.join(fixed)} cannot be chosen when resuming: the checkpoint's own is kept. Leave it out, or start "
            f"another run from the weights with policy.pretrained_path={checkpoint.config_path.parent}."
        )


def _is_fixed_on_resume(override: str) -> bool:
    key, _, value = override.lstrip("+~").partition("=")
    whole = key in FIXED_GROUPS or (key, value) == ("logging", "wandb")
    return whole or key.startswith(FIXED_FIELDS)


def _run(
    cfg: DictConfig,
    host_cfg: TrainPipelineConfig,
    overrides: list[str],
    begun: Callable[[], None],
    schedule: RunSchedule,
    resumption: Resumption | None = None,
    resumed_config: Path | None = None,
) -> RunResult:
    fill_missing_preset(host_cfg)
    settle_adapters(host_cfg, cfg.peft)
    selection = select_training_features(cfg)
    parallel = named_choice(cfg.parallel)
    traits = run_traits(cfg, host_cfg, selection)
    placed = choose_parallel(parallel.name, parallel.options, traits, launched_processes())
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    require_trainable_dataset(host_cfg, config["dataset"])
    require_sound_data(host_cfg, config)
    say_what_differs(host_cfg)
    support_of(cfg.policy.type).prepare_assets(cfg, host_cfg)
    plan = plan_evaluation(cfg, host_cfg)
    assert host_cfg.output_dir is not None
    output_dir = Path(host_cfg.output_dir)
    with owned_folder(output_dir), metric_writer(cfg.logging, host_cfg) as writer:
        if is_first_rank():
            _require_new(output_dir, resumption)
            begun()
        evaluation = None if plan is None else CheckpointEvaluation(plan, output_dir, writer.evaluation)
        session = TrainingSession(
            name=cfg.plugin or "upstream",
            host_cfg=host_cfg,
            selection=selection,
            config=config,
            overrides=overrides,
            synchronize=cfg.step_clock.synchronize,
            count_flops_at=cfg.step_clock.count_flops_at,
            resumption=resumption,
            on_step=writer.step,
            evaluation=evaluation,
            interruption=Interruption(),
            schedule=schedule,
            parallel=placed,
        )
        with host_context(cfg, resumed_config):
            _train(session, evaluation)
    return RunResult(session.output_dir, session.records)


def _require_new(output_dir: Path, resumption: Resumption | None) -> None:
    if resumption is None and output_dir.is_dir():
        raise FileExistsError(
            f"Output directory {output_dir} already exists and resume is False. Continue its run with "
            f"resume={output_dir}, or choose another folder."
        )


def _train(session: TrainingSession, evaluation: CheckpointEvaluation | None) -> None:
    """Upstream's loop, the evaluations that are still out at its end, and the page of both."""
    from lerobot.scripts.lerobot_train import train

    session.activate()
    host_cfg = session.host_cfg
    force_cpu = host_cfg.policy is not None and host_cfg.policy.device == "cpu"
    accelerator = ObservedAccelerator(session, force_cpu, session.parallel.layout)
    require_one_run(accelerator.state.num_processes, launched_processes())
    host_cfg.output_dir = Path(broadcast_object_list([str(host_cfg.output_dir)])[0])  # each rank resolved its own time
    try:
        try:
            train(host_cfg, accelerator=accelerator)
        except RunInterrupted:
            session.training_ends()
            raise
        if session.interruption is not None:
            session.interruption.release()  # no step is left to be finished while evaluations are waited for
        if evaluation is not None:
            evaluation.finish()
    finally:
        session.close()
        if evaluation is not None:
            evaluation.stop()
    if evaluation is not None and session.accelerator.is_main_process:
        logging.info("Report: %s", write_run_page(session.output_dir))


KNOWN = ("none", "tensorboard", "wandb")


class MetricWriter:
    """Takes the records of a run as they are made; this one nothing, for the run's own files are enough.

    Attributes:
        step, evaluation: called with each record; None for nothing.
    """

    step: Callable[[StepRecord], None] | None = None
    evaluation: Callable[[EvaluationRecord], None] | None = None


class WandbWriter(MetricWriter):
    """Evaluations to the run that upstream's own logger has opened and writes the steps to."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Success in percent, as upstream names it; over ``eval/checkpoint_step``, since it comes steps later."""
        import wandb

        if wandb.run is None:
            return
        metrics = {f"eval/{task}/pc_success": 100 * rate.rate for task, rate in record.by_task.items()}
        wandb.run.define_metric("eval/*", step_metric="eval/checkpoint_step")
        wandb.run.log({**metrics, "eval/pc_success": 100 * record.success.rate, "eval/checkpoint_step": record.step})


class TensorboardWriter(MetricWriter):
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
        yield WandbWriter() if logging.name == "wandb" else MetricWriter()
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
