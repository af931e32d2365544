# SPDX-License-Identifier: Apache-2.0
"""The `evaluation` group: `lerobot eval` on checkpoints while training goes on, in a process of its own."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lerobot.configs.train import TrainPipelineConfig
from lerobot.utils.constants import LAST_CHECKPOINT_LINK
from omegaconf import DictConfig, OmegaConf

from embodix.arguments import typed_arguments
from embodix.report.evaluation import (
    RESULTS_FILE,
    EvaluationRecord,
    append_evaluation,
    best_evaluation,
    read_evaluation,
    read_evaluations,
)

EVALUATIONS_FOLDER = "evaluations"
BEST_LINK = "best"
KEEP = ("all", "best_and_last")
Command = Callable[[Path, Path], list[str]]
"""The command that evaluates a checkpoint folder and writes `results.json` into another folder."""


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of ``evaluation=background`` and ``waiting``, as hydra_conf/evaluation/background.yaml tells them."""

    n_episodes: int
    first_seed: int
    num_slots: int
    num_workers: int
    num_threads: int
    device: str | None
    videos: int
    keep: str
    max_pending: int


def evaluation_options(choice: DictConfig) -> EvaluationOptions:
    """
    Raises:
        embodix.arguments.ArgumentError: an option that does not exist, or a value that is none of its type.
    """
    options: Any = OmegaConf.to_container(choice.options, resolve=True)
    return EvaluationOptions(**typed_arguments(EvaluationOptions, options, f"evaluation={choice.name}"))


@dataclass(frozen=True)
class EvaluationPlan:
    """How checkpoints are evaluated.

    Attributes:
        every: steps between two evaluations.
        command: what is run for each.
        waits: training waits for every evaluation.
        max_pending: checkpoints that may wait for the evaluation before theirs; then training waits.
        keep: ``all`` checkpoints, or ``best_and_last``: an evaluated one that is neither is deleted.
        num_threads: threads of the evaluation's process.

    Raises:
        ValueError: a value out of range.
    """

    every: int
    command: Command
    waits: bool = False
    max_pending: int = 1
    keep: str = "all"
    num_threads: int = 1

    def __post_init__(self) -> None:
        if self.keep not in KEEP:
            raise ValueError(f"evaluation.options.keep must be one of {', '.join(KEEP)}; got {self.keep!r}.")
        for name, least in (("every", 1), ("max_pending", 0), ("num_threads", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"evaluation: {name} must be at least {least}; got {getattr(self, name)}.")


@dataclass(frozen=True)
class _Running:
    step: int
    checkpoint: Path
    process: subprocess.Popen[bytes]
    log: Path
    started: float


class CheckpointEvaluation:
    """Evaluates the checkpoints of one run, one at a time, in the order in which they were saved.

    Nothing of the training process is touched: a run trains to the bit what it trains without evaluation. Results are
    collected between steps; `finish` waits for those that are still out.

    Args:
        run_dir: of the training run.
        on_record: called with each result.
    """

    def __init__(
        self, plan: EvaluationPlan, run_dir: Path, on_record: Callable[[EvaluationRecord], None] | None = None
    ) -> None:
        self._plan = plan
        self._run_dir = run_dir
        self._on_record = on_record
        self._waiting: deque[tuple[int, Path]] = deque()
        self._running: _Running | None = None
        self._failed: list[Path] = []

    def checkpoint_saved(self, step: int, checkpoint: Path) -> None:
        """Evaluate a finished checkpoint if its step is due."""
        if step % self._plan.every:
            return
        self._waiting.append((step, checkpoint))
        self.poll()
        while self._running is not None and (self._plan.waits or len(self._waiting) > self._plan.max_pending):
            self._collect()
            self._start_next()

    def poll(self) -> None:
        """Collect the running evaluation if it has ended, and start the next."""
        if self._running is not None and self._running.process.poll() is not None:
            self._collect()
        self._start_next()

    def finish(self) -> None:
        """Wait for all evaluations.

        Raises:
            RuntimeError: some failed; the message names their logs. Checkpoints and the other results are kept.
        """
        if self._running is not None:
            logging.info("Training has ended; waiting for %d evaluations.", 1 + len(self._waiting))
        while self._running is not None:
            self._collect()
            self._start_next()
        if self._failed:
            logs = ", ".join(str(log) for log in self._failed)
            raise RuntimeError(f"Training ended well, but {len(self._failed)} evaluations failed; see {logs}.")

    def stop(self) -> None:
        """End the running evaluation, where training itself failed."""
        self._waiting.clear()
        if self._running is not None:
            self._running.process.terminate()
            self._running.process.wait()
            self._running = None

    def _start_next(self) -> None:
        if self._running is not None or not self._waiting:
            return
        step, checkpoint = self._waiting.popleft()
        folder = self._run_dir / EVALUATIONS_FOLDER / checkpoint.name
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier try to train these steps
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = folder.with_suffix(".log")
        threads = str(self._plan.num_threads)
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._plan.command(checkpoint, folder), stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        self._running = _Running(step, checkpoint, process, log, time.monotonic())

    def _collect(self) -> None:
        """Wait for the running evaluation and record its result."""
        running, self._running = self._running, None
        assert running is not None
        exit_code = running.process.wait()
        wall_s = time.monotonic() - running.started
        evaluation = read_evaluation(running.log.with_suffix("") / RESULTS_FILE) if exit_code == 0 else None
        if evaluation is None:
            logging.error(
                "The evaluation of step %d failed (exit code %d); see %s", running.step, exit_code, running.log
            )
            self._failed.append(running.log)
            return
        relative = str(running.checkpoint.relative_to(self._run_dir))
        record = EvaluationRecord(running.step, relative, evaluation.success, evaluation.by_task, wall_s)
        append_evaluation(self._run_dir, record)
        self._keep_best()
        if self._on_record is not None:
            self._on_record(record)
        logging.info(
            "Step %d solves %d of %d episodes, 95 %% interval %.0f %% to %.0f %%",
            *(running.step, record.success.num_success, record.success.num_episodes),
            *(100 * record.success.low, 100 * record.success.high),
        )

    def _keep_best(self) -> None:
        """Let `checkpoints/best` point at the best checkpoint, and delete what the plan does not keep."""
        records = [r for r in read_evaluations(self._run_dir) if (self._run_dir / r.checkpoint).is_dir()]
        best = best_evaluation(records)
        if best is None:
            return
        checkpoints = (self._run_dir / best.checkpoint).parent
        move_link(checkpoints / BEST_LINK, self._run_dir / best.checkpoint)
        if self._plan.keep == "all":
            return
        kept = {(checkpoints / name).resolve() for name in (BEST_LINK, LAST_CHECKPOINT_LINK)}
        kept |= {checkpoint.resolve() for _, checkpoint in self._waiting}
        for record in records:
            checkpoint = (self._run_dir / record.checkpoint).resolve()
            if checkpoint not in kept:
                shutil.rmtree(checkpoint)


NAMES = ("upstream", "background", "waiting")


def plan_evaluation(cfg: DictConfig, host_cfg: TrainPipelineConfig) -> EvaluationPlan | None:
    """How this run's checkpoints are evaluated; None leaves evaluation to upstream's loop.

    Upstream's own evaluation is turned off where a plan is made.

    Raises:
        ValueError: an unknown choice or option, no simulator, or evaluations that find no checkpoint.
    """
    name = cfg.evaluation.name
    if name not in NAMES:
        raise ValueError(f"evaluation must be one of {', '.join(NAMES)}; got {name!r}.")
    if name == "upstream":
        return None
    every = int(cfg.train.eval_freq)
    _require_checkpoints(cfg, host_cfg, every)
    host_cfg.eval_freq = 0
    options = evaluation_options(cfg.evaluation)
    waits = name == "waiting" or _single_core()
    return EvaluationPlan(
        every=every,
        command=lambda checkpoint, folder: evaluation_command(checkpoint, folder, options),
        waits=waits,
        max_pending=options.max_pending,
        keep=options.keep,
        num_threads=options.num_threads,
    )


def _require_checkpoints(cfg: DictConfig, host_cfg: TrainPipelineConfig, every: int) -> None:
    if host_cfg.env is None:
        raise ValueError(f"evaluation={cfg.evaluation.name} needs a simulator; choose one with env=... .")
    if every < 1:
        raise ValueError(f"evaluation={cfg.evaluation.name} runs every train.eval_freq steps; got {every}.")
    if not host_cfg.save_checkpoint or every % host_cfg.save_freq:
        raise ValueError(
            f"evaluation={cfg.evaluation.name} evaluates checkpoints, so train.eval_freq must be a multiple of "
            f"train.save_freq with train.save_checkpoint=true; got eval_freq={every}, save_freq={host_cfg.save_freq}, "
            f"save_checkpoint={host_cfg.save_checkpoint}. Set train.save_freq={every}."
        )
    if "lerobot_atomic_checkpoint" not in cfg.patches:
        raise ValueError(
            f"evaluation={cfg.evaluation.name} is told of finished checkpoints by the patch lerobot_atomic_checkpoint; "
            "choose patches=host_guards."
        )


def _single_core() -> bool:
    if len(os.sched_getaffinity(0)) > 1:
        return False
    logging.warning("There is one core only: training waits for each evaluation.")
    return True


def evaluation_command(checkpoint: Path, folder: Path, options: EvaluationOptions) -> list[str]:
    """`lerobot eval` on a checkpoint, in the simulator of its training run, with `results.json` in `folder`."""
    names = ("n_episodes", "first_seed", "num_slots", "num_workers", "videos")
    overrides = [f"eval.{name}={getattr(options, name)}" for name in names]
    if options.device is not None:
        overrides.append(f"policy.device={options.device}")
    # JSON's strings are strings in Hydra's override grammar too.
    places = [f"checkpoint={json.dumps(str(checkpoint))}", f"hydra.run.dir={json.dumps(str(folder))}"]
    return [sys.executable, "-m", "embodix", "eval", *places, *overrides]


def move_link(link: Path, target: Path) -> Path:
    """Let a link beside `target` point at it; at every moment the link is the old or the new one."""
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target.name)
    beside.replace(link)
    return link
