# SPDX-License-Identifier: Apache-2.0
"""The length of the learning-rate schedule: where it is over before the run is, and what becomes of it on resuming.

Upstream scales a schedule to ``train.steps`` whenever it builds one, so that a run that is made longer jumps back to a
high learning rate. Here the length is kept in the checkpoint, and another one is chosen, never met with.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lerobot.configs.train import TRAIN_CONFIG_NAME, TrainPipelineConfig
from lerobot.optim.schedulers import LRSchedulerConfig
from lerobot.utils.constants import PRETRAINED_MODEL_DIR, SCHEDULER_STATE, TRAINING_STATE_DIR
from torch.optim.lr_scheduler import LambdaLR

from embodix.config.train_schema import ScheduleSettings

STATE_FILE = "embodix_schedule.json"
ON_RESUME = ("keep", "rewarm", "one_run")
NOTICEABLE = 0.05  # share of a run's steps that may lie beyond its schedule without a word
Factor = Callable[[int], float]


@dataclass(frozen=True)
class RunSchedule:
    """The schedule of one run.

    Attributes:
        steps: that it is built for, each of ``train.batch_size`` samples a process.
        begun_at: step of the run after which it began.
        begins_now: whether it begins again at this start.
    """

    steps: int
    begun_at: int = 0
    begins_now: bool = False

    def save(self, folder: Path) -> None:
        """Keep it in a checkpoint's ``training_state`` folder."""
        fields = {"steps": self.steps, "begun_at": self.begun_at}
        (folder / STATE_FILE).write_text(json.dumps(fields, indent=2) + "\n")

    def adjust(self, scheduler: Any, host_cfg: TrainPipelineConfig) -> None:
        """Give the scheduler that upstream has built and restored this length, where upstream's is another."""
        if host_cfg.scheduler is None or self._is_upstreams(host_cfg):
            return
        lambda_lr = _bare(scheduler)
        lambda_lr.lr_lambdas = [lr_factor(host_cfg.scheduler, self.steps)] * len(lambda_lr.lr_lambdas)
        if self.begins_now:
            lambda_lr.last_epoch = 0
        rates = [base * lambda_lr.lr_lambdas[0](lambda_lr.last_epoch) for base in lambda_lr.base_lrs]
        for group, rate in zip(lambda_lr.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        lambda_lr._last_lr = rates

    def _is_upstreams(self, host_cfg: TrainPipelineConfig) -> bool:
        return self.steps == host_cfg.steps and not self.begins_now

    def remark(self, host_cfg: TrainPipelineConfig, advances_a_step: float, num_trained: int) -> str | None:
        """What to know before the start: the schedule is over early, or will not be; None where it fits the run, and
        for a scheduler that is no function of the step and whose length is upstream's.

        Args:
            advances_a_step: how often the schedule advances in a step, on average.
            num_trained: steps of the run that are trained already.
        """
        if host_cfg.scheduler is None or host_cfg.optimizer is None:
            return None
        if self._is_upstreams(host_cfg) and _is_left_to_upstream(host_cfg):
            return None
        factor, num_steps = lr_factor(host_cfg.scheduler, self.steps), host_cfg.steps - self.begun_at
        advances = math.floor((num_steps - 1) * advances_a_step)
        whole = last_change(factor, max(advances, self.steps))
        end = self.begun_at + math.ceil(whole / advances_a_step)
        pace = f"a step advances it by {advances_a_step:.3g} on average"
        if advances < (1 - NOTICEABLE) * (whole - advances_a_step):
            return (
                f"The learning-rate schedule will have gone {advances} of its {whole} steps when the run ends "
                f"({pace}), at {_rate(host_cfg, factor(advances))} instead of {_rate(host_cfg, factor(whole))}. To fit "
                f"it to the run: schedule.steps={math.ceil(num_steps * advances_a_step)}."
            )
        if host_cfg.steps - end <= NOTICEABLE * num_steps:
            return None
        over = f"The learning-rate schedule is over after step {end} of {host_cfg.steps} ({pace})"
        rate = _rate(host_cfg, factor(advances))
        if end <= num_trained:
            return f"{over}: all steps that are left train at {rate}."
        return (
            f"{over}: the other {host_cfg.steps - end} steps train at {rate}. To end there: train.steps={end}"
            f"{self._same_length(host_cfg, end - self.begun_at, whole)}."
            f"{self._spread(host_cfg, num_steps, advances_a_step)}"
        )

    def _spread(self, host_cfg: TrainPipelineConfig, num_steps: int, advances_a_step: float) -> str:
        """What makes the schedule as long as the run, where its own fields allow that."""
        assert host_cfg.scheduler is not None
        steps = math.ceil(num_steps * advances_a_step)
        reaches = last_change(lr_factor(host_cfg.scheduler, steps), steps) > (1 - NOTICEABLE) * steps
        return f" To spread it over the run: schedule.steps={steps}." if reaches else ""

    def _same_length(self, host_cfg: TrainPipelineConfig, num_steps: int, whole: int) -> str:
        """What keeps the schedule as it is for a run of so many steps."""
        assert host_cfg.scheduler is not None
        same = self.steps == host_cfg.steps and last_change(lr_factor(host_cfg.scheduler, num_steps), whole) == whole
        return "" if same else f" schedule.steps={self.steps}"


def fresh_schedule(settings: ScheduleSettings, host_cfg: TrainPipelineConfig) -> RunSchedule:
    """The schedule of a run that begins.

    Raises:
        ValueError: a length below one step, or a choice that only a resumed run has.
    """
    _require_sound(settings)
    if settings.on_resume is not None:
        raise ValueError(
            f"schedule.on_resume={settings.on_resume} is for a run that is resumed (resume=...); leave it out."
        )
    return RunSchedule(settings.steps or host_cfg.steps)


def resumed_schedule(settings: ScheduleSettings, host_cfg: TrainPipelineConfig, checkpoint: Path) -> RunSchedule:
    """The schedule of a run that goes on.

    Args:
        checkpoint: its folder; without embodix's own file the schedule is that of the steps in upstream's config. A
            scheduler that is no function of the step is left to upstream, unless a length is asked for.
        host_cfg: with the steps of this command.

    Raises:
        ValueError: the steps of this command would change the schedule, and nothing says what to do.
    """
    _require_sound(settings)
    state = checkpoint / TRAINING_STATE_DIR
    before, step = _kept(checkpoint), int(json.loads((state / "training_step.json").read_text())["step"])
    wanted = settings.steps or host_cfg.steps - before.begun_at
    if settings.on_resume == "rewarm":
        return RunSchedule(max(1, host_cfg.steps - step), step, begins_now=True)
    if settings.on_resume == "one_run":
        return RunSchedule(wanted, before.begun_at)
    if settings.on_resume is None and settings.steps is None and _is_left_to_upstream(host_cfg):
        return RunSchedule(host_cfg.steps)
    if settings.on_resume is None and (state / SCHEDULER_STATE).is_file():
        advances = int(json.loads((state / SCHEDULER_STATE).read_text())["last_epoch"])
        _require_same(before.steps, wanted, step, advances, host_cfg)
    return before


def _is_left_to_upstream(host_cfg: TrainPipelineConfig) -> bool:
    """Whether the scheduler is no function of the step, whose length could be changed."""
    return host_cfg.scheduler is not None and not isinstance(_built(host_cfg.scheduler, host_cfg.steps), LambdaLR)


def _kept(checkpoint: Path) -> RunSchedule:
    path = checkpoint / TRAINING_STATE_DIR / STATE_FILE
    if path.is_file():
        return RunSchedule(**json.loads(path.read_text()))
    return RunSchedule(int(json.loads((checkpoint / PRETRAINED_MODEL_DIR / TRAIN_CONFIG_NAME).read_text())["steps"]))


def _require_same(before: int, wanted: int, step: int, advances: int, host_cfg: TrainPipelineConfig) -> None:
    """Refuse another length that changes what is left of the run."""
    if host_cfg.scheduler is None or before == wanted or step >= host_cfg.steps:
        return
    old, new = lr_factor(host_cfg.scheduler, before), lr_factor(host_cfg.scheduler, wanted)
    left = range(advances + 1, advances + 1 + host_cfg.steps - step)
    if all(math.isclose(old(k), new(k), rel_tol=1e-9) for k in left):
        return
    raise ValueError(
        f"The learning-rate schedule of this run is built for {before} steps. Built for {wanted}, the learning rate of "
        f"step {step + 2} would be {_rate(host_cfg, new(left[0]))} instead of {_rate(host_cfg, old(left[0]))}, and the "
        f"last one {_rate(host_cfg, new(left[-1]))} instead of {_rate(host_cfg, old(left[-1]))}. Choose what becomes "
        "of it: schedule.on_resume=keep stays on the schedule that the run began with, past its end at its last "
        f"learning rate; schedule.on_resume=rewarm begins one anew for the {host_cfg.steps - step} steps that are "
        f"left; schedule.on_resume=one_run goes on as if {wanted} steps had been planned from the start, as upstream "
        "does."
    )


def lr_factor(config: LRSchedulerConfig, steps: int) -> Factor:
    """What a schedule built for ``steps`` multiplies the learning rate by, as a function of how often it advanced.

    Raises:
        ValueError: a schedule that is no such function.
    """
    built = _built(config, steps)
    if not isinstance(built, LambdaLR):
        raise ValueError(
            f"schedule.steps and schedule.on_resume change schedules that are a function of the step; scheduler.type="
            f"{config.type} builds a {type(built).__name__}. Leave them out, or choose another scheduler."
        )
    factor: Factor = built.lr_lambdas[0]
    return factor


def _built(config: LRSchedulerConfig, steps: int) -> Any:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with _quiet():
        return config.build(optimizer, steps)


def last_change(factor: Factor, advances: int) -> int:
    """After how many advances the factor has the value that it keeps up to ``advances``."""
    final = factor(advances)
    return next((count + 1 for count in range(advances - 1, -1, -1) if factor(count) != final), 0)


def _rate(host_cfg: TrainPipelineConfig, factor: float) -> str:
    assert host_cfg.optimizer is not None
    return f"{host_cfg.optimizer.lr * factor:.2g}"


def _require_sound(settings: ScheduleSettings) -> None:
    if settings.steps is not None and settings.steps < 1:
        raise ValueError(f"schedule.steps must be at least 1, or null for train.steps; got {settings.steps}.")
    if settings.on_resume not in (None, *ON_RESUME):
        raise ValueError(f"schedule.on_resume must be one of {', '.join(ON_RESUME)}; got {settings.on_resume!r}.")


def _bare(scheduler: Any) -> Any:
    """The scheduler in accelerate's wrapper."""
    return scheduler if isinstance(scheduler, LambdaLR) else scheduler.scheduler


@contextmanager
def _quiet() -> Iterator[None]:
    """Upstream says how it scales a schedule each time that it builds one."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)
