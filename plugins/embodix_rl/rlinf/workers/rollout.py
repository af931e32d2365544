# SPDX-License-Identifier: Apache-2.0
"""RLinf's inference workers, of synchronous and asynchronous runs."""

from __future__ import annotations

from typing import Any

from embodix_rl.rlinf.extension import ReportingWorker, activate

activate("rollout")  # before RLinf's modules are imported, hence the order below

import numpy as np  # noqa: E402
import torch  # noqa: E402
from rlinf.workers.rollout.hf.async_huggingface_worker import AsyncMultiStepRolloutWorker  # noqa: E402
from rlinf.workers.rollout.hf.huggingface_worker import MultiStepRolloutWorker  # noqa: E402


class TimedInference(ReportingWorker):
    """Records inference and the arrival of weights, tells the policy whether it is evaluated, and seeds its noise."""

    _train_sampling_params: dict[str, Any]
    _eval_sampling_params: dict[str, Any]

    def init_worker(self) -> None:
        """RLinf seeds environments and the order of samples; actions would be others in every run."""
        super().init_worker()  # type: ignore[misc]
        worker: Any = self
        resumed = worker.cfg.runner.resume_dir
        first_step = 0 if resumed is None else int(str(resumed).rpartition("_")[2])
        (seed,) = np.random.SeedSequence([worker.cfg.actor.seed, worker._rank, first_step]).generate_state(1)
        torch.manual_seed(int(seed))

    def setup_sample_params(self) -> None:
        """What RLinf hands to `predict_action_batch`: it tells the mode to models of its own only."""
        super().setup_sample_params()  # type: ignore[misc]
        self._train_sampling_params = {**self._train_sampling_params, "mode": "train"}
        self._eval_sampling_params = {**self._eval_sampling_params, "mode": "eval"}

    def predict(self, env_obs: Any, mode: Any = "train") -> Any:
        with self.timeline_span("infer"):
            return super().predict(env_obs, mode)  # type: ignore[misc]

    async def sync_model_from_actor(self) -> None:
        with self.timeline_span("weights"):
            await super().sync_model_from_actor()  # type: ignore[misc]


class EmbodixRolloutWorker(TimedInference, MultiStepRolloutWorker):
    """``MultiStepRolloutWorker`` with report and timeline."""


class EmbodixAsyncRolloutWorker(TimedInference, AsyncMultiStepRolloutWorker):
    """``AsyncMultiStepRolloutWorker`` with report and timeline."""
