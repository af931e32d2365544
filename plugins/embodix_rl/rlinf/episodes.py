# SPDX-License-Identifier: Apache-2.0
"""What RLinf's environments tell of their episodes (``infos["episode"]``)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class EpisodeStatistics:
    """Return, length and success of the running episodes of B environments.

    Shape suffixes: B environments, C action steps of a chunk.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_steps = np.zeros(num_envs, np.int64)
        self._returns = np.zeros(num_envs)
        self._success = np.zeros(num_envs, bool)
        self._success_at_end = np.zeros(num_envs, bool)

    def begin(self, which_B: np.ndarray) -> None:
        """Start the episodes of some environments."""
        for values in (self.num_steps, self._returns, self._success, self._success_at_end):
            values[which_B] = 0

    def add(self, rewards_BC: np.ndarray, success_B: np.ndarray, steps_B: np.ndarray | None = None) -> None:
        """Add a chunk.

        Args:
            steps_B: action steps that were run; all of the chunk if None.
        """
        self.num_steps += rewards_BC.shape[1] if steps_B is None else steps_B
        self._returns += rewards_BC.sum(axis=1)
        self._success |= success_B
        self._success_at_end = success_B.copy()

    def tensors(self) -> dict[str, Tensor]:
        """As RLinf reads them, [B] each."""
        lengths_B = torch.from_numpy(self.num_steps.copy())
        returns_B = torch.from_numpy(self._returns.copy()).float()
        return {
            "success_once": torch.from_numpy(self._success.copy()),
            "success_at_end": torch.from_numpy(self._success_at_end.copy()),
            "return": returns_B,
            "episode_len": lengths_B,
            "reward": returns_B / lengths_B.clamp(min=1),
        }
