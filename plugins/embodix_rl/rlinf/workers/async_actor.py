# SPDX-License-Identifier: Apache-2.0
"""RLinf's training worker of asynchronous PPO."""

from __future__ import annotations

from typing import Any

from embodix_rl.rlinf.extension import activate

activate("actor")  # before RLinf's modules are imported, hence the order below

from rlinf.workers.actor.async_ppo_fsdp_worker import AsyncPPOEmbodiedFSDPActor  # noqa: E402

from embodix_rl.rlinf.workers.actor import CountingActor  # noqa: E402


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
