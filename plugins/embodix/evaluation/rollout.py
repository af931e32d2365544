# SPDX-License-Identifier: Apache-2.0
"""Success of a policy in MetaWorld, run by LeRobot's own `eval_policy`, with what is needed to judge it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from lerobot.envs.factory import make_env, make_env_pre_post_processors
from lerobot.envs.utils import close_envs
from lerobot.scripts.lerobot_eval import eval_policy
from lerobot.utils.constants import OBS_IMAGES
from lerobot.utils.random_utils import set_seed

from embodix.evaluation.metaworld import EmbodixMetaworldConfig, SeededEpisode
from embodix.report.statistics import wilson_interval

if TYPE_CHECKING:
    from lerobot.policies.pretrained import PreTrainedPolicy

Batch = dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """Episodes of one task, ordered by seed. `name` says what acted: a policy or a control."""

    name: str
    task: str
    episodes: tuple[SeededEpisode, ...]

    @property
    def num_successes(self) -> int:
        return sum(episode.success for episode in self.episodes)

    @property
    def success_rate(self) -> float:
        return self.num_successes / len(self.episodes)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the success rate."""
        return wilson_interval(self.num_successes, len(self.episodes))

    def success_where_fails(self, control: "Evaluation") -> tuple[int, int]:
        """(successes, episodes) on the seeds on which a control fails: what the control cannot explain.

        Raises:
            ValueError: the control was not run on the same seeds.
        """
        if [episode.seed for episode in self.episodes] != [episode.seed for episode in control.episodes]:
            raise ValueError(f"{self.name} and {control.name} must be run on the same seeds to be compared.")
        pairs = zip(self.episodes, control.episodes, strict=True)
        remaining = [mine.success for mine, theirs in pairs if not theirs.success]
        return sum(remaining), len(remaining)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON types."""
        return {
            "name": self.name,
            "task": self.task,
            "num_successes": self.num_successes,
            "num_episodes": len(self.episodes),
            "success_rate": self.success_rate,
            "interval_95": list(self.interval),
            "episodes": [asdict(episode) for episode in self.episodes],
        }


def evaluate_policy(
    policy: "PreTrainedPolicy",
    preprocessor: Callable[[Batch], Batch],
    postprocessor: Callable[[torch.Tensor], torch.Tensor],
    env: EmbodixMetaworldConfig,
    *,
    num_episodes: int,
    start_seed: int,
    num_envs: int = 5,
    name: str = "policy",
) -> Evaluation:
    """Run a policy on the episodes of seeds `start_seed` .. `start_seed + num_episodes - 1`.

    The same seeds give the same result: the policy's own noise is seeded with `start_seed`. Frames that the policy
    never looks at, because it is executing a chunk of actions, are not rendered.

    Args:
        policy, preprocessor, postprocessor: as LeRobot's factories make them.
        env: task, cameras and episode length.
        num_envs: environments stepped together; `num_episodes` must be a multiple.
        name: what to call the result.

    Raises:
        ValueError: `num_episodes` is not a positive multiple of `num_envs`.
    """
    if num_episodes < 1 or num_episodes % num_envs:
        raise ValueError(f"num_episodes must be a positive multiple of num_envs={num_envs}, got {num_episodes}.")
    env = replace(env, render_every=getattr(policy.config, "n_action_steps", 1))
    envs = make_env(env, n_envs=num_envs)
    try:
        vector_env = envs[env.type][0]
        env_preprocessor, env_postprocessor = make_env_pre_post_processors(env, policy.config)
        set_seed(start_seed)
        with torch.no_grad():
            eval_policy(
                vector_env,
                policy,
                env_preprocessor,
                env_postprocessor,
                preprocessor,
                postprocessor,
                n_episodes=num_episodes,
                start_seed=start_seed,
            )
        episodes = [episode for single in vector_env.envs for episode in single.seeded_episodes]
    finally:
        close_envs(envs)
    return Evaluation(name, env.task, tuple(sorted(episodes, key=lambda episode: episode.seed)))


def blank_image_control(
    policy: "PreTrainedPolicy",
    preprocessor: Callable[[Batch], Batch],
    postprocessor: Callable[[torch.Tensor], torch.Tensor],
    env: EmbodixMetaworldConfig,
    *,
    num_episodes: int,
    start_seed: int,
    num_envs: int = 5,
) -> Evaluation:
    """`evaluate_policy` with every camera image replaced by mid-grey: what the policy can do without seeing."""

    def preprocess_blank(observation: Batch) -> Batch:
        blank = {
            key: torch.full_like(value, 0.5) for key, value in observation.items() if key.startswith(f"{OBS_IMAGES}.")
        }
        return preprocessor({**observation, **blank})

    evaluation = evaluate_policy(
        policy,
        preprocess_blank,
        postprocessor,
        env,
        num_episodes=num_episodes,
        start_seed=start_seed,
        num_envs=num_envs,
    )
    return replace(evaluation, name="blank images")
