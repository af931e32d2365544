# SPDX-License-Identifier: Apache-2.0
"""``runner=rl_vla3`` as it is chosen: its switches, what it can run with, its classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from embodix.arguments import typed_arguments
from embodix_rl.objectives.groups import TREATMENTS
from embodix_rl.rlinf.run_sizes import GRPO, PPO, RunSizes, require_legal
from embodix_rl.rlinf.runners import SyncRunner, WorkerClasses, attribute, worker_classes

NORMALIZATIONS = ("exact", "previous")
RESET_FACTOR = 5.0  # what a reset may take, in deadlines of a chunk step


@dataclass(frozen=True)
class AsyncSettings:
    """How a run of rl_vla3 is scheduled.

    Attributes:
        async_train: generation goes on while the policy is trained.
        dynamic_batching: inference takes the requests that are there instead of waiting for all environment workers.
        streaming: a trajectory is trained on when it is there instead of when the whole batch is.
        max_staleness: policy versions between a trajectory's beginning and its training, at most; 0 without
            `async_train`.
        queue_depth: trajectories under way or waiting for training, at most; None for as many as `max_staleness`
            allows.
        max_batch: requests of one inference, at most; None for all shards.
        max_wait_s: the longest that a request waits for others; None to choose it and the batch online.
        normalization: of advantages: ``exact`` over the global batch, or by the moments of the ``previous`` one, which
            lets a trajectory be trained on at once.
        behaviour_cap: largest weight of the policy that is trained over the one that sampled; None for none.
        even_groups: of GRPO, those that all fail or all succeed, which teach nothing: ``count`` has their chunks in the
            denominator of the loss, as RLinf does; ``leave_out`` has them not, so that fewer groups that differ do not
            make the step smaller. Their share is ``rollout/even_group_share`` of the metrics either way.
        part_bytes: of the parts that weights are sent in.
        deadline_s: the longest wait for another process, after which the run ends and says who waited for whom.
        isolate_simulators: each environment worker's simulators are a process of their own, which is started again when
            it crashes or hangs; what it had under way is trained at zero weight.
        restarts_per_hour: of such processes in any hour of the run; one more ends it.
        simulator_deadline_s: the longest chunk step; a reset and building may take `RESET_FACTOR` times as long.
    """

    async_train: bool = True
    dynamic_batching: bool = True
    streaming: bool = True
    max_staleness: int = 1
    queue_depth: int | None = None
    max_batch: int | None = None
    max_wait_s: float | None = None
    normalization: str = "exact"
    behaviour_cap: float | None = 5.0
    even_groups: str = "count"
    part_bytes: int = 64 * 1024**2
    deadline_s: float = 600.0
    isolate_simulators: bool = True
    restarts_per_hour: int = 10
    simulator_deadline_s: float = 60.0

    def __post_init__(self) -> None:
        counts = {"max_staleness": 0, "queue_depth": 1, "max_batch": 1, "part_bytes": 1, "restarts_per_hour": 0}
        for name, least in counts.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"runner.options.{name} is at least {least}; got {value}.")
        if self.max_wait_s is not None and not self.max_wait_s >= 0:
            raise ValueError(f"runner.options.max_wait_s is a number of seconds from 0 on; got {self.max_wait_s}.")
        for name in ("deadline_s", "simulator_deadline_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"runner.options.{name} is a positive number of seconds; got {getattr(self, name)}.")
        longest_s = RESET_FACTOR * self.simulator_deadline_s
        if self.isolate_simulators and longest_s >= self.deadline_s:
            raise ValueError(
                f"A simulator's hang is found after {longest_s:g} s at a reset, {RESET_FACTOR:g} times "
                f"runner.options.simulator_deadline_s; runner.options.deadline_s={self.deadline_s:g} would end the run "
                f"before. Set simulator_deadline_s below {self.deadline_s / RESET_FACTOR:g}."
            )
        if self.even_groups not in TREATMENTS:
            raise ValueError(f"runner.options.even_groups is one of {', '.join(TREATMENTS)}; got {self.even_groups!r}.")
        if self.normalization not in NORMALIZATIONS:
            raise ValueError(
                f"runner.options.normalization is one of {', '.join(NORMALIZATIONS)}; got {self.normalization!r}."
            )

    @property
    def bound(self) -> int:
        """Of the staleness."""
        return self.max_staleness if self.async_train else 0


class RlVla3Runner:
    """embodix's schedule in RLinf's workers; with every switch off RLinf's ``EmbodiedRunner``, unmodified.

    Args:
        options: of `AsyncSettings`.
    """

    evaluates = True

    def __init__(self, **options: Any) -> None:
        self._settings = AsyncSettings(**typed_arguments(AsyncSettings, options, "runner 'rl_vla3'"))
        self._sync = SyncRunner()
        self._is_sync = not (self._settings.async_train or self._settings.dynamic_batching or self._settings.streaming)

    def check(self, sizes: RunSizes) -> None:
        require_legal(sizes)
        faults = [] if self._is_sync else list(self._faults(sizes))
        if faults:
            raise ValueError("runner=rl_vla3 can't run so: " + " ".join(faults))

    def host_settings(self, sizes: RunSizes) -> Mapping[str, Any]:
        if self._is_sync:
            return {}
        return {"embodix": {"rl_vla3": asdict(self._settings), "queue_sizes": self._queue_sizes(sizes)}}

    def workers(self) -> WorkerClasses:
        if self._is_sync:
            return self._sync.workers()
        return worker_classes(
            "shard_env:ShardEnvWorker", "batching_rollout:BatchingRollout", "streaming_actor:StreamingActor"
        )

    def runner_class(self) -> Any:
        if self._is_sync:
            return self._sync.runner_class()
        return attribute("embodix_rl.rlinf.asynchronous.driver:AsynchronousRunner")

    def _queue_sizes(self, sizes: RunSizes) -> dict[str, int]:
        """What trajectories that wait for training in a checkpoint must agree with."""
        return {
            "num_envs": sizes.num_envs,
            "env_workers": sizes.env_workers,
            "stages": sizes.num_stages,
            "steps": sizes.steps_per_epoch,
            "epochs": sizes.rollout_epochs,
            "chunk": sizes.chunk,
            "max_staleness": self._settings.bound,
        }

    def _faults(self, sizes: RunSizes) -> Iterator[str]:
        if sizes.advantage not in (PPO, GRPO):
            yield f"It trains by PPO and GRPO; got algorithm.adv_type={sizes.advantage}."
        if sizes.actor_workers != 1:
            yield f"It has one training process; set placement.actor_workers=1 (got {sizes.actor_workers})."
        if sizes.reward_type != "chunk_level":
            yield f"Its advantages are those of chunks: set algorithm.reward_type=chunk_level, not {sizes.reward_type}."
        shards = sizes.env_workers * sizes.num_stages
        if not self._settings.dynamic_batching:
            yield from self._barrier_faults(sizes)
        depth = self._settings.queue_depth
        if depth is not None and depth < shards:
            yield f"runner.options.queue_depth={depth} leaves some of the {shards} shards idle; nearest: {shards}."

    def _barrier_faults(self, sizes: RunSizes) -> Iterator[str]:
        if sizes.num_stages != 1:
            yield (
                "Without dynamic_batching inference waits for every environment worker, and stages would wait for each "
                f"other's leave to generate: set rollout.stages=1 (got {sizes.num_stages})."
            )
        if sizes.rollout_workers != 1:
            yield (
                "Without dynamic_batching one inference process serves all environment workers: set "
                f"placement.rollout_workers=1 (got {sizes.rollout_workers})."
            )
