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
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from embodix_rl.rlinf.extension import activate

activate("actor")  # before RLinf's modules are imported, hence the order below

import torch  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from rlinf.algorithms.registry import calculate_adv_and_returns  # noqa: E402
from rlinf.data.embodied_io_struct import Trajectory, convert_trajectories_to_batch  # noqa: E402
from rlinf.utils.nested_dict_process import put_tensor_device  # noqa: E402
from rlinf.utils.utils import reshape_entropy  # noqa: E402
from rlinf.workers.actor.fsdp_actor_worker import EmbodiedFSDPActor  # noqa: E402
from torch import Tensor  # noqa: E402

from embodix_rl.objectives.even_groups import even_groups  # noqa: E402
from embodix_rl.objectives.groups import GroupCount  # noqa: E402
from embodix_rl.objectives.objective import SampledChunks  # noqa: E402
from embodix_rl.rlinf.asynchronous.exchange import (  # noqa: E402
    TAKEN,
    ChannelReceive,
    ChannelSend,
    Masked,
    allow_many_waits,
    samples_key,
    split_weights,
    weights_key,
)
from embodix_rl.rlinf.asynchronous.queue_checkpoint import load_trajectories, save_trajectories  # noqa: E402
from embodix_rl.rlinf.asynchronous.version_update import (  # noqa: E402
    MiniBatches,
    OneStep,
    ShardSamples,
    StreamedUpdate,
    VersionUpdate,
    objective_of,
)
from embodix_rl.rlinf.run_sizes import GRPO, PPO  # noqa: E402
from embodix_rl.rlinf.workers.actor import CountingActor  # noqa: E402
from embodix_rl.scheduling.streamer import MicroBatchStreamer, OptimizerStepDue, Prepare, StreamedSample, Train, Work  # noqa: E402
from embodix_rl.scheduling.waiting import waiting  # noqa: E402
from embodix_rl.scheduling.weights import WeightMessage, WeightSender  # noqa: E402


class StreamingActor(CountingActor, EmbodiedFSDPActor):
    """One policy version a call of `train_version`, from trajectories that the driver has taken off the gate.

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
        self._build_update()

    def _build_update(self) -> None:
        algorithm: Any = OmegaConf.to_container(self.cfg.algorithm, resolve=True)
        self._samples_of, self._groups = TrajectorySamples(self.cfg), GroupCount()
        objective = objective_of(algorithm, self._settings.behaviour_cap)
        micro_batch = self.cfg.actor.micro_batch_size
        self._gradient = gradient = StreamedUpdate(self._evaluate, objective, micro_batch, self._micro_batch_context)
        self._set_warm_up()
        self._update: VersionUpdate = OneStep(gradient, self.model.parameters, self._optimizer_step)
        if not self._is_one_step():
            self._update = MiniBatches(
                gradient,
                self.model.parameters,
                self._optimizer_step,
                self._evaluate,
                micro_batch=micro_batch,
                size=self.cfg.actor.global_batch_size,
                epochs=self.update_epoch,
                seed=self.cfg.actor.seed + self._rank,  # RLinf's
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
                trajectory, shard = await self._next(taken, input_channel)
            held += await self._in_thread(self._add, trajectory, shard)
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

    async def _next(self, taken: ChannelReceive[str], input_channel: Any) -> tuple[Trajectory | Masked, str]:
        async with waiting("trainer", "driver", "a trajectory to train", self._settings.deadline_s):
            shard = await taken.receive()
        kept = self._kept[shard]
        trajectory = kept.popleft() if kept else await self._receive(input_channel, shard)
        self.consumption.received += 1
        return trajectory, shard

    async def _receive(self, input_channel: Any, shard: str) -> Trajectory | Masked:
        async with waiting("trainer", shard, "the trajectory that it delivered", self._settings.deadline_s):
            return await ChannelReceive[Trajectory | Masked](input_channel, samples_key(shard)).receive()

    async def _in_thread(self, work: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._training, work, *args)

    def _normalization(self) -> Any:
        """Advantages over a group are as they should be."""
        algorithm = self.cfg.algorithm
        is_batchwise = algorithm.adv_type == PPO and algorithm.normalize_advantages
        return self._settings.normalization if is_batchwise else "none"

    def _add(self, trajectory: Trajectory | Masked, shard: str) -> list[Work]:
        if isinstance(trajectory, Masked):
            return self._streamer.add(StreamedSample(None))
        self._num_valid += 1
        self.count_versions(trajectory.versions, fresh=True)
        samples = self._prepared(trajectory, shard)
        self._groups += samples.groups
        return self._streamer.add(StreamedSample(samples, advantages=samples.moments))

    def _prepared(self, trajectory: Trajectory, shard: str) -> ShardSamples:
        """The chunks of a trajectory, on the device."""
        samples = self._samples_of(trajectory, shard)
        parts = {"inputs": samples.inputs, "sampled": dict(vars(samples.sampled))}
        on_device = put_tensor_device(parts, self.device)
        return replace(samples, inputs=on_device["inputs"], sampled=SampledChunks(**on_device["sampled"]))

    def _do(self, work: Sequence[Work]) -> dict[str, float]:
        """Train what may be trained; the last work of a batch are its optimizer steps."""
        metrics: dict[str, float] = {}
        for one in work:
            if isinstance(one, Prepare) and not self._update.prepares:
                continue
            with self.timeline_span("train"):
                self.model.train()
                metrics |= self._work(one)
        return metrics

    def _work(self, one: Work) -> dict[str, float]:
        if isinstance(one, OptimizerStepDue):
            metrics = self._update.finish() if self._num_valid else {}  # of masked ones there is nothing to learn
            metrics |= self._groups.metrics()
            self._num_valid, self._groups = 0, GroupCount()
            self.lr_scheduler.step()
            return metrics
        for sample in one.samples:
            if sample.payload is None:  # masked
                continue
            if isinstance(one, Train):
                self._update.train(sample.payload, one.scale)
            else:
                self._update.prepare(sample.payload)
        return {}

    def _is_one_step(self) -> bool:
        train = self.cfg.env.train
        chunks = train.max_steps_per_rollout_epoch // self.cfg.actor.model.num_action_chunks
        whole = train.total_num_envs * train.rollout_epoch * chunks
        return bool(self.update_epoch == 1 and self.cfg.actor.global_batch_size == whole)

    def _optimizer_step(self) -> dict[str, float]:
        grad_norm, learning_rates = self.optimizer_step()
        self.model.zero_grad()  # the optimizer of a warm-up does not know all parameters
        self._set_warm_up()
        return {"actor/grad_norm": float(grad_norm), "actor/lr": float(learning_rates[0])}

    def _set_warm_up(self) -> None:
        self._gradient.value_only = self.optimizer_steps < self.critic_warmup_steps

    def _evaluate(self, inputs: Any) -> dict[str, Tensor | None]:
        with self.amp_context:
            outputs: dict[str, Tensor | None] = self.model(
                forward_inputs=inputs,
                compute_logprobs=True,
                compute_entropy=self.cfg.algorithm.entropy_bonus > 0,
                compute_values=self.cfg.algorithm.adv_type == PPO,
                use_cache=False,
            )
        log_probs, entropy, model = outputs["logprobs"], outputs.get("entropy"), self.cfg.actor.model
        assert log_probs is not None
        outputs["entropy"] = reshape_entropy(entropy, self.cfg.algorithm.entropy_type, model.action_dim, len(log_probs))
        return outputs

    def _micro_batch_context(self) -> AbstractContextManager[Any]:
        """As for the last micro-batch of a step: which one is the last is not known when it arrives."""
        context: AbstractContextManager[Any] = self.before_micro_batch(self.model, is_last_micro_batch=True)
        return context


class TrajectorySamples:
    """Makes chunks to train on of a shard's trajectory, with masks, advantages and returns: by RLinf's own functions,
    as its synchronous training makes them of a batch.

    A shard holds whole groups, so GRPO's comparison within a group and RLinf's filter of groups by their reward need
    no other trajectory.

    Args:
        cfg: RLinf's config.
    """

    def __init__(self, cfg: Any) -> None:
        self._cfg, self._leaves_out = cfg, cfg.embodix.rl_vla3.even_groups == "leave_out"
        one_epoch = OmegaConf.merge(cfg, {"env": {"train": {"rollout_epoch": 1}}})
        self._host = SimpleNamespace(cfg=one_epoch)  # all that RLinf's method reads of its worker

    def __call__(self, trajectory: Trajectory, shard: str) -> ShardSamples:
        """The chunks, on the CPU, with advantages that are not normalised over a batch; `shard` names their order."""
        batch = convert_trajectories_to_batch([trajectory])
        batch = EmbodiedFSDPActor._process_received_rollout_batch(self._host, batch)
        estimated = self._estimated(batch)
        steps, envs = batch["prev_logprobs"].shape[:2]
        valid, weights, counted = self._masks(batch, steps, envs)
        groups = GroupCount()
        if self._cfg.algorithm.adv_type == GRPO:
            advantages_SE, valid_SE = estimated["advantages"].reshape(steps, envs), valid.reshape(steps, envs)
            even_E, groups = even_groups(advantages_SE, valid_SE, self._cfg.algorithm.group_size)
            if self._leaves_out:
                counted = counted & ~even_E.repeat(steps)
        values, returns = batch.get("prev_values"), estimated.get("returns")
        sampled = SampledChunks(
            log_probs_BTA=batch["prev_logprobs"].flatten(0, 1),
            advantages_B=estimated["advantages"].reshape(-1),
            returns_B=None if returns is None else returns.reshape(-1),
            values_B=None if values is None or returns is None else values[:steps].reshape(-1),
            valid_B=valid,
            weights_B=weights,
        )
        inputs = {name: value.flatten(0, 1) for name, value in batch["forward_inputs"].items()}
        return ShardSamples(inputs, sampled, counted, shard, steps, groups)

    def _estimated(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        algorithm = self._cfg.algorithm
        estimated: dict[str, Tensor] = calculate_adv_and_returns(
            task_type=self._cfg.runner.task_type,
            adv_type=algorithm.adv_type,
            reward_type=algorithm.reward_type,
            rewards=batch["rewards"],
            dones=batch["dones"],
            values=batch.get("prev_values"),
            gamma=algorithm.gamma,
            gae_lambda=algorithm.gae_lambda,
            group_size=algorithm.group_size,
            loss_mask=batch.get("loss_mask"),
            loss_mask_sum=batch.get("loss_mask_sum"),
            normalize_advantages=False,
        )
        return estimated

    def _masks(self, batch: dict[str, Any], steps: int, envs: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """Which chunks are valid, the weights of their losses, and which chunks the mean is over.

        RLinf divides the losses of an episode by its share of ``max_episode_steps`` and takes the mean over all chunks,
        those after the episode's end included (``masked_mean_ratio``); where only the filter of rewards masks, the mean
        is over what it leaves.
        """
        mask, num_steps = batch.get("loss_mask"), batch.get("loss_mask_sum")
        everything = torch.ones(steps * envs, dtype=torch.bool)
        if mask is None:
            return everything, None, everything
        valid = mask.reshape(-1)
        if num_steps is None:
            return valid, None, valid
        return valid, self._cfg.env.train.max_episode_steps / num_steps.reshape(-1), everything
