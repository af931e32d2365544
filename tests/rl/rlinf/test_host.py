# SPDX-License-Identifier: Apache-2.0
"""Runs in RLinf itself, with real processes; `make rl` installs what they need."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from embodix.report.manifest import load_manifest
from embodix_rl.report.rl_steps import rates, read_rl_steps
from embodix_rl.report.spans import read_timeline
from embodix_rl.rlinf.hosts import missing
from embodix_rl.testing.rl_runs import await_rl, finish_rl, frames_of_a_step, left_behind, start_rl

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason="; ".join(missing()) or "RLinf and Ray are installed"),
]

PATCHES = """
import importlib, sys
from embodix.patching import apply_patch, patch_names, undo_patch
from embodix_rl.rlinf.extension import all_patches

names = all_patches()
assert sorted(names) == [name for name in patch_names() if name.startswith("rlinf_")], names
for name in names:
    apply_patch(name)
from rlinf.scheduler import Worker
from rlinf.workers.env import env_worker
from rlinf.workers.actor import async_ppo_fsdp_worker as actor
import transformers, torch
during = (env_worker.get_env_cls, actor.torch, actor.put_tensor_device, actor.masked_normalization)
assert transformers.AutoModelForVision2Seq is transformers.AutoModelForImageTextToText
assert Worker.torch_device_type == "cpu" and not Worker.torch_platform.is_available()
x, mask = torch.randn(6, 4), torch.rand(6, 4) > 0.5
normal = actor.masked_normalization(x, mask)
assert type(normal) is torch.Tensor and abs(float(normal[mask].mean())) < 1e-3
assert actor.torch.tensor(0.0, device=actor.torch.cuda.current_device()).device.type == "cpu"
assert actor.torch.no_grad is torch.no_grad
assert actor.put_tensor_device({"a": x}, "cuda:0")["a"].device.type == "cpu"
for name in reversed(names):
    undo_patch(name)
after = (env_worker.get_env_cls, actor.torch, actor.put_tensor_device, actor.masked_normalization)
assert all(a is not b for a, b in zip(during, after)) and after[1] is torch
assert Worker.torch_platform is None and not hasattr(transformers, "AutoModelForVision2Seq")
print("patches:", len(names))
"""

POLICY = """
import torch
from embodix_rl.rlinf.extension import activate
activate("rollout")
from embodix_rl.rlinf.latency_policy import LatencyPolicy
config = {"state_dim": 3, "num_action_chunks": 4, "action_dim": 2, "width": 16, "seed": 1,
          "inference_s": {"1": 0.0}, "training_s": {"1": 0.0}}
policy, twin = LatencyPolicy.of(config), LatencyPolicy.of(config)
assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), twin.parameters()))
actions, result = policy.predict_action_batch({"states": torch.randn(5, 3)})
assert actions.shape == result["prev_logprobs"].shape == (5, 4, 2) and result["prev_values"].shape == (5, 1)
again = twin(forward_inputs=result["forward_inputs"], compute_logprobs=True, compute_entropy=True, compute_values=True)
assert torch.allclose(again["logprobs"], result["prev_logprobs"], atol=1e-6)
assert torch.allclose(again["values"], result["prev_values"], atol=1e-6)
again["logprobs"].sum().backward()
assert twin.action_mean.weight.grad.abs().sum() > 0
print("policy: agrees")
"""


def _python(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    return start_rl(folder, "rl.steps=3", "cluster.start_attempts=10", "env.step_s=0.02", *overrides)


def _cluster_folders() -> set[Path]:
    return set(Path("/tmp").glob("ebx-*"))


def test_every_patch_applies_and_is_undone():
    assert "patches: 6" in _python(PATCHES)


def test_latency_policy_recomputes_its_log_probabilities():
    assert "policy: agrees" in _python(POLICY)


@pytest.mark.parametrize(
    "overrides",
    [
        ["runner=sync", "placement.env_workers=2"],
        ["runner=sync", "rollout.stages=2", "algorithm=grpo", "rollout.num_envs=16"],
        ["runner=pipeline", "rollout.epochs=2", "placement.env_workers=2"],
    ],
    ids=["sync", "grpo", "pipeline"],
)
def test_synchronous_runs_use_every_frame_once(tmp_path, overrides):
    said = finish_rl(_start(tmp_path, *overrides))
    steps = read_rl_steps(tmp_path / "metrics.jsonl")
    assert [step.frames for step in steps] == [step.fresh_frames for step in steps]
    assert all(step.frames > 0 and set(step.staleness) == {0} for step in steps)
    assert len(steps) == 3 and all(step.declared_latency for step in steps)
    assert "workers run embodix" in said
    manifest = load_manifest(tmp_path / "manifest.json")
    assert "rlinf_cpu_platform" in manifest.patches and "declared" in manifest.notes[0]
    activities = {span.activity for span in read_timeline(tmp_path / "timeline")}
    assert {"step", "infer", "train", "weights"} <= activities


@pytest.mark.parametrize("decoupled", ["false", "true"])
def test_asynchronous_runs_train_on_frames_again(tmp_path, decoupled):
    overrides = ["runner=rlinf_async", f"runner.options.decoupled={decoupled}", "placement.env_workers=2", "rl.steps=6"]
    finish_rl(_start(tmp_path, *overrides, "env.step_s=0.3"))
    counted = rates(read_rl_steps(tmp_path / "metrics.jsonl"), warmup_steps=1)
    assert counted.reuse > 1.2
    assert counted.fresh_frames_per_s < counted.trained_frames_per_s
    assert set(counted.staleness) <= {0, 1}


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.stages=2", "rollout.epochs=2", "optim.global_batch=128", "rl.save_every=2"],
        ["runner.options.dynamic_batching=false", "runner.options.streaming=false", "runner.options.max_staleness=2"],
        ["runner.options.async_train=false", "rollout.stages=2", "runner.options.normalization=previous"],
    ],
    ids=["everything", "async_train", "batching and streaming"],
)
def test_rl_vla3_trains_every_frame_once_and_in_time(tmp_path, overrides):
    finish_rl(_start(tmp_path, "runner=rl_vla3", "placement.env_workers=2", "env.step_s=0.05", *overrides))
    steps = read_rl_steps(tmp_path / "metrics.jsonl")
    frames = frames_of_a_step(tmp_path)
    assert [step.frames for step in steps] == [step.fresh_frames for step in steps] == [frames] * 3
    most = 0 if "runner.options.async_train=false" in overrides else 2
    assert all(max(step.staleness) <= most and min(step.staleness) >= 0 for step in steps)
    assert set(steps[0].staleness) == {0}
    last = steps[-1].metrics
    assert last["gate/admitted"] == last["gate/finished"] == last["gate/taken"]
    activities = {span.activity for span in read_timeline(tmp_path / "timeline")}
    assert {"step", "infer", "train", "weights", "wait"} <= activities


def test_two_runs_at_once_do_not_disturb_each_other_and_leave_nothing(tmp_path):
    before = _cluster_folders()
    runs = [_start(tmp_path / name) for name in ("one", "other")]
    for run in runs:
        finish_rl(run)
    assert all(len(read_rl_steps(tmp_path / name / "metrics.jsonl")) == 3 for name in ("one", "other"))
    assert left_behind(tmp_path / "one") == left_behind(tmp_path / "other") == []
    assert _cluster_folders() <= before


@pytest.mark.parametrize(("ended_by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_takes_its_processes_along(tmp_path, ended_by, code):
    before = _cluster_folders()
    run = _start(tmp_path, "rl.steps=1000")
    await_rl(run, (tmp_path / "metrics.jsonl").exists, timeout_s=1500)
    run.send_signal(ended_by)
    finish_rl(run, code)
    assert left_behind(tmp_path) == []
    assert _cluster_folders() <= before


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    finish_rl(_start(tmp_path / "first", "rl.save_every=1"))
    finish_rl(_start(tmp_path / "second", f"resume={tmp_path / 'first'}", "rl.steps=5"))
    assert [step.step for step in read_rl_steps(tmp_path / "second" / "metrics.jsonl")] == [3, 4]
