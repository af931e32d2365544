# SPDX-License-Identifier: Apache-2.0
"""What a simulated run has to do: declared times of its parts, none of them measured."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """Declared times. The defaults have the proportions of RL-VLA3's runs on LIBERO with π0 on 8 GPUs.

    Environments of a worker are stepped by as many cores as the worker has, so stepping a part of them takes that part
    of the time. Inference of a batch takes ``fixed + slope * environments``.

    Attributes:
        num_env_workers: processes that step environments.
        num_envs: environments of each.
        chunk: environment frames of one chunk step.
        num_steps: chunk steps of a trajectory.
        trajectories_per_batch: of each environment in one global batch (rollout epochs).
        chunk_step_s: a chunk step of all environments, one after the other: stepping and inference together.
        env_share, inference_share: of `chunk_step_s`.
        train_share: training of a global batch, of its rollout's serial time.
        fixed_share: of the inference of all environments at once, the part that does not depend on their number.
        prepare_share: of training, what needs no normalised advantages.
        weights_s: sending one policy version.
        message_s: the way of a message between two processes.
        sigma: of lognormal stragglers: each step of a shard takes its time times a factor of mean 1.
        seed: of the stragglers.

    Raises:
        ValueError: a share out of range.
    """

    num_env_workers: int = 4
    num_envs: int = 48
    chunk: int = 10
    num_steps: int = 12
    trajectories_per_batch: int = 4
    chunk_step_s: float = 1.0
    env_share: float = 0.54
    inference_share: float = 0.46
    train_share: float = 0.41
    fixed_share: float = 0.05
    prepare_share: float = 0.25
    weights_s: float = 0.2
    message_s: float = 0.002
    sigma: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("fixed_share", "prepare_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` is a share, got {getattr(self, name)}.")

    @property
    def steps_per_batch(self) -> int:
        """Chunk steps of each environment in a global batch."""
        return self.num_steps * self.trajectories_per_batch

    @property
    def env_s(self) -> float:
        """Mean seconds of a chunk step of all environments of a worker."""
        return self.chunk_step_s * self.env_share

    @property
    def train_s(self) -> float:
        """Seconds of training of a global batch."""
        return self.train_share * self.chunk_step_s * self.steps_per_batch

    @property
    def frames_per_batch(self) -> int:
        return self.num_env_workers * self.num_envs * self.chunk * self.steps_per_batch

    def inference_s(self, num_envs: int) -> float:
        """Seconds of inference for so many environments."""
        everything = self.num_env_workers * self.num_envs
        share = self.fixed_share + (1 - self.fixed_share) * num_envs / everything
        return self.chunk_step_s * self.inference_share * share

    def bound_s(self) -> float:
        """Seconds a global batch that no schedule can beat: the longest of its parts, each done at its best."""
        inference_s = self.inference_s(self.num_env_workers * self.num_envs)
        return max(self.env_s * self.steps_per_batch, inference_s * self.steps_per_batch, self.train_s)

    def serial_s(self) -> float:
        """Seconds a global batch of the synchronous schedule without stragglers, messages and weight exchange."""
        inference_s = self.inference_s(self.num_env_workers * self.num_envs)
        return (self.env_s + inference_s) * self.steps_per_batch + self.train_s

    def step_times(self, worker: int, shard: int, num_shards: int) -> StepTimes:
        """Of one shard of a worker's environments."""
        return StepTimes(self.env_s / num_shards, self.sigma, f"{self.seed} {worker} {shard}")


class StepTimes:
    """Draws the seconds of one step after the other."""

    def __init__(self, mean_s: float, sigma: float, seed: str) -> None:
        self._mean_s, self._sigma, self._draws = mean_s, sigma, random.Random(seed)

    def __call__(self) -> float:
        if not self._sigma:
            return self._mean_s
        return self._mean_s * self._draws.lognormvariate(-self._sigma * self._sigma / 2, self._sigma)
