# SPDX-License-Identifier: Apache-2.0
"""RLinf's synchronous update and embodix's asynchronous one on the same trajectories; prints their largest difference.

``python sync_update.py <scenario>`` in a process of its own, which RLinf's patches stay in. Both begin with the same
weights; trajectories are of the policy itself, as with staleness 0.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from embodix_rl.rlinf.extension import activate, register_models

activate("actor")
register_models()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from rlinf.data.embodied_io_struct import Trajectory  # noqa: E402
from rlinf.data.embodied_io_struct import convert_trajectories_to_batch as to_batch  # noqa: E402
from rlinf.scheduler import AcceleratorType  # noqa: E402
from rlinf.workers.actor.fsdp_actor_worker import EmbodiedFSDPActor  # noqa: E402

from embodix.config.compose import compose  # noqa: E402
from embodix_rl.rlinf.latency_policy import LatencyPolicy  # noqa: E402
from embodix_rl.rlinf.run_plan import plan_run  # noqa: E402
from embodix_rl.rlinf.workers.streaming_actor import StreamingActor, TrajectorySamples  # noqa: E402
from embodix_rl.scheduling.streamer import MicroBatchStreamer  # noqa: E402

SHARDS, ENVS, STEPS, CHUNK = 2, 8, 4, 5
COMMON = [
    *("rollout.num_envs=16", "placement.env_workers=2", "rollout.steps=20", "optim.micro_batch=8", "optim.lr=0.01"),
    "algorithm.clip_ratio_c=null",  # RLinf's synchronous training does not hand it to its loss
]
SCENARIOS = {
    "ppo": ["optim.global_batch=64"],
    "ppo_steps": ["optim.global_batch=16", "algorithm.update_epoch=3", "algorithm.entropy_bonus=0.01"],
    "ppo_masked": ["optim.global_batch=64", "rollout.auto_reset=false"],
    "grpo": ["algorithm=grpo", "optim.global_batch=64"],
    "grpo_steps": ["algorithm=grpo", "optim.global_batch=32", "algorithm.update_epoch=2"],
    "grpo_filtered": [
        "algorithm=grpo",
        "optim.global_batch=32",
        "optim.micro_batch=32",
        "algorithm.filter_rewards=true",
    ],
    "grpo_even": ["algorithm=grpo", "optim.global_batch=64"],
}


class Host:
    """What RLinf's methods need of a worker with one process, without FSDP."""

    def __init__(self, cfg: Any) -> None:
        self.cfg, self._rank, self._world_size, self.device = cfg, 0, 1, "cpu"
        self.model = LatencyPolicy.of(cfg.actor.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.actor.optim.lr)
        self.lr_scheduler = SimpleNamespace(step=lambda: None)
        self.is_weight_offloaded = self.is_optimizer_offloaded = self.enable_sft_co_train = False
        self.gradient_accumulation = cfg.actor.global_batch_size // cfg.actor.micro_batch_size
        self.optimizer_steps = self.critic_warmup_steps = self.version = 0
        self.update_epoch = cfg.algorithm.update_epoch
        self.torch_platform = SimpleNamespace(empty_cache=lambda: None)
        self.grad_scaler = SimpleNamespace(scale=lambda loss: loss)
        self.amp_context = nullcontext()
        self._accelerator_type = AcceleratorType.NO_ACCEL

    def before_micro_batch(self, model: Any, is_last_micro_batch: bool) -> Any:
        return nullcontext()

    def worker_timer(self, label: str) -> Any:
        return nullcontext()

    def timeline_span(self, activity: str) -> Any:
        return nullcontext()

    def count_versions(self, versions: Any, *, fresh: bool) -> None:
        pass

    def optimizer_step(self) -> tuple[float, list[float]]:
        self.optimizer_steps += 1
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.actor.optim.clip_grad)
        self.optimizer.step()
        return float(norm), [group["lr"] for group in self.optimizer.param_groups]


class SyncHost(Host):
    """RLinf's own update, its functions as they are."""

    train_micro_batch = EmbodiedFSDPActor.train_micro_batch

    def update(self, trajectories: list[Trajectory]) -> None:
        batch = to_batch(trajectories)
        self.rollout_batch = EmbodiedFSDPActor._process_received_rollout_batch(self, batch)
        EmbodiedFSDPActor.compute_advantages_and_returns(self)
        EmbodiedFSDPActor.run_training(self)


class AsyncHost(Host):
    """The update of `StreamingActor`, its functions as they are."""

    for name in ("_add", "_prepared", "_do", "_work", "_evaluate", "_micro_batch_context"):
        locals()[name] = getattr(StreamingActor, name)
    _optimizer_step, _set_warm_up = StreamingActor._optimizer_step, StreamingActor._set_warm_up
    _normalization, _is_one_step = StreamingActor._normalization, StreamingActor._is_one_step

    def update(self, trajectories: list[Trajectory]) -> None:
        self._settings, self._num_valid = self.cfg.embodix.rl_vla3, 0
        StreamingActor._build_update(self)
        self._streamer = MicroBatchStreamer(len(trajectories), 1, normalization=self._normalization())
        for number, trajectory in reversed(list(enumerate(trajectories))):  # as they happen to arrive
            self._do(self._add(trajectory, f"env {number}"))


def trajectories(policy: LatencyPolicy, cfg: Any) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(5)
    return [_trajectory(policy, cfg, generator) for _ in range(SHARDS)]


def _trajectory(policy: LatencyPolicy, cfg: Any, generator: torch.Generator) -> Trajectory:
    states = torch.randn(STEPS, ENVS, cfg.actor.model.state_dim, generator=generator)
    with torch.no_grad():
        results = [policy.predict_action_batch({"states": seen})[1] for seen in states]
        last = policy.predict_action_batch({"states": states[0]})[1]["prev_values"]
    dones = torch.zeros(STEPS + 1, ENVS, CHUNK, dtype=torch.bool)
    if not cfg.env.train.auto_reset:  # episodes of every length, in action steps
        ends = torch.randint(1, STEPS * CHUNK, (ENVS,), generator=generator)
        steps = torch.arange(STEPS * CHUNK).view(STEPS, 1, CHUNK) + 1
        dones[1:] = steps >= ends.view(1, -1, 1)
    log_probs = torch.stack([result["prev_logprobs"] for result in results])
    names = results[0]["forward_inputs"]
    return Trajectory(
        max_episode_length=cfg.env.train.max_episode_steps,
        rewards=torch.rand(STEPS, ENVS, CHUNK, generator=generator) * 0.2,
        dones=dones,
        terminations=dones.clone(),
        truncations=torch.zeros_like(dones),
        prev_logprobs=log_probs,
        prev_values=torch.stack([result["prev_values"] for result in results] + [last]),
        versions=torch.zeros_like(log_probs),
        forward_inputs={name: torch.stack([result["forward_inputs"][name] for result in results]) for name in names},
    )


def main(scenario: str) -> None:
    cfg = plan_run(compose("rl", ["runner=rl_vla3", *COMMON, *SCENARIOS[scenario]]), Path("folder")).host
    torch.manual_seed(1)
    sync, ours = SyncHost(cfg), AsyncHost(cfg)
    given = trajectories(sync.model, cfg)
    told = {}
    if scenario == "grpo_even":
        for trajectory in given:
            trajectory.rewards[:, -cfg.algorithm.group_size :] = 0.0  # all of a group fail
        told = _even_groups(cfg, given[0])
    before = [weight.detach().clone() for weight in sync.model.parameters()]
    sync.update(given)
    ours.update(given)
    steps = (sync.optimizer_steps, ours.optimizer_steps)
    moved, apart = _apart(before, sync.model.parameters()), _apart(sync.model.parameters(), ours.model.parameters())
    print(json.dumps({"scenario": scenario, "steps": steps, "moved": moved, "apart": apart, **told}))


def _even_groups(cfg: Any, trajectory: Trajectory) -> dict[str, Any]:
    """What a trajectory's denominator is with its even groups and without, and how many they are."""
    counted = {}
    for treatment in ("count", "leave_out"):
        chosen = OmegaConf.merge(cfg, {"embodix": {"rl_vla3": {"even_groups": treatment}}})
        samples = TrajectorySamples(chosen)(trajectory, "env 0")
        counted[treatment] = samples.num_counted
    return {"counted": counted, "groups": [samples.groups.even, samples.groups.compared]}


def _apart(several: Any, others: Any) -> float:
    return max(float((one - other).detach().abs().max()) for one, other in zip(several, others, strict=True))


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name in sys.argv[1:] or SCENARIOS:
        main(name)
    dist.destroy_process_group()
