# SPDX-License-Identifier: Apache-2.0
"""The driver of ``runner=rl_vla3``: RLinf's runner for set-up, metrics and checkpoints, the conductor for the run."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

from rlinf.runners.embodied_runner import EmbodiedRunner
from rlinf.scheduler import Channel
from rlinf.utils.metric_utils import compute_evaluate_metrics

from embodix_rl.rlinf.asynchronous.components import DriverComponent, Evaluations, WorkersComponent, answer_of, finished
from embodix_rl.rlinf.asynchronous.exchange import EVENTS, TAKEN, ChannelReceive, ChannelSend, Event, tickets_key
from embodix_rl.rlinf.asynchronous.gate_service import GateService, RestartBudget
from embodix_rl.rlinf.asynchronous.queue_checkpoint import SavedGate, read_gate, whole_checkpoint, write_gate
from embodix_rl.rlinf.asynchronous.rl_vla3 import AsyncSettings
from embodix_rl.rlinf.hosts import WorkerFailedError
from embodix_rl.rlinf.rlinf_config import CHECKPOINT_PREFIX
from embodix_rl.scheduling.conductor import Conductor, RunFailedError
from embodix_rl.scheduling.protocol import Deadlines, RunProtocol, RunStage
from embodix_rl.scheduling.staleness import GateSettings, StalenessGate, Ticket

CUT_S = 15.0  # for workers to answer when the run has failed
SAVE_S = 300.0  # for the checkpoint of a run that has failed
STAGES = [
    RunStage(("gate",)),
    RunStage(("trainer",), ends_run=True),
    RunStage(("rollout workers",)),
    RunStage(("env workers",), may_end=True),
]


class AsynchronousRunner(EmbodiedRunner):  # type: ignore[misc]
    """Generation and training at once, paced by the staleness gate."""

    def __init__(self, cfg: Any, actor: Any, rollout: Any, env: Any) -> None:
        super().__init__(cfg, actor, rollout, env)
        self._settings = AsyncSettings(**cfg.embodix.rl_vla3)
        self._event_channel = Channel.create("Events")
        self._began_s = time.time()
        self._masked_frames = 0  # of the batch that is trained
        self._num_shards = cfg.rollout.pipeline_stage_num * len(env.worker_info_list)
        train = cfg.env.train
        self._frames_of_trajectory = train.total_num_envs // self._num_shards * train.max_steps_per_rollout_epoch

    def run(self) -> None:
        """Train to the last step.

        Raises:
            WorkerFailedError: a process failed, or a wait reached its deadline; the message names who waited for whom.
        """
        self._began_s, begun = time.time(), signal.getsignal(signal.SIGUSR1)
        # RLinf's signal of a failed worker would break into the event loop; failed calls say the same (`finished`).
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        try:
            if self.global_step < self.max_steps:
                asyncio.run(self._run())
        except RunFailedError as error:
            raise WorkerFailedError(f"{error}\n{self._save_what_there_is()}") from error
        finally:
            signal.signal(signal.SIGUSR1, begun)
        self._finish_run()

    async def _run(self) -> None:
        cfg, settings = self.cfg, self._settings
        gate_settings = GateSettings(
            self._num_shards * cfg.env.train.rollout_epoch,
            settings.bound,
            settings.queue_depth,
            num_batches=self.max_steps - self.global_step,
            first_version=self.global_step,
        )
        self._gate = StalenessGate(gate_settings, settings.deadline_s)
        self._service = GateService(
            self._gate,
            ChannelReceive[Event](self._event_channel, EVENTS),
            lambda shard: ChannelSend[Ticket | None](self.env_channel, tickets_key(shard)),
            RestartBudget(settings.restarts_per_hour if settings.isolate_simulators else 0),
        )
        self._restore_gate()
        deadlines = Deadlines(settings.deadline_s, settings.deadline_s, CUT_S)
        protocol = RunProtocol(STAGES, deadlines, self.global_step)
        self._conductor = Conductor(protocol, self._components())
        await self._conductor.run()

    def _components(self) -> dict[str, Any]:
        first = self.global_step
        return {
            "gate": DriverComponent(self._service.run),
            "trainer": DriverComponent(self._train, self._begin_training, ends_alone=True),
            "rollout workers": WorkersComponent(
                "rollout workers",
                lambda: self.rollout.prepare(self.rollout_channel, self._event_channel, first),
                lambda: self.rollout.generate(self.rollout_channel, self.env_channel),
                self.rollout.stop,
            ),
            "env workers": WorkersComponent(
                "env workers",
                None if self._resumed is None else self._go_on_with_episodes,
                lambda: self.env.interact(
                    self.env_channel, self.rollout_channel, self.actor_channel, self._event_channel
                ),
                self.env.stop,
                ends_alone=True,
            ),
        }

    async def _begin_training(self) -> None:
        size = self._gate.settings.batch_size
        await finished(self.actor.begin(self.rollout_channel, size, self.global_step), "trainer")
        if self._resumed is not None:
            await finished(self.actor.load_finished(self.cfg.runner.resume_dir), "trainer")

    async def _train(self) -> None:
        self._evaluations = Evaluations(
            lambda: self.env.evaluate(self.env_channel, self.rollout_channel),
            compute_evaluate_metrics,
            self.metric_logger.log,
            self.cfg.runner.val_check_interval,
            self.max_steps,
        )
        try:
            while not self._gate.is_over:
                await self._train_version()
            await self._evaluations.finish()
        finally:
            self._evaluations.cancel()
        await finished(self.actor.finish_sending(), "trainer")

    async def _train_version(self) -> None:
        """One global batch: what the gate gives is trained as it comes."""
        step = self.global_step
        training = asyncio.ensure_future(finished(self.actor.train_version(self.actor_channel), "trainer"))
        try:
            await self._hand_over(training)
            metrics = (await training)[0]
        finally:
            training.cancel()
        self.global_step += 1
        await self._gate.advance(self.global_step)
        self._conductor.advanced(self.global_step)
        offered = finished(self.actor.offer_weights(self.global_step), "trainer")
        self._log(step, metrics)
        await offered
        self._evaluations.ask(step)
        if self._is_checkpoint_due():
            await self._save_everything()

    async def _hand_over(self, training: asyncio.Future[Any]) -> None:
        """Take a batch off the gate, unless training fails before."""
        taken = ChannelSend[str](self.actor_channel, TAKEN)
        batch = self._gate.filling
        while self._gate.filling == batch:
            taking = asyncio.ensure_future(self._gate.take())
            await asyncio.wait({taking, training}, return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                taking.cancel()
                return  # to its failure
            finished_one = taking.result()
            self._masked_frames += 0 if finished_one.valid else self._frames_of_trajectory
            await taken.send(finished_one.payload)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        """As RLinf's runners do; ages are in versions."""
        counts = self._gate.counts
        gate = {"gate/admitted": counts.admitted, "gate/finished": counts.finished, "gate/taken": counts.taken}
        gate["gate/restored"] = len(self._resumed.shards) if self._resumed is not None else 0
        faults = {"faults/restarts": self._service.pop_restarts(), "faults/masked_frames": self._masked_frames}
        self._masked_frames = 0
        train = {f"train/{name}": value for name, value in metrics.items()}
        own = {name: float(value) for name, value in {**gate, **faults}.items()}
        logged = {**train, **self._service.pop_metrics(), **own}
        self.metric_logger.log(logged, step)
        self.print_metrics_table_async(step, self.max_steps, self._began_s, logged)

    def _is_checkpoint_due(self) -> bool:
        every, is_last = self.cfg.runner.save_interval, self.global_step == self.max_steps
        return every > 0 and (is_last or self.global_step % every == 0)

    def _folder(self) -> Path:
        return Path(self.cfg.runner.logger.log_path) / "checkpoints" / f"{CHECKPOINT_PREFIX}{self.global_step}"

    async def _save_everything(self) -> None:
        """A checkpoint between two batches. What finishes meanwhile counts as under way: it is generated anew."""
        saved = SavedGate(self._gate.state(), dict(self.cfg.embodix.queue_sizes), [])
        with whole_checkpoint(self._folder()) as folder:
            await finished(self.actor.save_finished(self.actor_channel, saved.shards, str(folder)), "trainer")
            (folder / "actor").mkdir()
            await finished(self.actor.save_checkpoint(str(folder / "actor"), self.global_step), "trainer")
            saved.episodes.extend(await finished(self.env.progress(), "env workers"))
            write_gate(folder, saved)

    def _restore_gate(self) -> None:
        resumed = self.cfg.runner.resume_dir
        self._resumed = None if resumed is None else read_gate(Path(resumed))
        if self._resumed is not None:
            self._gate.restore(self._resumed.state)

    def _go_on_with_episodes(self) -> Any:
        assert self._resumed is not None
        return self.env.go_on(self._resumed.episodes)

    def _save_what_there_is(self) -> str:
        """A checkpoint of a run that has failed, without its queue; says what became of it."""
        trained = answer_of(self.actor.num_trained(), CUT_S)
        if trained is None:
            return "No checkpoint: the training process does not answer."
        (self.global_step,) = trained
        if self._folder().exists():
            return f"Its last checkpoint is {self._folder()}."
        try:
            with whole_checkpoint(self._folder()) as folder:
                (folder / "actor").mkdir()
                if answer_of(self.actor.save_checkpoint(str(folder / "actor"), self.global_step), SAVE_S) is None:
                    raise WorkerFailedError(f"No checkpoint: it was not written within {SAVE_S:g} s.")
        except (OSError, WorkerFailedError) as error:
            return str(error)
        return f"Checkpoint: {self._folder()}; `resume=` goes on from it."
