# SPDX-License-Identifier: Apache-2.0
"""RLinf's training worker that trains on micro-batches as they arrive."""

from __future__ import annotations

from typing import Any

from embodix_rl.rlinf.extension import activate

activate("actor")  # before RLinf's modules are imported, hence the order below

from rlinf.workers.actor.fsdp_actor_worker_pipeline import PipelineEmbodiedFSDPActor  # noqa: E402

from embodix_rl.rlinf.workers.actor import CountingActor  # noqa: E402


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
