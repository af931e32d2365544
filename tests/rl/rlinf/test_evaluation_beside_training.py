# SPDX-License-Identifier: Apache-2.0
"""Evaluations of ``runner=rl_vla3`` beside training, without RLinf: who acts, what is counted, where it is logged."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from embodix_rl.report.rl_steps import amend_rl_step, read_rl_steps
from embodix_rl.rlinf.asynchronous.components import Evaluations
from embodix_rl.rlinf.asynchronous.exchange import EVALUATION_REQUESTS
from embodix_rl.rlinf.hosts import WorkerFailedError
from embodix_rl.rlinf.training_records import StepRecorder
from embodix_rl.rlinf.workers.shard_evaluation import ShardEvaluation


class Work:
    def __init__(self, coroutine: Any) -> None:
        self._task = asyncio.ensure_future(coroutine)

    async def async_wait(self) -> Any:
        return await self._task


class Channel:
    """RLinf's interface of a channel over queues of one event loop."""

    def __init__(self) -> None:
        self.queues: defaultdict[str, asyncio.Queue[Any]] = defaultdict(asyncio.Queue)

    def put(self, item: Any, key: str, async_op: bool) -> Work:
        return Work(self.queues[key].put(item))

    def get(self, key: str, async_op: bool) -> Work:
        return Work(self.queues[key].get())


class EnvWorker:
    """Two stages of two environments whose episodes last two chunk steps."""

    stage_num, eval_rollout_epoch, n_eval_chunk_steps, eval_num_envs_per_stage = 2, 1, 4, 2

    def __init__(self) -> None:
        self.cfg = SimpleNamespace(env=SimpleNamespace(eval=SimpleNamespace(auto_reset=True)))
        self.threads: set[str] = set()
        self._steps = [0, 0]

    def begin_evaluation(self, stage: int) -> Any:
        self.threads.add(threading.current_thread().name)
        return self._seen(stage)

    def env_evaluate_step(self, actions: Any, stage: int) -> tuple[Any, dict[str, torch.Tensor]]:
        self.threads.add(threading.current_thread().name)
        self._steps[stage] += 1
        ended = {"return": torch.tensor([float(actions.sum())] * 2)} if self._steps[stage] % 2 == 0 else {}
        return self._seen(stage), ended

    def _seen(self, stage: int) -> Any:
        return SimpleNamespace(to_dict=lambda: {"obs": {"states": torch.full((2, 3), float(stage))}})


def test_an_evaluation_asks_for_actions_of_its_own_and_tells_which_versions_acted():
    async def run() -> tuple[dict[str, Any], set[str], EnvWorker]:
        inbox, rollout = Channel(), Channel()
        worker = EnvWorker()
        evaluation = asyncio.ensure_future(ShardEvaluation(worker, "env 0", 5.0).run(inbox, rollout))
        for number in range(worker.stage_num * worker.n_eval_chunk_steps):
            request = (await rollout.queues[EVALUATION_REQUESTS].get())["item"]
            assert request.size == 2 and request.payload["obs"]["states"].shape == (2, 3)
            answer = SimpleNamespace(actions=torch.ones(2, 4, 3), versions=torch.full((2, 1), 3.0 + (number > 5)))
            await inbox.put({"item": answer}, key=f"answers {request.client}", async_op=True).async_wait()
        return await evaluation, set(rollout.queues), worker

    result, keys, worker = asyncio.run(run())
    assert result["metrics"]["return"].tolist() == [24.0] * 8 and result["versions"] == [3, 4]
    assert keys == {EVALUATION_REQUESTS}
    assert all(name.startswith("evaluation") for name in worker.threads)


class Call:
    """A call of a worker group that ends at `release`."""

    def __init__(self, result: Any, *, fails: bool = False) -> None:
        self._result, self._fails, self.release = result, fails, threading.Event()

    def wait(self) -> Any:
        self.release.wait(10)
        return self._result

    def done(self) -> bool:
        return not self._fails


def _merge(of_workers: list[Any]) -> dict[str, Any]:
    return {"return": sum(metrics["return"] for metrics in of_workers) / len(of_workers)}


def test_evaluations_are_asked_for_in_time_run_one_at_a_time_and_are_logged_at_their_step():
    async def run() -> tuple[list[Call], list[Any]]:
        calls: list[Call] = []
        logged: list[Any] = []

        def begin() -> Call:
            workers = [{"metrics": {"return": 1.0}, "versions": [len(calls), 2 + len(calls)]}] * 2
            calls.append(Call(workers))
            return calls[-1]

        evaluations = Evaluations(begin, _merge, lambda data, step: logged.append((step, dict(data))), 2, 5)
        for step in range(5):
            evaluations.ask(step)
            await asyncio.sleep(0.01)
        assert len(calls) == 1 and not logged  # three were asked for; training went on
        ending = asyncio.ensure_future(evaluations.finish())
        for number in range(3):
            calls[number].release.set()
            while not ending.done() and len(calls) == number + 1:
                await asyncio.sleep(0.01)
        await ending
        return calls, logged

    calls, logged = asyncio.run(run())
    assert len(calls) == 3 and [step for step, _ in logged] == [1, 3, 4]
    assert logged[1][1] == {"eval/return": 1.0, "eval/first_version": 1.0, "eval/last_version": 3.0}


def test_a_failed_evaluation_fails_the_run():
    async def run() -> None:
        call = Call(None, fails=True)
        call.release.set()
        evaluations = Evaluations(lambda: call, _merge, lambda data, step: None, 1, 9)
        evaluations.ask(0)
        await asyncio.sleep(0.2)
        evaluations.ask(1)

    with pytest.raises(WorkerFailedError, match="env workers failed"):
        asyncio.run(run())


def test_metrics_that_come_late_are_added_to_their_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    counts = {"frames": 8, "fresh_frames": 8, "received": 1, "staleness": {0: 8}}
    recorder = StepRecorder(path, lambda: counts, declared=False)
    for step in range(3):
        recorder.log({"train/loss": float(step)}, step)
    recorder.log({"eval/return": 0.5}, 0)
    recorder.log({"eval/return": 0.7}, 2)
    recorder.finish()
    metrics = [one.metrics for one in read_rl_steps(path)]
    assert metrics == [
        {"train/loss": 0.0, "eval/return": 0.5},
        {"train/loss": 1.0},
        {"train/loss": 2.0, "eval/return": 0.7},
    ]
    with pytest.raises(ValueError, match="has no step 7"):
        amend_rl_step(path, 7, {})
