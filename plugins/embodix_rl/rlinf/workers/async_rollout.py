# SPDX-License-Identifier: Apache-2.0
"""RLinf's inference worker of asynchronous runs."""

from __future__ import annotations

from embodix_rl.rlinf.extension import activate

activate("rollout")  # before RLinf's modules are imported, hence the order below

from rlinf.workers.rollout.hf.async_huggingface_worker import AsyncMultiStepRolloutWorker  # noqa: E402

from embodix_rl.rlinf.workers.rollout import TimedInference  # noqa: E402


class EmbodixAsyncRolloutWorker(TimedInference, AsyncMultiStepRolloutWorker):
    """``AsyncMultiStepRolloutWorker`` with report and timeline."""
