# SPDX-License-Identifier: Apache-2.0
"""What ``runner=rl_vla3`` trains, with real processes; `make rl` installs what they need."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodix_rl.report.rl_steps import RlStep, read_rl_steps
from embodix_rl.rlinf.hosts import missing
from embodix_rl.testing.rl_runs import finish_rl, frames_of_a_step, start_rl

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason="; ".join(missing()) or "RLinf and Ray are installed"),
]
OFF = [f"runner.options.{name}=false" for name in ("async_train", "dynamic_batching", "streaming")]


def _run(folder: Path, *overrides: str) -> list[RlStep]:
    finish_rl(start_rl(folder, "cluster.start_timeout_s=300", *overrides), timeout_s=900)
    return read_rl_steps(folder / "metrics.jsonl")


def test_with_every_switch_off_losses_are_those_of_sync(tmp_path):
    common = ["rl.steps=3", "optim.global_batch=32", "optim.lr=0.001"]
    runs = {"sync": ["runner=sync"], "rl_vla3": ["runner=rl_vla3", *OFF]}
    losses = {}
    for name, overrides in runs.items():
        steps = _run(tmp_path / name, *common, *overrides)
        kinds = ("train/actor/policy_loss", "train/critic/value_loss", "train/actor/grad_norm")
        losses[name] = [[step.metrics[kind] for kind in kinds] for step in steps]
    assert len(losses["sync"]) == 3
    for one, other in zip(losses["sync"], losses["rl_vla3"], strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-7)
    assert losses["sync"][0] != losses["sync"][1]


def test_asynchronous_grpo_trains_whole_groups(tmp_path):
    overrides = ["algorithm=grpo", "rollout.group_size=4", "rollout.num_envs=16", "rollout.stages=2"]
    steps = _run(
        tmp_path, "runner=rl_vla3", "placement.env_workers=2", "optim.global_batch=128", "rl.steps=3", *overrides
    )
    assert [step.fresh_frames for step in steps] == [frames_of_a_step(tmp_path)] * 3
    for step in steps:
        assert max(step.staleness) <= 1 and step.metrics["train/actor/grad_norm"] > 0
        assert "train/critic/value_loss" not in step.metrics


def test_several_steps_a_version_and_evaluation_beside_them(tmp_path):
    overrides = ["algorithm.update_epoch=2", "optim.global_batch=32", "rl.eval_every=2", "rl.steps=5"]
    steps = _run(tmp_path, "runner=rl_vla3", "placement.env_workers=2", *overrides)
    assert [step.fresh_frames for step in steps] == [step.frames for step in steps] == [frames_of_a_step(tmp_path)] * 5
    evaluated = [step for step in steps if "eval/return" in step.metrics]
    assert [step.step for step in evaluated] == [1, 3, 4]
    for step in evaluated:
        assert step.metrics["eval/num_trajectories"] == 8
        assert 0 <= step.metrics["eval/first_version"] <= step.metrics["eval/last_version"] <= 5
        assert step.metrics["eval/last_version"] >= step.step
