# SPDX-License-Identifier: Apache-2.0
"""RLinf's training workers, of synchronous, pipelined and asynchronous runs."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from embodix_rl.rlinf.extension import ReportingWorker, activate

activate("actor")  # before RLinf's modules are imported, hence the order below

from rlinf.workers.actor.async_ppo_fsdp_worker import AsyncPPOEmbodiedFSDPActor  # noqa: E402
from rlinf.workers.actor.fsdp_actor_worker import EmbodiedFSDPActor  # noqa: E402
from rlinf.workers.actor.fsdp_actor_worker_pipeline import PipelineEmbodiedFSDPActor  # noqa: E402

from embodix_rl.rlinf.export import export_saved  # noqa: E402
from embodix_rl.rlinf.task_config import FLOW_MODEL  # noqa: E402
from embodix_rl.rlinf.training_records import Consumption  # noqa: E402


class CountingActor(ReportingWorker):
    """Records training and the sending of weights, counts what is trained on, and saves LeRobot's form too."""

    @cached_property
    def consumption(self) -> Consumption:
        return Consumption()

    def pop_consumption(self) -> dict[str, Any]:
        """Counts since the last call."""
        return self.consumption.pop()

    def run_training(self, *args: Any, **kwargs: Any) -> Any:
        with self.timeline_span("train"):
            return super().run_training(*args, **kwargs)  # type: ignore[misc]

    async def sync_model_to_rollout(self) -> None:
        with self.timeline_span("weights"):
            await super().sync_model_to_rollout()  # type: ignore[misc]

    def save_checkpoint(self, save_path: str, step: int = 0) -> None:
        """RLinf's files, and beside them the model as LeRobot loads it."""
        super().save_checkpoint(save_path, step)  # type: ignore[misc]
        worker: Any = self
        if worker._rank == 0 and worker.cfg.actor.model.model_type == FLOW_MODEL:
            export_saved(Path(save_path), worker.cfg.actor.model)

    def count_versions(self, versions: Any, *, fresh: bool) -> None:
        """Count chunks by the versions of their policies, a tensor whose first of the trailing dimensions tells it."""
        worker: Any = self
        chunk = int(worker.cfg.actor.model.num_action_chunks)
        first_N = versions.reshape(*versions.shape[:2], -1)[..., 0].flatten()
        self.consumption.add(first_N.cpu().numpy(), int(worker.version), chunk, fresh=fresh)


class EmbodixActor(CountingActor, EmbodiedFSDPActor):
    """``EmbodiedFSDPActor`` with report, timeline and counts."""

    def compute_advantages_and_returns(self) -> Any:
        self.count_versions(self.rollout_batch["versions"], fresh=True)
        return super().compute_advantages_and_returns()


class EmbodixPipelineActor(CountingActor, PipelineEmbodiedFSDPActor):
    """``PipelineEmbodiedFSDPActor`` with report, timeline and counts."""

    def try_recv_micro_batch(self, input_channel: Any) -> Any:
        return self._counted(super().try_recv_micro_batch(input_channel))

    def recv_micro_batch(self, input_channel: Any) -> Any:
        with self.timeline_span("wait"):
            return self._counted(super().recv_micro_batch(input_channel))

    def _counted(self, micro_batch: Any) -> Any:
        if micro_batch is not None:
            self.count_versions(micro_batch["versions"].unsqueeze(1), fresh=True)
        return micro_batch


class EmbodixAsyncActor(CountingActor, AsyncPPOEmbodiedFSDPActor):
    """``AsyncPPOEmbodiedFSDPActor`` with report, timeline and counts.

    Its store keeps what it has trained on (`PriorityStore.topn` removes nothing), so a batch without fresh
    trajectories is trained on again.
    """

    async def construct_rollout_batch(self, max_trajectories: int | None = None) -> Any:
        with self.timeline_span("wait"):
            metrics = await super().construct_rollout_batch(max_trajectories)
        for trajectory in self.rollout_store.topn(self.rollout_store_size):
            used = getattr(trajectory, "embodix_used", False)
            self.count_versions(trajectory.versions, fresh=not used)
            self.consumption.received += not used
            trajectory.embodix_used = True
        return metrics
