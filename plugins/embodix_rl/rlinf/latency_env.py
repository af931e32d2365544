# SPDX-License-Identifier: Apache-2.0
"""RLinf's environment interface with declared times: nothing is simulated.

Shape suffixes: B environments, C action steps of a chunk, A action dimensions, S state components.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodix_rl.latency import Durations, spend
from embodix_rl.rlinf.rollout_episodes import EpisodeStatistics


class LatencyEnv:
    """A rank's environments, whose chunk steps and resets take as long as declared.

    The reward is that of a simple task, so that training has something to do: 1 for each action step whose first
    component is within 0.5 of the first component of the state.

    Args:
        cfg: RLinf's ``env.train`` or ``env.eval``; its ``embodix`` holds ``state_dim``, ``step_s`` and ``reset_s``
            (durations of a chunk step and of a reset of the whole rank), ``step_s_per_env`` (seconds added for each
            environment of the rank) and ``seed``; for studies of faults also ``crash_every_steps`` (chunk steps after
            which this process kills itself) and ``hang_every_steps`` (after which a step never ends).
        num_envs: environments of this rank and stage.
        seed_offset: number of the rank and stage, which decides its draws.
        total_num_processes: ranks times stages.
        worker_info: RLinf's; not used.
    """

    def __init__(
        self, cfg: Any, num_envs: int, seed_offset: int, total_num_processes: int, worker_info: Any = None
    ) -> None:
        declared = cfg.embodix
        self.cfg, self.num_envs, self.is_start = cfg, num_envs, True
        self._state_dim, self._max_steps = int(declared.state_dim), int(cfg.max_episode_steps)
        self._auto_reset, self._ignore_terminations = bool(cfg.auto_reset), bool(cfg.ignore_terminations)
        self._per_env_s = float(declared.step_s_per_env)
        self._crash_every, self._hang_every = declared.get("crash_every_steps"), declared.get("hang_every_steps")
        self._num_chunk_steps = 0
        self._place, self._life = seed_offset, 0
        self._draw_from_streams()
        self._statistics = EpisodeStatistics(num_envs)
        self._states_BS = self._draw_states()

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin all episodes."""
        spend(self._reset_s.draw())
        self._statistics.begin(np.ones(self.num_envs, bool))
        self._states_BS = self._draw_states()
        self.is_start = False
        return self._observation(), {}

    def chunk_step(self, chunk_actions: Any) -> tuple[list[Any], Tensor, Tensor, Tensor, list[Any]]:
        """Run a chunk [B, C, A]; rewards, terminations and truncations are [B, C]."""
        begun = time.perf_counter()
        self._fail_where_declared()
        actions_BCA = torch.as_tensor(np.asarray(chunk_actions), dtype=torch.float32)
        rewards_BC = ((actions_BCA[..., 0] - self._states_BS[:, :1]).abs() < 0.5).float()
        num_steps = rewards_BC.shape[1]
        self._statistics.add(rewards_BC.numpy(), np.zeros(self.num_envs, bool))
        self._states_BS = self._draw_states()
        truncations_BC = torch.zeros(self.num_envs, num_steps, dtype=torch.bool)
        truncations_BC[:, -1] = torch.from_numpy(self._statistics.num_steps >= self._max_steps)
        spend(self._step_s.draw() + self._per_env_s * self.num_envs, begun)
        observation, infos = self._observation(), {"episode": self._statistics.tensors()}
        if self._auto_reset and bool(truncations_BC.any()):
            observation, infos = self._begin_again(truncations_BC[:, -1].numpy(), observation, infos)
        return [observation], rewards_BC, torch.zeros_like(truncations_BC), truncations_BC, [infos]

    def update_reset_state_ids(self) -> None:
        """Every reset draws new states."""

    def progress(self) -> int:
        """For `go_on` of an environment that is made in place of this one."""
        return self._life

    def go_on(self, progress: int) -> None:
        """Draw other numbers than the environment that was at `progress`."""
        self._life = progress + 1
        self._draw_from_streams()
        self._states_BS = self._draw_states()

    def _draw_from_streams(self) -> None:
        declared = self.cfg.embodix
        seed = (int(declared.seed), self._place, *((self._life,) if self._life else ()))
        self._step_s = durations_of(declared.step_s).stream((*seed, 0))
        self._reset_s = durations_of(declared.reset_s).stream((*seed, 1))
        self._states = np.random.default_rng([*seed, 2])

    def _fail_where_declared(self) -> None:
        self._num_chunk_steps += 1
        if self._crash_every and self._num_chunk_steps % self._crash_every == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        while self._hang_every and self._num_chunk_steps % self._hang_every == 0:
            time.sleep(1.0)

    def _begin_again(self, done_B: np.ndarray, last: dict[str, Any], infos: dict[str, Any]) -> tuple[Any, Any]:
        spend(self._reset_s.draw())
        self._statistics.begin(done_B)
        self._states_BS = self._draw_states()
        again = {"final_observation": last, "final_info": infos, "_final_observation": done_B, "_final_info": done_B}
        return self._observation(), {**again, "episode": infos["episode"]}

    def _observation(self) -> dict[str, Any]:
        return {"states": self._states_BS.clone(), "task_descriptions": ["match the state"] * self.num_envs}

    def _draw_states(self) -> Tensor:
        group_size = int(self.cfg.group_size)  # environments of a group see the same
        drawn = self._states.standard_normal((self.num_envs // group_size, self._state_dim), dtype=np.float32)
        return torch.from_numpy(drawn.repeat(group_size, axis=0))


def durations_of(settings: Any) -> Durations:
    """Durations from a config node or a number."""
    from omegaconf import DictConfig, OmegaConf

    if isinstance(settings, DictConfig):
        plain: Any = OmegaConf.to_container(settings, resolve=True)
        return Durations.of(plain)
    return Durations.of(settings)
