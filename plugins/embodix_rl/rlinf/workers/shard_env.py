# SPDX-License-Identifier: Apache-2.0
"""RLinf's environment worker whose stages ask for actions one by one: a stage is a shard, a shard one request."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from embodix_rl.rlinf.extension import activate

activate("env")  # before RLinf's modules are imported, hence the order below

import torch  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from rlinf.data.embodied_io_struct import ChunkStepResult, EmbodiedRolloutResult, EnvOutput  # noqa: E402
from rlinf.workers.env.env_worker import EnvWorker  # noqa: E402

from embodix_rl.rlinf.asynchronous.exchange import (  # noqa: E402
    EVENTS,
    REQUESTS,
    Asks,
    ChannelReceive,
    ChannelSend,
    Delivered,
    Event,
    Masked,
    allow_many_waits,
    answers_key,
    samples_key,
    tickets_key,
)
from embodix_rl.rlinf.asynchronous.rl_vla3 import RESET_FACTOR  # noqa: E402
from embodix_rl.rlinf.asynchronous.supervised_simulators import SupervisedSimulators  # noqa: E402
from embodix_rl.rlinf.simulator_process import (  # noqa: E402
    RemoteSimulators,
    SimulatorDeadlines,
    SimulatorLostError,
)
from embodix_rl.rlinf.workers.env import TimedEnvironments  # noqa: E402
from embodix_rl.rlinf.workers.shard_evaluation import ShardEvaluation  # noqa: E402
from embodix_rl.scheduling.batcher import InferenceRequest  # noqa: E402
from embodix_rl.scheduling.staleness import Ticket  # noqa: E402
from embodix_rl.scheduling.waiting import waiting  # noqa: E402


class ShardEnvWorker(TimedEnvironments, EnvWorker):
    """Runs a trajectory of each shard whenever the staleness gate gives leave, and sends it as soon as it is finished.

    Simulators are built, stepped and reset one at a time, in a process of their own unless the run wants them here.
    """

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        settings = cfg.embodix.rl_vla3
        self._deadline_s = float(settings.deadline_s)
        self._waits_for_all = not settings.dynamic_batching
        self._source = f"env {self._rank}"
        self._remote: RemoteSimulators | None = None
        if settings.isolate_simulators:
            step_s = float(settings.simulator_deadline_s)
            self._remote = RemoteSimulators(self._source, SimulatorDeadlines(step_s, RESET_FACTOR * step_s))
        self.simulators = SupervisedSimulators(self._source, self._remote, self._observe_again)
        self._evaluation = ShardEvaluation(self, self._source, self._deadline_s)
        self._interacting: asyncio.Task[None] | None = None

    def init_worker(self) -> None:
        self.simulators.do_now(super().init_worker)

    def _setup_env_and_wrappers(self, env_cls: Any, env_cfg: Any, num_envs_per_stage: int) -> list[Any]:
        """As RLinf's; what is trained on is made in the simulators' process."""
        if env_cfg.is_eval:
            build = super()._setup_env_and_wrappers
            return list(self._evaluation.build(build, env_cls, env_cfg, num_envs_per_stage))
        if self._remote is not None:
            env_cls = partial(_build_remote, self._remote, env_cls)
        made: list[Any] = super()._setup_env_and_wrappers(env_cls, env_cfg, num_envs_per_stage)
        return made

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

    async def evaluate(self, input_channel: Any, rollout_channel: Any) -> dict[str, Any]:
        """Evaluate once beside what is trained on (`ShardEvaluation.run`)."""
        return await self._evaluation.run(input_channel, rollout_channel)

    def begin_evaluation(self, stage: int) -> EnvOutput:
        """The first observation of a stage's evaluation; as ``EnvWorker.evaluate`` has it."""
        env = self.eval_env_list[stage]
        env.is_start = True
        self.eval_prev_done[stage] = torch.zeros(self.eval_num_envs_per_stage, dtype=torch.bool)
        observation, infos = env.reset()
        return EnvOutput(obs=observation, final_obs=infos.get("final_observation"))

    def stop(self) -> None:
        """Cut off what is under way."""
        if self._interacting is not None:
            self._interacting.cancel()
        self.simulators.stop()

    def progress(self) -> list[Any]:
        """Of the episodes of all stages."""
        return [env.progress() for env in self.env_list]

    def go_on(self, progress_of_workers: list[list[Any]]) -> None:
        """Begin other episodes than those that were begun at `progress`, given for all workers."""
        self.simulators.do_now(self._go_on, progress_of_workers[self._rank])

    def _go_on(self, progress: list[Any]) -> None:
        for env, of_env in zip(self.env_list, progress, strict=True):
            env.go_on(of_env)
        self._observe_again()

    def begin(self, stage: int) -> EnvOutput:
        """The first observation of a trajectory of one stage; as `bootstrap_step`, which takes all stages."""
        with self.timeline_span("reset"):
            if self.cfg.env.train.auto_reset:
                observation, final = self.last_obs_list[stage], None
            else:
                self.env_list[stage].is_start = True
                observation, infos = self.env_list[stage].reset()
                final = infos.get("final_observation")
        return self._first(observation, final)

    def pending(self, stage: int) -> EnvOutput:
        """What a stage was seen at after the last restart."""
        return self._first(self.last_obs_list[stage], None)

    def _first(self, observation: Any, final: Any) -> EnvOutput:
        dones = torch.zeros(self.train_num_envs_per_stage, self.model_cfg.num_action_chunks, dtype=torch.bool)
        return EnvOutput(
            obs=observation, final_obs=final, dones=dones, terminations=dones.clone(), truncations=dones.clone()
        )

    def end(self, stage: int, last: EnvOutput) -> None:
        """Keep what the stage's next trajectory begins with."""
        if self.cfg.env.train.auto_reset:
            self.last_obs_list[stage] = last.obs
        self.env_list[stage].update_reset_state_ids()

    def _observe_again(self) -> None:
        """After a restart all environments begin anew."""
        with self.timeline_span("reset"):
            self.last_obs_list = [env.reset()[0] for env in self.env_list]


def _build_remote(remote: RemoteSimulators, env_cls: Any, *, cfg: Any, worker_info: Any, **sizes: Any) -> Any:
    """An environment in the simulators' process, which knows RLinf's workers no more than embodix's environments do."""
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    return remote.build(env_cls, cfg=OmegaConf.create(plain), worker_info=None, **sizes)


async def _run_all(shards: list[Shard]) -> None:
    async with asyncio.TaskGroup() as running:
        for shard in shards:
            running.create_task(shard.run(), name=shard.name)


@dataclass(frozen=True)
class _Answered:
    """An answer to the last observation of a trajectory, and the life of the simulators that were observed."""

    answer: Any
    life: int


class Shard:
    """One stage of a worker.

    The last observation of a trajectory is asked about for its value. Under auto-reset the next trajectory begins with
    the same observation: it is asked about once where there is leave to go on, an inference less a trajectory.
    """

    def __init__(
        self, worker: ShardEnvWorker, stage: int, inbox: Any, rollout_channel: Any, actor_channel: Any, events: Any
    ) -> None:
        self.name = f"{worker._source} shard {stage}"
        self._worker, self._stage = worker, stage
        self._tickets = ChannelReceive[Ticket | None](inbox, tickets_key(self.name))
        self._answers = ChannelReceive[Any](inbox, answers_key(self.name))
        self._requests = ChannelSend[InferenceRequest[Any]](rollout_channel, REQUESTS)
        self._samples = ChannelSend[Any](actor_channel, samples_key(self.name))
        self._events = ChannelSend[Event](events, EVENTS)
        self._worked_s: float | None = None
        self._num_asked = 0  # requests of the trajectory under way
        self._leave: asyncio.Future[Ticket | None] | None = None  # that was asked for
        self._answered: _Answered | None = None  # what the next trajectory begins with
        # Only where the next trajectory begins with what this one ends with.
        self._asks_early = bool(worker.cfg.env.train.auto_reset) and not worker._waits_for_all

    async def run(self) -> None:
        """Trajectories, as long as there is leave."""
        try:
            while (ticket := await self._next_leave()) is not None:
                await self._generate(ticket)
        finally:
            if self._leave is not None:
                self._leave.cancel()

    async def _generate(self, ticket: Ticket) -> None:
        self._num_asked = 0
        try:
            trajectory, metrics = await self._trajectory()
            await self._samples.send(trajectory)
            await self._events.send(Delivered(ticket, metrics))
        except SimulatorLostError:
            await self._keep_pace()
            await self._samples.send(Masked())
            await self._events.send(Delivered(ticket, {}, valid=False))

    async def _next_leave(self) -> Ticket | None:
        leave, self._leave = self._leave, None
        return await (leave or self._ask_for_leave())

    async def _ask_for_leave(self) -> Ticket | None:
        await self._events.send(Asks(self.name))
        async with waiting(self.name, "trainer", "leave to generate", self._worker._deadline_s):
            return await self._tickets.receive()

    def _has_leave(self) -> bool:
        """For the trajectory after the one under way."""
        return self._leave is not None and self._leave.done() and self._leave.result() is not None

    async def _keep_pace(self) -> None:
        """Make the requests that are left of a lost trajectory where inference waits for those of every worker."""
        while self._worker._waits_for_all and self._num_asked <= self._worker.n_train_chunk_steps:
            await self._act(self._worker.pending(self._stage))

    async def _simulate(self, work: Any, *args: Any, life: int | None) -> Any:
        return await self._worker.simulators.do(work, *args, life=life, tell=self._events.send)

    async def _trajectory(self) -> tuple[Any, dict[str, list[float]]]:
        worker, stage = self._worker, self._stage
        collected = EmbodiedRolloutResult(max_episode_length=worker.cfg.env.train.max_episode_steps)
        metrics: dict[str, list[float]] = {}
        seen = await self._simulate(worker.begin, stage, life=None)
        life = worker.simulators.life
        for step in range(worker.n_train_chunk_steps):
            answer = await self._act(seen) if step else await self._first_answer(seen, life)
            if self._asks_early and step == worker.n_train_chunk_steps - 1:
                self._leave = asyncio.ensure_future(self._ask_for_leave())
            collected.append_step_result(self._step_result(seen, answer, is_last=False))
            begun = time.perf_counter()
            seen, ended = await self._simulate(worker.env_interact_step, answer.actions, stage, life=life)
            self._worked_s = time.perf_counter() - begun
            for name, values in ended.items() if self._counts(step) else ():
                metrics.setdefault(f"env/{name}", []).extend(values.flatten().float().tolist())
        await self._simulate(worker.end, stage, seen, life=life)
        goes_on = self._has_leave()
        answer = await self._act(seen)
        self._answered = _Answered(answer, life) if goes_on else None
        collected.append_step_result(self._step_result(seen, answer, is_last=True))
        return collected.to_trajectory(), metrics

    async def _first_answer(self, seen: EnvOutput, life: int) -> Any:
        """The answer to the last observation of the trajectory before, where there was leave for this one by then."""
        answered, self._answered = self._answered, None
        if answered is not None and answered.life == life:
            return replace(answered.answer, bootstrap_values=None)
        return await self._act(seen)

    def _counts(self, step: int) -> bool:
        """Whether what a step says of episodes is final; without auto-reset only the last one's is."""
        train = self._worker.cfg.env.train
        return bool(train.auto_reset or train.ignore_terminations) or step == self._worker.n_train_chunk_steps - 1

    async def _act(self, seen: EnvOutput) -> Any:
        """What the policy answers to an observation."""
        self._num_asked += 1
        batch = seen.to_dict()
        size = self._worker.train_num_envs_per_stage
        payload = {"obs": batch["obs"], "final_obs": batch["final_obs"]}
        request = InferenceRequest(payload, size, self.name, self._worker._source, worked_s=self._worked_s)
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
