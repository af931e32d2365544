# SPDX-License-Identifier: Apache-2.0
"""RLinf's environment worker whose stages ask for actions one by one: a stage is a shard, a shard one request."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from embodix.rl.rlinf.extension import activate

activate("env")  # before RLinf's modules are imported, hence the order below

import torch  # noqa: E402
from rlinf.data.embodied_io_struct import ChunkStepResult, EmbodiedRolloutResult, EnvOutput  # noqa: E402
from rlinf.workers.env.env_worker import EnvWorker  # noqa: E402

from embodix.rl.rlinf.asynchronous.exchange import (  # noqa: E402
    EVENTS,
    REQUESTS,
    Asks,
    ChannelReceive,
    ChannelSend,
    Delivered,
    Event,
    allow_many_waits,
    answers_key,
    samples_key,
    tickets_key,
)
from embodix.rl.rlinf.workers.env import TimedEnvironments  # noqa: E402
from embodix.rl.scheduling.batcher import Request  # noqa: E402
from embodix.rl.scheduling.staleness import Ticket  # noqa: E402
from embodix.rl.scheduling.waiting import waiting  # noqa: E402


class ShardEnvWorker(TimedEnvironments, EnvWorker):
    """Runs a trajectory of each shard whenever the staleness gate gives leave, and sends it as soon as it is finished.

    Simulators are built, stepped and reset in one thread of their own, one at a time, so that messages pass meanwhile
    and what belongs to a thread (a rendering context) stays in it.
    """

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self._simulators = ThreadPoolExecutor(1, thread_name_prefix="simulators")
        self._deadline_s = float(cfg.embodix.rl_vla3.deadline_s)
        self._source = f"env {self._rank}"
        self._interacting: asyncio.Task[None] | None = None

    def init_worker(self) -> None:
        self._simulators.submit(super().init_worker).result()

    async def interact(self, input_channel: Any, rollout_channel: Any, actor_channel: Any, event_channel: Any) -> None:
        """Run trajectories until the run needs no more, or `stop`."""
        allow_many_waits()
        shards = [
            Shard(self, stage, input_channel, rollout_channel, actor_channel, event_channel)
            for stage in range(self.stage_num)
        ]
        self._interacting = asyncio.ensure_future(_run_all(shards))
        with suppress(asyncio.CancelledError):  # `stop` was called
            await self._interacting

    def stop(self) -> None:
        """Cut off what is under way."""
        if self._interacting is not None:
            self._interacting.cancel()

    async def simulate(self, work: Any, *args: Any) -> Any:
        """Do `work` in the simulators' thread."""
        return await asyncio.get_running_loop().run_in_executor(self._simulators, work, *args)

    def begin(self, stage: int) -> EnvOutput:
        """The first observation of a trajectory of one stage; as `bootstrap_step`, which takes all stages."""
        with self.timeline_span("reset"):
            if self.cfg.env.train.auto_reset:
                observation, final = self.last_obs_list[stage], None
            else:
                self.env_list[stage].is_start = True
                observation, infos = self.env_list[stage].reset()
                final = infos.get("final_observation")
        dones = torch.zeros(self.train_num_envs_per_stage, self.model_cfg.num_action_chunks, dtype=torch.bool)
        return EnvOutput(
            obs=observation, final_obs=final, dones=dones, terminations=dones.clone(), truncations=dones.clone()
        )

    def end(self, stage: int, last: EnvOutput) -> None:
        """Keep what the stage's next trajectory begins with."""
        if self.cfg.env.train.auto_reset:
            self.last_obs_list[stage] = last.obs
        self.env_list[stage].update_reset_state_ids()


async def _run_all(shards: list[Shard]) -> None:
    async with asyncio.TaskGroup() as running:
        for shard in shards:
            running.create_task(shard.run(), name=shard.name)


class Shard:
    """One stage of a worker."""

    def __init__(
        self, worker: ShardEnvWorker, stage: int, inbox: Any, rollout_channel: Any, actor_channel: Any, events: Any
    ) -> None:
        self.name = f"{worker._source} shard {stage}"
        self._worker, self._stage = worker, stage
        self._tickets = ChannelReceive[Ticket | None](inbox, tickets_key(self.name))
        self._answers = ChannelReceive[Any](inbox, answers_key(self.name))
        self._requests = ChannelSend[Request[Any]](rollout_channel, REQUESTS)
        self._samples = ChannelSend[Any](actor_channel, samples_key(self.name))
        self._events = ChannelSend[Event](events, EVENTS)
        self._worked_s: float | None = None

    async def run(self) -> None:
        """Trajectories, as long as there is leave."""
        while (ticket := await self._leave()) is not None:
            metrics = await self._trajectory()
            await self._events.send(Delivered(ticket, metrics))

    async def _leave(self) -> Ticket | None:
        await self._events.send(Asks(self.name))
        async with waiting(self.name, "trainer", "leave to generate", self._worker._deadline_s):
            return await self._tickets.receive()

    async def _trajectory(self) -> dict[str, list[float]]:
        worker, stage = self._worker, self._stage
        collected = EmbodiedRolloutResult(max_episode_length=worker.cfg.env.train.max_episode_steps)
        metrics: dict[str, list[float]] = {}
        seen = await worker.simulate(worker.begin, stage)
        for step in range(worker.n_train_chunk_steps):
            answer = await self._act(seen)
            collected.append_step_result(self._step_result(seen, answer, is_last=False))
            begun = time.perf_counter()
            seen, ended = await worker.simulate(worker.env_interact_step, answer.actions, stage)
            self._worked_s = time.perf_counter() - begun
            for name, values in ended.items() if self._counts(step) else ():
                metrics.setdefault(f"env/{name}", []).extend(values.flatten().float().tolist())
        answer = await self._act(seen)
        collected.append_step_result(self._step_result(seen, answer, is_last=True))
        await worker.simulate(worker.end, stage, seen)
        await self._samples.send(collected.to_trajectory())
        return metrics

    def _counts(self, step: int) -> bool:
        """Whether what a step says of episodes is final; without auto-reset only the last one's is."""
        train = self._worker.cfg.env.train
        return bool(train.auto_reset or train.ignore_terminations) or step == self._worker.n_train_chunk_steps - 1

    async def _act(self, seen: EnvOutput) -> Any:
        """What the policy answers to an observation."""
        batch = seen.to_dict()
        size = self._worker.train_num_envs_per_stage
        payload = {"obs": batch["obs"], "final_obs": batch["final_obs"]}
        sent_at = asyncio.get_running_loop().time()
        request = Request(payload, size, self.name, self._worker._source, sent_at, self._worked_s)
        sending = asyncio.ensure_future(self._requests.send(request))
        async with waiting(self.name, "rollout workers", "actions", self._worker._deadline_s):
            answer = await self._answers.receive()
        await sending
        return answer

    def _step_result(self, seen: EnvOutput, answer: Any, *, is_last: bool) -> ChunkStepResult:
        """As ``EnvWorker._run_interact_once`` makes it; the last observation of a trajectory has a value only."""
        acted: dict[str, Any] = {}
        if not is_last:
            acted = {
                "actions": answer.forward_inputs.get("action"),
                "prev_logprobs": answer.prev_logprobs,
                "forward_inputs": answer.forward_inputs,
                "versions": answer.versions,
            }
        return ChunkStepResult(
            prev_values=answer.prev_values,
            dones=seen.dones,
            truncations=seen.truncations,
            terminations=seen.terminations,
            rewards=self._worker.compute_bootstrap_rewards(seen, answer.bootstrap_values, None),
            **acted,
        )
