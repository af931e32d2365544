# SPDX-License-Identifier: Apache-2.0
"""What the scheduling model says of a variant with declared times, before any process is started."""

from __future__ import annotations

import dataclasses
from typing import Any

from embodix_rl.bench.variants import BenchVariant
from embodix_rl.latency import BatchTime, Durations
from embodix_rl.scheduling.simulation import simulate
from embodix_rl.scheduling.simulation.schedules import STOCK_ASYNC, STOCK_DECOUPLED, SYNC, SimulatedSchedule, rl_vla3
from embodix_rl.scheduling.simulation.workload import Workload
from embodix_rl.scheduling.virtual_clock import run_virtually

NUM_STEPS, NUM_STEPS_STOCK = 8, 24
WEIGHTS_S = 0.05  # of the latency policy, whose weights are small


def predicted_frames_per_s(variant: BenchVariant) -> float | None:
    """Fresh frames a second on a virtual clock; None for times that are not declared and schedules without a model."""
    config = variant.config
    if config["env"]["type"] != "latency" or config["policy"]["type"] != "latency":
        return None
    schedule, workload = _schedule(variant), _workload(variant)
    if schedule is None or workload is None:
        return None
    steps = NUM_STEPS_STOCK if schedule.max_staleness is None else NUM_STEPS
    return run_virtually(simulate(schedule, workload, steps)).summary.fresh_frames_per_s


def _schedule(variant: BenchVariant) -> SimulatedSchedule | None:
    runner, stages = variant.config["runner"], variant.plan.sizes.num_stages
    options: dict[str, Any] = runner["options"] or {}
    schedule = None
    if runner["name"] == "sync":
        schedule = SYNC if stages == 1 else dataclasses.replace(SYNC, num_shards=stages, batching="stages")
    elif runner["name"] == "rlinf_async" and stages == 1:
        schedule = STOCK_DECOUPLED if options.get("decoupled") else STOCK_ASYNC
        schedule = dataclasses.replace(schedule, reuse_versions=options.get("staleness_threshold", 1))
    elif runner["name"] == "rl_vla3":
        switches = [bool(options.get(name, True)) for name in ("async_train", "dynamic_batching", "streaming")]
        most = options.get("max_staleness", 1)
        schedule = rl_vla3(*switches, max_staleness=most, num_shards=stages)
        schedule = dataclasses.replace(schedule, normalization=options.get("normalization", "exact"))
    return schedule


def _workload(variant: BenchVariant) -> Workload | None:
    """The declared times as the model takes them; None where a step is more than one pass over a rollout."""
    config, sizes = variant.config, variant.plan.sizes
    if sizes.rollout_workers != 1 or sizes.actor_workers != 1 or sizes.update_epochs != 1:
        return None
    inference, training = (BatchTime.of(config["policy"][name]) for name in ("inference_s", "training_s"))
    step = Durations.of(config["env"]["step_s"])
    envs_a_worker = sizes.num_envs // sizes.env_workers
    per_env_s = config["env"]["step_s_per_env"] * envs_a_worker
    env_s = sizes.num_stages * step.expected_s + per_env_s
    everything_s, nothing_s = inference.seconds(sizes.num_envs), _at_zero(inference)
    train_s = training.seconds(sizes.micro_batch) * sizes.chunks_per_step / sizes.micro_batch
    chunk_step_s, rounds = env_s + everything_s, sizes.steps_per_epoch // sizes.chunk * sizes.rollout_epochs
    return Workload(
        num_env_workers=sizes.env_workers,
        num_envs=envs_a_worker,
        chunk=sizes.chunk,
        num_steps=sizes.steps_per_epoch // sizes.chunk,
        trajectories_per_batch=sizes.rollout_epochs,
        chunk_step_s=chunk_step_s,
        env_share=env_s / chunk_step_s,
        inference_share=everything_s / chunk_step_s,
        train_share=train_s / (chunk_step_s * rounds),
        fixed_share=min(max(nothing_s / everything_s, 0.0), 1.0),
        weights_s=WEIGHTS_S,
        sigma=step.sigma if not per_env_s else 0.0,
        seed=config["rl"]["seed"],
    )


def _at_zero(times: BatchTime) -> float:
    """The part that does not depend on the size, where the first line through the points says so."""
    sizes = sorted(times.points)
    first = times.points[sizes[0]]
    if len(sizes) == 1:
        return first
    slope = (times.points[sizes[1]] - first) / (sizes[1] - sizes[0])
    return first - slope * sizes[0]
