# SPDX-License-Identifier: Apache-2.0
"""RLinf's training worker that takes each trajectory once and sends each policy version beside training.

Shape suffixes: S chunk steps, B environments, N chunks (S times B), T action steps, A action dimensions.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from embodix.rl.rlinf.extension import activate

activate("actor")  # before RLinf's modules are imported, hence the order below

import torch  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from rlinf.algorithms.registry import calculate_adv_and_returns  # noqa: E402
from rlinf.data.embodied_io_struct import Trajectory, convert_trajectories_to_batch  # noqa: E402
from rlinf.utils.metric_utils import compute_loss_mask  # noqa: E402
from rlinf.utils.nested_dict_process import put_tensor_device  # noqa: E402
from rlinf.workers.actor.fsdp_actor_worker import EmbodiedFSDPActor  # noqa: E402
from torch import Tensor  # noqa: E402

from embodix.rl.objectives.objective import Sampled  # noqa: E402
from embodix.rl.rlinf.asynchronous.exchange import (  # noqa: E402
    TAKEN,
    ChannelReceive,
    ChannelSend,
    Masked,
    allow_many_waits,
    samples_key,
    weights_key,
)
from embodix.rl.rlinf.asynchronous.queue_checkpoint import load_trajectories, save_trajectories  # noqa: E402
from embodix.rl.rlinf.asynchronous.update import ShardSamples, StreamedUpdate, objective_of  # noqa: E402
from embodix.rl.rlinf.asynchronous.weight_parts import split_weights  # noqa: E402
from embodix.rl.rlinf.workers.actor import CountingActor  # noqa: E402
from embodix.rl.scheduling.streamer import MicroBatchStreamer, Sample, Step, Train, Work  # noqa: E402
from embodix.rl.scheduling.waiting import waiting  # noqa: E402
from embodix.rl.scheduling.weights import WeightMessage, WeightSender  # noqa: E402


class StreamingActor(CountingActor, EmbodiedFSDPActor):
    """One optimizer step a call of `train_version`, from trajectories that the driver has taken off the gate.

    Training runs in a thread of its own, so that weights leave and trajectories arrive meanwhile.
    """

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self._settings = cfg.embodix.rl_vla3
        self._training = ThreadPoolExecutor(1, thread_name_prefix="training")
        self._num_valid = 0  # trajectories of the batch that is filled
        self._num_trained = 0  # versions
        self._kept: defaultdict[str, deque[Trajectory | Masked]] = defaultdict(deque)  # received for a checkpoint

    def init_worker(self) -> None:
        super().init_worker()
        algorithm: Any = OmegaConf.to_container(self.cfg.algorithm, resolve=True)
        self._update = StreamedUpdate(
            self._evaluate,
            objective_of(algorithm, self._settings.behaviour_cap),
            self.cfg.actor.micro_batch_size,
            self._micro_batch_context,
        )

    async def begin(self, rollout_channel: Any, num_samples: int, version: int) -> None:
        """Send weights from now on, `version` first; a batch has `num_samples` trajectories."""
        allow_many_waits()
        ranks = self._rollout_all_ranks
        channels = [ChannelSend[WeightMessage](rollout_channel, weights_key(rank)) for rank in ranks]
        self._sender = WeightSender(channels, list(self.get_model_state_dict(cpu_offload=True, full_state_dict=True)))
        self._sending = asyncio.ensure_future(self._sender.run())
        self._streamer = MicroBatchStreamer(num_samples, 1, normalization=self._normalization())
        self._num_trained = version
        self.offer_weights(version)

    def offer_weights(self, version: int) -> None:
        """The weights are those of `version` now; have them sent."""
        if self._sending.done():
            self._sending.result()  # raises what ended it
        self.set_global_step(version)
        with self.timeline_span("weights"):
            weights = self.get_model_state_dict(cpu_offload=True, full_state_dict=True)
            self._sender.offer(version, split_weights(weights, self._settings.part_bytes))

    async def train_version(self, input_channel: Any) -> dict[str, float]:
        """Train the trajectories that are taken, and step; returns metrics."""
        taken = ChannelReceive[str](input_channel, TAKEN)
        metrics: dict[str, float] = {}
        held: list[Work] = []
        for _ in range(self._streamer.missing):
            with self.timeline_span("wait"):
                trajectory = await self._next(taken, input_channel)
            held += await self._in_thread(self._add, trajectory)
            if self._settings.streaming:
                metrics |= await self._in_thread(self._do, held)
                held = []
        metrics |= await self._in_thread(self._do, held)
        self._num_trained += 1
        return metrics

    async def num_trained(self) -> int:
        """The version that the weights are of, when nothing is being computed."""
        await self._in_thread(int)
        return self._num_trained

    async def save_finished(self, input_channel: Any, shards: list[str], folder: str) -> None:
        """Write to a checkpoint what `shards` have delivered and nobody has taken, in this order."""
        for shard, number in Counter(shards).items():
            while len(self._kept[shard]) < number:
                self._kept[shard].append(await self._receive(input_channel, shard))
        read: Counter[str] = Counter()
        finished: list[tuple[str, Trajectory | None]] = []
        for shard in shards:
            trajectory = self._kept[shard][read[shard]]
            finished.append((shard, None if isinstance(trajectory, Masked) else trajectory))
            read[shard] += 1
        await self._in_thread(save_trajectories, Path(folder), finished, self._streamer.state())

    async def load_finished(self, folder: str) -> None:
        """Have what `save_finished` wrote, after `begin`."""
        finished, streamer = load_trajectories(Path(folder), Trajectory)
        self._streamer.restore(streamer)
        for shard, trajectory in finished:
            self._kept[shard].append(Masked() if trajectory is None else trajectory)

    async def finish_sending(self) -> None:
        """End when what was offered is sent."""
        self._sender.close()
        await self._sending

    async def _next(self, taken: ChannelReceive[str], input_channel: Any) -> Trajectory | Masked:
        async with waiting("trainer", "driver", "a trajectory to train", self._settings.deadline_s):
            shard = await taken.receive()
        kept = self._kept[shard]
        trajectory = kept.popleft() if kept else await self._receive(input_channel, shard)
        self.consumption.received += 1
        return trajectory

    async def _receive(self, input_channel: Any, shard: str) -> Trajectory | Masked:
        async with waiting("trainer", shard, "the trajectory that it delivered", self._settings.deadline_s):
            return await ChannelReceive[Trajectory | Masked](input_channel, samples_key(shard)).receive()

    async def _in_thread(self, work: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._training, work, *args)

    def _normalization(self) -> Any:
        return self._settings.normalization if self.cfg.algorithm.normalize_advantages else "none"

    def _add(self, trajectory: Trajectory | Masked) -> list[Work]:
        if isinstance(trajectory, Masked):
            return self._streamer.add(Sample(None))
        self._num_valid += 1
        self.count_versions(trajectory.versions, fresh=True)
        samples = self._prepared(trajectory)
        return self._streamer.add(Sample(samples, advantages=samples.moments))

    def _prepared(self, trajectory: Trajectory) -> ShardSamples:
        """Advantages and returns of a trajectory, by RLinf's function, on the device."""
        batch = convert_trajectories_to_batch([trajectory])
        algorithm = self.cfg.algorithm
        mask = None
        if not (self.cfg.env.train.auto_reset or self.cfg.env.train.ignore_terminations):
            mask = compute_loss_mask(batch["dones"])[0].any(dim=-1, keepdim=True)
        estimated = calculate_adv_and_returns(
            task_type=self.cfg.runner.task_type,
            adv_type=algorithm.adv_type,
            reward_type=algorithm.reward_type,
            rewards=batch["rewards"],
            dones=batch["dones"],
            values=batch["prev_values"],
            gamma=algorithm.gamma,
            gae_lambda=algorithm.gae_lambda,
            group_size=algorithm.group_size,
            loss_mask=mask,
            loss_mask_sum=None,
            normalize_advantages=False,
        )
        steps, envs = batch["prev_logprobs"].shape[:2]
        valid = torch.ones(steps, envs, dtype=torch.bool) if mask is None else mask
        sampled = {
            "log_probs_BTA": batch["prev_logprobs"].flatten(0, 1),
            "advantages_B": estimated["advantages"].reshape(-1),
            "returns_B": estimated["returns"].reshape(-1),
            "values_B": batch["prev_values"][:steps].reshape(-1),
            "valid_B": valid.reshape(-1),
            "versions_B": batch["versions"].flatten(0, 1).flatten(1)[:, 0].round().long(),
        }
        inputs = {name: value.flatten(0, 1) for name, value in batch["forward_inputs"].items()}
        on_device = put_tensor_device({"inputs": inputs, "sampled": sampled}, self.device)
        return ShardSamples(on_device["inputs"], Sampled(**on_device["sampled"]))

    def _do(self, work: Sequence[Work]) -> dict[str, float]:
        """Train what may be trained; the last work of a batch is its optimizer step."""
        metrics: dict[str, float] = {}
        for one in work:
            if isinstance(one, Train):
                with self.timeline_span("train"):
                    self.model.train()
                    for sample in (each for each in one.samples if each.payload is not None):  # None is masked
                        self._update.train(sample.payload, one.scale, int(self.version))
            elif isinstance(one, Step):
                metrics = self._step(one)
        return metrics

    def _step(self, step: Step) -> dict[str, float]:
        if not self._num_valid:  # of masked ones there is nothing to learn
            self.lr_scheduler.step()
            return {}
        self._num_valid = 0
        with self.timeline_span("train"):
            metrics = self._update.finish(self.model.parameters(), step.num_valid)
            grad_norm, learning_rates = self.optimizer_step()
            self.lr_scheduler.step()
            self.optimizer.zero_grad()
        return {**metrics, "actor/grad_norm": float(grad_norm), "actor/lr": float(learning_rates[0])}

    def _evaluate(self, inputs: Any) -> dict[str, Tensor | None]:
        with self.amp_context:
            outputs: dict[str, Tensor | None] = self.model(
                forward_inputs=inputs,
                compute_logprobs=True,
                compute_entropy=self.cfg.algorithm.entropy_bonus > 0,
                compute_values=self.cfg.algorithm.adv_type == "gae",
                use_cache=False,
            )
        return outputs

    def _micro_batch_context(self) -> AbstractContextManager[Any]:
        """As for the last micro-batch of a step: which one is the last is not known when it arrives."""
        context: AbstractContextManager[Any] = self.before_micro_batch(self.model, is_last_micro_batch=True)
        return context
