# SPDX-License-Identifier: Apache-2.0
"""A trajectory as the chunks to train on, by RLinf's own functions: what its synchronous training makes of a batch.

Shape suffixes: S chunk steps, B environments, N chunks (S times B), T action steps, A action dimensions.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from rlinf.algorithms.registry import calculate_adv_and_returns
from rlinf.data.embodied_io_struct import Trajectory, convert_trajectories_to_batch
from rlinf.workers.actor.fsdp_actor_worker import EmbodiedFSDPActor
from torch import Tensor

from embodix_rl.objectives.objective import SampledChunks
from embodix_rl.rlinf.asynchronous.version_update import ShardSamples


class TrajectorySamples:
    """Computes masks, advantages and returns of one trajectory of a shard.

    A shard holds whole groups, so GRPO's comparison within a group and RLinf's filter of groups by their reward need
    no other trajectory.

    Args:
        cfg: RLinf's config.
    """

    def __init__(self, cfg: Any) -> None:
        self._cfg = cfg
        one_epoch = OmegaConf.merge(cfg, {"env": {"train": {"rollout_epoch": 1}}})
        self._host = SimpleNamespace(cfg=one_epoch)  # all that RLinf's method reads of its worker

    def __call__(self, trajectory: Trajectory, shard: str) -> ShardSamples:
        """The chunks, on the CPU, with advantages that are not normalised over a batch; `shard` names their order."""
        batch = convert_trajectories_to_batch([trajectory])
        batch = EmbodiedFSDPActor._process_received_rollout_batch(self._host, batch)
        estimated = self._estimated(batch)
        steps, envs = batch["prev_logprobs"].shape[:2]
        valid, weights, counted = self._masks(batch, steps, envs)
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
        return ShardSamples(inputs, sampled, counted, shard, steps)

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
