# SPDX-License-Identifier: Apache-2.0
"""RLinf's training workers, of synchronous, pipelined and asynchronous runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from embodix_rl.rlinf.extension import ReportingWorker, activate

activate("actor")  # before RLinf's modules are imported, hence the order below

import torch  # noqa: E402
from rlinf.workers.actor.async_ppo_fsdp_worker import AsyncPPOEmbodiedFSDPActor  # noqa: E402
from rlinf.workers.actor.fsdp_actor_worker import EmbodiedFSDPActor  # noqa: E402
from rlinf.workers.actor.fsdp_actor_worker_pipeline import PipelineEmbodiedFSDPActor  # noqa: E402

from embodix_rl.objectives.even_groups import even_groups  # noqa: E402
from embodix_rl.rlinf.export import export_saved  # noqa: E402
from embodix_rl.rlinf.run_sizes import GRPO  # noqa: E402
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
        metrics = super().compute_advantages_and_returns()
        if self.cfg.algorithm.adv_type == GRPO:
            metrics |= even_group_metrics(self.rollout_batch, self.cfg.algorithm.group_size, self.device)
        return metrics


def even_group_metrics(batch: Mapping[str, Any], group_size: int, device: Any) -> dict[str, float]:
    """The share of even groups among those of all ranks, of a batch with advantages ``[S, E]`` or ``[S, E, C]``."""
    advantages, mask = batch["advantages"], batch.get("loss_mask")
    valid = torch.ones_like(advantages, dtype=torch.bool) if mask is None else mask.bool().expand_as(advantages)
    by_chunk = torch.where(valid, advantages, 0.0).abs().flatten(2) if advantages.ndim > 2 else advantages[..., None]
    counts = even_groups(by_chunk.abs().amax(dim=2), valid.reshape(*valid.shape[:2], -1).any(dim=2), group_size)[1]
    of_all = torch.tensor([float(counts.even), float(counts.compared)], device=device)
    torch.distributed.all_reduce(of_all)
    even, compared = of_all.tolist()
    return {"even_group_share": even / compared} if compared else {}


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
