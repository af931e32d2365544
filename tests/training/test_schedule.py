# SPDX-License-Identifier: Apache-2.0
"""A schedule that is over before its run, one that never ends, and what resuming with other steps makes of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lerobot.optim.optimizers import AdamWConfig
from lerobot.optim.schedulers import (
    CosineDecayWithWarmupSchedulerConfig,
    DiffuserSchedulerConfig,
    LRSchedulerConfig,
)

from embodix.config.train_schema import ScheduleSettings
from embodix.training.schedule import RunSchedule, fresh_schedule, last_change, lr_factor, resumed_schedule

COSINE = CosineDecayWithWarmupSchedulerConfig(10, 300, peak_lr=1e-3, decay_lr=2e-5)


def host(steps, scheduler=COSINE):
    return SimpleNamespace(steps=steps, scheduler=scheduler, optimizer=AdamWConfig(lr=1e-3))


def scheduler_of(config, steps):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    return optimizer, config.build(optimizer, steps)


@pytest.mark.parametrize("scheduler", [COSINE, DiffuserSchedulerConfig(num_warmup_steps=5)])
def test_the_factor_is_what_upstreams_scheduler_gives(scheduler):
    optimizer, built = scheduler_of(scheduler, 40)
    factor = lr_factor(scheduler, 40)
    for count in range(40):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * factor(count))
        optimizer.step()
        built.step()


def test_where_it_is_over_and_how_to_end_there():
    early = RunSchedule(100).remark(host(100), 4.0, 0)
    assert early.startswith(
        "The learning-rate schedule is over after step 25 of 100 (a step advances it by 4 on average)"
    )
    assert "the other 75 steps train at 2e-05. To end there: train.steps=25 schedule.steps=100." in early
    assert "spread" not in early  # its own fields end it after 300
    assert RunSchedule(100).remark(host(25), 4.0, 0) is None  # what it advised
    assert "To spread it over the run: schedule.steps=240." in RunSchedule(60).remark(host(60), 4.0, 0)
    assert RunSchedule(240).remark(host(60), 4.0, 0) is None  # what it advised


def test_a_run_longer_than_upstreams_own_schedule():
    remark = RunSchedule(1000).remark(host(1000), 1.0, 0)
    assert "over after step 300 of 1000" in remark
    assert remark.endswith("the other 700 steps train at 2e-05. To end there: train.steps=300.")
    assert RunSchedule(300).remark(host(300), 1.0, 0) is None
    assert RunSchedule(3).remark(host(8), 1.0, 3).endswith("all steps that are left train at 2e-05.")


def test_a_schedule_that_does_not_come_to_its_end():
    remark = RunSchedule(100).remark(host(100), 0.5, 0)
    assert "will have gone 49 of its 100 steps" in remark
    assert "schedule.steps=50" in remark
    assert RunSchedule(50).remark(host(100), 0.5, 0) is None


def test_a_schedule_that_fits_or_is_none_has_no_remark():
    assert RunSchedule(100).remark(host(100), 1.0, 0) is None
    assert RunSchedule(100).remark(host(100), 1.01, 0) is None
    assert RunSchedule(100).remark(host(100, None), 4.0, 0) is None
    assert last_change(lambda _: 1.0, 50) == 0


@LRSchedulerConfig.register_subclass("one_cycle")
@dataclass
class OneCycle(LRSchedulerConfig):
    num_warmup_steps: int | None = None

    def build(self, optimizer, num_training_steps):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=num_training_steps)


@LRSchedulerConfig.register_subclass("on_plateau")
@dataclass
class OnPlateau(LRSchedulerConfig):
    num_warmup_steps: int | None = None

    def build(self, optimizer, num_training_steps):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


@pytest.mark.parametrize("scheduler", [OneCycle(), OnPlateau()])
def test_a_scheduler_that_is_no_function_of_the_step_is_left_to_upstream(scheduler, checkpoint):
    run = fresh_schedule(ScheduleSettings(), host(60, scheduler))
    assert run.remark(host(60, scheduler), 4.0, 0) is None
    longer = resumed_schedule(ScheduleSettings(), host(120, scheduler), checkpoint())
    assert longer == RunSchedule(120)
    assert longer.remark(host(120, scheduler), 1.0, 60) is None
    _, built = scheduler_of(scheduler, 120)
    longer.adjust(built, host(120, scheduler))
    asked = fresh_schedule(ScheduleSettings(steps=50), host(60, scheduler))
    with pytest.raises(ValueError, match=rf"scheduler.type={scheduler.type} builds a .*Leave them out"):
        asked.remark(host(60, scheduler), 1.0, 0)


@pytest.fixture
def checkpoint(tmp_path: Path):
    """After 60 of 60 steps, or of as many as upstream's config says."""

    def make(steps=60, trained=60, advances=60, kept=None):
        state, model = tmp_path / "training_state", tmp_path / "pretrained_model"
        state.mkdir()
        model.mkdir()
        (state / "training_step.json").write_text(json.dumps({"step": trained}))
        (state / "scheduler_state.json").write_text(json.dumps({"last_epoch": advances}))
        (model / "train_config.json").write_text(json.dumps({"steps": steps}))
        if kept is not None:
            kept.save(state)
        return tmp_path

    return make


def test_a_run_that_is_made_longer_must_say_what_becomes_of_its_schedule(checkpoint):
    folder = checkpoint()
    message = r"built for 60 steps. Built for 120, .* step 62 would be 0.0005 instead of 2e-05"
    with pytest.raises(ValueError, match=message) as refused:
        resumed_schedule(ScheduleSettings(), host(120), folder)
    assert all(f"schedule.on_resume={choice}" in str(refused.value) for choice in ("keep", "rewarm", "one_run"))
    assert resumed_schedule(ScheduleSettings(on_resume="keep"), host(120), folder) == RunSchedule(60)
    assert resumed_schedule(ScheduleSettings(on_resume="one_run"), host(120), folder) == RunSchedule(120)
    assert resumed_schedule(ScheduleSettings(on_resume="rewarm"), host(120), folder) == RunSchedule(60, 60, True)
    assert resumed_schedule(ScheduleSettings(), host(60), folder) == RunSchedule(60)


def test_steps_that_change_no_learning_rate_need_no_choice(checkpoint):
    folder = checkpoint(steps=400, trained=400, advances=400)
    assert resumed_schedule(ScheduleSettings(), host(900), folder) == RunSchedule(400)


def test_what_was_chosen_once_is_kept(checkpoint):
    folder = checkpoint(steps=120, trained=90, advances=30, kept=RunSchedule(60, 60))
    assert resumed_schedule(ScheduleSettings(), host(120), folder) == RunSchedule(60, 60)
    with pytest.raises(ValueError, match=r"built for 60 steps\. Built for 80"):
        resumed_schedule(ScheduleSettings(), host(140), folder)


def test_choices_that_are_none(checkpoint):
    with pytest.raises(ValueError, match=r"on_resume=keep is for a run that is resumed"):
        fresh_schedule(ScheduleSettings(on_resume="keep"), host(10))
    with pytest.raises(ValueError, match=r"one of keep, rewarm, one_run; got 'kep'"):
        resumed_schedule(ScheduleSettings(on_resume="kep"), host(10), checkpoint())
    with pytest.raises(ValueError, match=r"schedule.steps must be at least 1, .* got 0"):
        fresh_schedule(ScheduleSettings(steps=0), host(10))


def rates(optimizer, scheduler, count):
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_the_scheduler_gets_the_length_of_the_run(checkpoint):
    kept, plain = scheduler_of(COSINE, 20), scheduler_of(COSINE, 50)
    RunSchedule(50).adjust(kept[1], host(20))
    assert rates(*kept, 20) == rates(*plain, 20)
    untouched, upstream = scheduler_of(COSINE, 20), scheduler_of(COSINE, 20)
    RunSchedule(20).adjust(untouched[1], host(20))
    assert rates(*untouched, 20) == rates(*upstream, 20)


def test_rewarming_begins_the_schedule_again():
    optimizer, scheduler = scheduler_of(COSINE, 20)
    rates(optimizer, scheduler, 20)
    RunSchedule(30, 20, begins_now=True).adjust(scheduler, host(50))
    assert rates(optimizer, scheduler, 30) == rates(*scheduler_of(COSINE, 30), 30)
