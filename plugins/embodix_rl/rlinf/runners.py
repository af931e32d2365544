# SPDX-License-Identifier: Apache-2.0
"""RLinf's own runners, as choices of the group ``runner``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embodix_rl.rlinf.run_sizes import RunSizes, require_legal

_WORKERS = "embodix_rl.rlinf.workers"


@dataclass(frozen=True)
class WorkerClasses:
    """The worker classes of a run, imported."""

    env: Any
    rollout: Any
    actor: Any


class SyncRunner:
    """RLinf's ``EmbodiedRunner``, unmodified."""

    evaluates = True

    def check(self, sizes: RunSizes) -> None:
        require_legal(sizes)

    def host_settings(self, sizes: RunSizes) -> Mapping[str, Any]:
        return {}

    def workers(self) -> WorkerClasses:
        return worker_classes("env:EmbodixEnvWorker", "rollout:EmbodixRolloutWorker", "actor:EmbodixActor")

    def runner_class(self) -> Any:
        return attribute("rlinf.runners.embodied_runner:EmbodiedRunner")


class PipelineRunner(SyncRunner):
    """RLinf's ``EmbodiedRunner.run_pipeline``, unmodified."""

    def check(self, sizes: RunSizes) -> None:
        require_legal(sizes, pipeline=True)

    def host_settings(self, sizes: RunSizes) -> Mapping[str, Any]:
        return {"runner": {"use_training_pipeline": True}}

    def workers(self) -> WorkerClasses:
        return worker_classes("env:EmbodixEnvWorker", "rollout:EmbodixRolloutWorker", "actor:EmbodixPipelineActor")


class RlinfAsyncRunner:
    """RLinf's ``AsyncPPOEmbodiedRunner``, unmodified.

    Args:
        decoupled: inference takes whichever environment processes are ready.
        queue_size: environment processes of one inference in decoupled mode; 0 for RLinf's own choice.
        staleness_threshold: policy versions after which a trajectory is thrown away.
    """

    evaluates = False

    def __init__(self, decoupled: bool = False, queue_size: int = 0, staleness_threshold: int = 1) -> None:
        if staleness_threshold < 0:
            raise ValueError(f"staleness_threshold counts policy versions, from 0 on; got {staleness_threshold}.")
        self._decoupled, self._queue_size, self._threshold = decoupled, queue_size, staleness_threshold

    def check(self, sizes: RunSizes) -> None:
        require_legal(sizes, decoupled=self._decoupled)
        if sizes.advantage != "gae":
            raise ValueError(f"RLinf's asynchronous runner trains by PPO only; got algorithm {sizes.advantage}.")

    def host_settings(self, sizes: RunSizes) -> Mapping[str, Any]:
        return {
            "runner": {"enable_decoupled_mode": self._decoupled},
            "rollout": {"rollout_queue_size": self._queue_size},
            "algorithm": {
                "loss_type": "decoupled_actor_critic",
                "staleness_threshold": self._threshold,
                "rollout_store_size_per_rank": sizes.trajectories_per_actor,  # as much as a synchronous step
                "behave_weight_threshold": None,
            },
        }

    def workers(self) -> WorkerClasses:
        return worker_classes(
            "env:EmbodixAsyncEnvWorker", "rollout:EmbodixAsyncRolloutWorker", "actor:EmbodixAsyncActor"
        )

    def runner_class(self) -> Any:
        return attribute("rlinf.runners.async_ppo_embodied_runner:AsyncPPOEmbodiedRunner")


def worker_classes(env: str, rollout: str, actor: str) -> WorkerClasses:
    """Worker classes by ``module:class`` in `embodix_rl.rlinf.workers`."""
    return WorkerClasses(*(attribute(f"{_WORKERS}.{name}") for name in (env, rollout, actor)))


def attribute(target: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
