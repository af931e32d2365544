# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning: RL-VLA3's asynchronous schedules and RLinf's own, on RLinf."""

from __future__ import annotations

from embodix.hookspecs import Registration, hookimpl


@hookimpl
def register_runners() -> list[Registration]:
    runners = "embodix_rl.rlinf.runners"
    return [
        Registration("sync", f"{runners}:SyncRunner", "RLinf's synchronous runner"),
        Registration("pipeline", f"{runners}:PipelineRunner", "RLinf's synchronous runner, trained as rollouts arrive"),
        Registration("rlinf_async", f"{runners}:RlinfAsyncRunner", "RLinf's asynchronous PPO as shipped"),
        Registration(
            "rl_vla3",
            "embodix_rl.rlinf.asynchronous.rl_vla3:RlVla3Runner",
            "RL-VLA3: asynchronous training, dynamic batching, streaming, each by a switch",
        ),
    ]


@hookimpl
def register_verbs() -> list[Registration]:
    return [
        Registration("rl", "embodix_rl.rl_verb:run", "reinforcement learning in RLinf, synchronous or asynchronous"),
        Registration(
            "bench",
            "embodix_rl.bench_verb:run",
            "bench rl: runners and schedules of `lerobot rl` one after another, in one report",
        ),
    ]


@hookimpl
def register_schemas() -> list[Registration]:
    return [Registration("rl", "embodix_rl.schema:register", "`lerobot rl` and `lerobot bench rl`")]


@hookimpl
def register_host_patches() -> list[Registration]:
    summaries = {
        "rlinf_async_device": "asynchronous training on the device of the run",
        "rlinf_async_reward": "reward and critic in their own places",
        "rlinf_cpu_platform": "RLinf without an accelerator",
        "rlinf_environment_registry": "embodix's simulators as RLinf's environments",
        "rlinf_masked_normalization": "statistics of what counts",
        "rlinf_transformers5": "RLinf with today's transformers",
    }
    return [Registration(name, f"embodix_rl.patches.{name}:PATCH", summary) for name, summary in summaries.items()]


@hookimpl
def register_config_packages() -> list[Registration]:
    return [Registration("rl", "embodix_rl.hydra_conf:__name__", "runners, algorithms, placements, declared times")]
