# SPDX-License-Identifier: Apache-2.0
"""Evaluation of an environment worker beside its shards: other environments, requests of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from embodix_rl.rlinf.asynchronous.exchange import (
    EVALUATION_REQUESTS,
    ChannelReceive,
    ChannelSend,
    allow_many_waits,
    answers_key,
)
from embodix_rl.scheduling.batcher import InferenceRequest
from embodix_rl.scheduling.waiting import waiting


class ShardEvaluation:
    """Runs the episodes of ``EnvWorker.evaluate``, each stage at its own pace.

    The environments are built and stepped in a thread of their own, in the worker's process. Nothing of it goes to the
    trainer or the gate.

    Args:
        worker: an ``EnvWorker`` with ``begin_evaluation(stage)``, the first observation.
        source: its name.
        deadline_s: the longest wait for actions.
    """

    def __init__(self, worker: Any, source: str, deadline_s: float) -> None:
        self._worker, self._source, self._deadline_s = worker, source, deadline_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluation")

    def build(self, work: Callable[..., Any], *args: Any) -> Any:
        """The result of `work`, done in the thread of these environments."""
        return self._thread.submit(work, *args).result()

    async def run(self, input_channel: Any, rollout_channel: Any) -> dict[str, Any]:
        """Evaluate once.

        Returns:
            ``metrics``, of each episode that ended, and ``versions``, the first and last that acted.
        """
        allow_many_waits()
        async with asyncio.TaskGroup() as running:
            stages = [
                running.create_task(EvaluationStage(self, stage, input_channel, rollout_channel).run())
                for stage in range(self._worker.stage_num)
            ]
        metrics: dict[str, list[Any]] = {}
        versions: list[int] = []
        for of_stage, acted in (task.result() for task in stages):
            versions += acted
            for name, values in of_stage.items():
                metrics.setdefault(name, []).extend(values)
        return {
            "metrics": {name: torch.cat(values) for name, values in metrics.items()},
            "versions": [min(versions), max(versions)],
        }

    async def do(self, work: Callable[..., Any], *args: Any) -> Any:
        """The result of `work` in the thread of these environments."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)


class EvaluationStage:
    """One stage of an evaluation."""

    def __init__(self, evaluation: ShardEvaluation, stage: int, input_channel: Any, rollout_channel: Any) -> None:
        self._evaluation, self._stage = evaluation, stage
        self._name = f"{evaluation._source} evaluation {stage}"
        self._answers = ChannelReceive[Any](input_channel, answers_key(self._name))
        self._requests = ChannelSend[InferenceRequest[Any]](rollout_channel, EVALUATION_REQUESTS)

    async def run(self) -> tuple[dict[str, list[Any]], list[int]]:
        """Metrics of the episodes that ended, and the versions that acted."""
        worker, do = self._evaluation._worker, self._evaluation.do
        metrics: dict[str, list[Any]] = {}
        versions: list[int] = []
        for epoch in range(worker.eval_rollout_epoch):
            if epoch == 0 or not worker.cfg.env.eval.auto_reset:
                seen = await do(worker.begin_evaluation, self._stage)
            for _ in range(worker.n_eval_chunk_steps):
                answer = await self._act(seen)
                versions.append(int(answer.versions.flatten()[0]))
                seen, ended = await do(worker.env_evaluate_step, answer.actions.numpy(), self._stage)
                for name, values in ended.items():
                    metrics.setdefault(name, []).append(values)
            if not worker.cfg.env.eval.auto_reset:
                await do(worker.eval_env_list[self._stage].update_reset_state_ids)
        return metrics, versions

    async def _act(self, seen: Any) -> Any:
        """What the policy answers to an observation, without noise."""
        payload = {"obs": seen.to_dict()["obs"], "final_obs": None}
        request = InferenceRequest(payload, self._evaluation._worker.eval_num_envs_per_stage, self._name, self._name)
        sending = asyncio.ensure_future(self._requests.send(request))
        async with waiting(self._name, "rollout workers", "actions", self._evaluation._deadline_s):
            answer = await self._answers.receive()
        await sending
        return answer
