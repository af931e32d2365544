# SPDX-License-Identifier: Apache-2.0
"""The evaluation group decides who evaluates, and refuses what would evaluate nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embodix.config.compose import compose
from embodix.training import checkpoint_evaluation
from embodix.training.checkpoint_evaluation import EvaluationOptions, evaluation_command, plan_evaluation

SIMULATED = ["env=metaworld", "evaluation=background", "train.eval_freq=20", "train.save_freq=10"]


def host(cfg: Any) -> Any:
    train = cfg.train
    return SimpleNamespace(
        env=cfg.env, eval_freq=train.eval_freq, save_freq=train.save_freq, save_checkpoint=train.save_checkpoint
    )


def test_upstream_keeps_its_own_evaluation() -> None:
    cfg = compose("train", ["env=metaworld", "train.eval_freq=20"])
    host_cfg = host(cfg)
    assert plan_evaluation(cfg, host_cfg) is None
    assert host_cfg.eval_freq == 20


def test_a_plan_turns_upstreams_evaluation_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_evaluation.os, "sched_getaffinity", lambda _: {0, 1})
    cfg = compose("train", [*SIMULATED, "eval.n_episodes=7"])
    host_cfg = host(cfg)
    plan = plan_evaluation(cfg, host_cfg)
    assert plan is not None
    assert (plan.every, plan.waits, host_cfg.eval_freq) == (20, False, 0)
    command = plan.command(Path("run/checkpoints/000020"), Path("run/evaluations/000020"))
    assert "eval.n_episodes=7" in command
    assert 'checkpoint="run/checkpoints/000020"' in command


def test_training_waits_where_it_is_told_to_or_has_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = compose("train", [*SIMULATED, "evaluation=waiting"])
    plan = plan_evaluation(cfg, host(cfg))
    assert plan is not None and plan.waits
    monkeypatch.setattr(checkpoint_evaluation.os, "sched_getaffinity", lambda _: {0})
    cfg = compose("train", SIMULATED)
    plan = plan_evaluation(cfg, host(cfg))
    assert plan is not None and plan.waits


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env=none"], "needs a simulator"),
        (["train.eval_freq=0"], "every train.eval_freq steps; got 0"),
        (["train.save_freq=15"], "Set train.save_freq=20"),
        (["train.save_checkpoint=false"], "save_checkpoint=False"),
        (["patches=none"], "patches=host_guards"),
        (["evaluation.name=sometimes"], "must be one of upstream, background, waiting; got 'sometimes'"),
        (["evaluation.options.keep=none"], "must be one of all, best_and_last"),
    ],
)
def test_what_would_evaluate_nothing_is_refused(overrides: list[str], message: str) -> None:
    cfg = compose("train", [*SIMULATED, *overrides])
    with pytest.raises(ValueError, match=message):
        plan_evaluation(cfg, host(cfg))


def test_the_command_evaluates_a_checkpoint_where_the_plan_says() -> None:
    options = EvaluationOptions(
        n_episodes=2,
        first_seed=9,
        num_slots=4,
        num_workers=1,
        num_threads=1,
        videos=0,
        device="cuda:1",
        keep="all",
        max_pending=1,
    )
    command = evaluation_command(Path("a b/000020"), Path("out"), options)
    assert command[1:4] == ["-m", "embodix", "eval"]
    assert {
        *('checkpoint="a b/000020"', 'hydra.run.dir="out"', "eval.n_episodes=2", "eval.first_seed=9"),
        *("eval.num_slots=4", "eval.num_workers=1", "eval.videos=0", "policy.device=cuda:1"),
    } == set(command[4:])
