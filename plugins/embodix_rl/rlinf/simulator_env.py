# SPDX-License-Identifier: Apache-2.0
"""RLinf's environment interface on the simulators of any LeRobot environment config.

Shape suffixes: B environments, C action steps of a chunk, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodix.contracts import Simulators, StepOutcome
from embodix_rl.rlinf.observations import cameras_of, to_host
from embodix_rl.rlinf.rollout_episodes import EpisodeSeeds, EpisodeStatistics


class SimulatorEnv:
    """A rank's simulators, stepped one after the other in this process.

    An episode ends with the simulator's `done` or after ``max_episode_steps``. Actions of a chunk after that are not
    executed; their reward is 0. With ``auto_reset`` the next episode begins at once, and the last observation and the
    statistics of the finished one are in ``infos`` as RLinf expects them.

    Args:
        cfg: RLinf's ``env.train`` or ``env.eval``; its ``embodix`` holds LeRobot's environment config (``env``), the
            ``reward`` and the ``seed`` of the first episode.
        num_envs: environments of this rank and stage.
        seed_offset: number of the rank and stage.
        total_num_processes: ranks times stages.
        worker_info: RLinf's; not used.
        simulators: instead of those of ``cfg.embodix.env``.
    """

    def __init__(
        self,
        cfg: Any,
        num_envs: int,
        seed_offset: int,
        total_num_processes: int,
        worker_info: Any = None,
        simulators: Simulators | None = None,
    ) -> None:
        self.cfg, self.num_envs, self.is_start = cfg, num_envs, True
        self._reward = RewardRule(**cfg.embodix.reward)
        self._max_steps = int(cfg.max_episode_steps)
        self.seeds = EpisodeSeeds(
            int(cfg.embodix.seed), num_envs, int(cfg.group_size), seed_offset, total_num_processes
        )
        simulators = simulators if simulators is not None else _configured(cfg.embodix.env)
        tasks = simulators.tasks
        self.simulators = [simulators.build(tasks[self.seeds.group(env) % len(tasks)]) for env in range(num_envs)]
        self._processor = _environment_processor(simulators.env_cfg)
        self.statistics = EpisodeStatistics(num_envs)
        self._done_B = np.zeros(num_envs, bool)
        self._earned: list[float | None] = [None] * num_envs  # the simulator's reward of the step before
        self._seen: list[Mapping[str, Any]] = [{}] * num_envs

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin all episodes."""
        self._begin(np.ones(self.num_envs, bool))
        self.is_start = False
        return self._observation(), {}

    def chunk_step(self, chunk_actions: Any) -> tuple[list[Any], Tensor, Tensor, Tensor, list[Any]]:
        """Run a chunk [B, C, A]; rewards, terminations and truncations are [B, C]."""
        actions_BCA = np.asarray(chunk_actions, np.float32)
        shape = actions_BCA.shape[:2]
        rewards_BC, terminated_BC, truncated_BC = (
            np.zeros(shape, np.float32),
            np.zeros(shape, bool),
            np.zeros(shape, bool),
        )
        steps_B, success_B = np.zeros(self.num_envs, np.int64), np.zeros(self.num_envs, bool)
        for env in range(self.num_envs):
            steps_B[env], success_B[env] = self._run_chunk(
                env, actions_BCA[env], rewards_BC[env], terminated_BC[env], truncated_BC[env]
            )
        self.statistics.add(rewards_BC, success_B, steps_B)
        done_B = (terminated_BC | truncated_BC).any(axis=1)
        observation, infos = self._observation(), {"episode": self.statistics.tensors()}
        if self.cfg.auto_reset and done_B.any():
            observation, infos = self._begin_again(done_B, observation, infos)
        if self.cfg.auto_reset or self.cfg.ignore_terminations:
            terminated_BC, truncated_BC = _at_the_end(terminated_BC), _at_the_end(truncated_BC)
        flags = (torch.from_numpy(terminated_BC), torch.from_numpy(truncated_BC))
        return [observation], torch.from_numpy(rewards_BC), *flags, [infos]

    def update_reset_state_ids(self) -> None:
        """RLinf's call at the end of a rollout."""
        if self.cfg.use_fixed_reset_state_ids:
            self.seeds.restart()

    def progress(self) -> list[int]:
        """Episodes that each environment has begun, for `go_on` of one that is made in place of this one."""
        return self.seeds.num_begun

    def go_on(self, progress: list[int]) -> None:
        """Begin other episodes than those that were begun at `progress`, and than the next one: it may have failed."""
        self.seeds.skip([num + 1 for num in progress])

    def close(self) -> None:
        """Free the simulators."""
        for simulator in self.simulators:
            simulator.close()

    def _run_chunk(
        self, env: int, actions_CA: np.ndarray, rewards_C: np.ndarray, terminated_C: np.ndarray, truncated_C: np.ndarray
    ) -> tuple[int, bool]:
        """Run one environment until its chunk or its episode ends, filling its rows; returns steps and success."""
        if self._done_B[env]:  # without auto-reset: RLinf masks what follows the first end
            terminated_C[:] = True
            return 0, False
        simulator, begun = self.simulators[env], int(self.statistics.num_steps[env])
        success = False
        for step, action_A in enumerate(actions_CA):
            outcome = simulator.step(action_A)
            success |= outcome.success
            rewards_C[step] = self._reward.of(outcome, self._earned[env])
            self._earned[env] = outcome.reward
            over = begun + step + 1 >= self._max_steps
            ended = outcome.done and not (self.cfg.ignore_terminations and outcome.success and not over)
            if ended or over:
                self._done_B[env] = True
                terminated_C[step], truncated_C[step] = outcome.success, not outcome.success
                break
        self._seen[env] = simulator.observe()
        return step + 1, success

    def _begin(self, which_B: np.ndarray) -> None:
        self.statistics.begin(which_B)
        self._done_B[which_B] = False
        for env in np.flatnonzero(which_B):
            self.simulators[env].reset(self.seeds.next(int(env)))
            self._earned[env] = None
            self._seen[env] = self.simulators[env].observe()

    def _begin_again(self, done_B: np.ndarray, last: dict[str, Any], infos: dict[str, Any]) -> tuple[Any, Any]:
        self._begin(done_B)
        again = {"final_observation": last, "final_info": infos, "_final_observation": done_B, "_final_info": done_B}
        return self._observation(), {**again, "episode": infos["episode"]}

    def _observation(self) -> dict[str, Any]:
        from lerobot.envs.utils import preprocess_observation

        processed = self._processor(preprocess_observation(_stacked(self._seen)))
        return to_host(processed, cameras_of(processed), [simulator.instruction for simulator in self.simulators])


class RewardRule:
    """``embodix_rl.schema.RewardSettings`` applied to an outcome."""

    def __init__(self, source: str, scale: float, step_cost: float, success_bonus: float) -> None:
        self._source, self._scale, self._step_cost, self._bonus = source, scale, step_cost, success_bonus

    def of(self, outcome: StepOutcome, before: float | None) -> float:
        """The reward of an action; `before` is the simulator's reward of the step before, None at the first."""
        if self._source == "success":
            earned = float(outcome.success)
        elif self._source == "progress":
            earned = 0.0 if before is None else outcome.reward - before
        else:
            earned = outcome.reward
        return self._scale * earned + self._bonus * outcome.success - self._step_cost


def _at_the_end(flags_BC: np.ndarray) -> np.ndarray:
    """What happened within a chunk, told in its last column, as RLinf's own environments do."""
    told = np.zeros_like(flags_BC)
    told[:, -1] = flags_BC.any(axis=1)
    return told


def _stacked(observations: list[Any]) -> Any:
    """One observation of all environments."""
    first = observations[0]
    if isinstance(first, Mapping):
        return {key: _stacked([observation[key] for observation in observations]) for key in first}
    return np.stack(observations)


def _configured(env: Any) -> Simulators:
    from omegaconf import OmegaConf

    from embodix.simulation.simulators import simulators_of
    from embodix.training.host_config import decode_env

    node: Any = OmegaConf.to_container(env, resolve=True)
    return simulators_of(decode_env(node))


def _environment_processor(env_cfg: Any) -> Any:
    """What LeRobot does to an environment's observations before any policy's own steps."""
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.envs.factory import make_env_pre_post_processors

    any_policy: Any = PreTrainedConfig
    return make_env_pre_post_processors(env_cfg, any_policy)[0]
