# SPDX-License-Identifier: Apache-2.0
"""What acts in an evaluation: a policy, the simulator's scripted expert, or a fixed sequence of actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from lerobot.envs.factory import make_env_pre_post_processors
from lerobot.envs.utils import preprocess_observation
from lerobot.utils.constants import ACTION, OBS_IMAGE, OBS_IMAGES
from torch import Tensor

from embodix.evaluation.episodes import Episode
from embodix.evaluation.noise import EpisodeNoise, episode_generator, seed_from

if TYPE_CHECKING:
    from lerobot.policies.pretrained import PreTrainedPolicy

Batch = dict[str, Any]
BLANK = 0.5  # mid-grey, of images in [0, 1]


@dataclass(frozen=True)
class Request:
    """An episode waits for actions.

    Attributes:
        slot: where it runs.
        num_steps: actions applied so far.
        instruction: what the simulator says, "" if nothing.
        observations: the latest of one gym environment, oldest first: the actor's `num_observations`, or fewer
            where the episode has not had as many.
    """

    slot: int
    episode: Episode
    num_steps: int
    instruction: str
    observations: tuple[dict[str, Any], ...]


class Actor(Protocol):
    """Attributes:
    name: what to call it in results.
    num_observations: how many of the latest observations a request must carry; with 0 nothing is rendered.
    """

    name: str
    num_observations: int

    def start(self, slot: int, episode: Episode) -> None:
        """An episode begins in a slot."""

    def act(self, requests: Sequence[Request]) -> list[np.ndarray]:
        """For each request the next actions (n, action_dim), n at least 1."""


class PolicyActor:
    """A policy of LeRobot, asked for one chunk of actions for all requests at once.

    It executes `config.n_action_steps` of each chunk. It leaves no trace in the policy: training mode and the global
    random stream are as before. Each episode has a random stream of its own, see `EpisodeNoise`.

    Args:
        policy, preprocessor, postprocessor: as LeRobot's factories make them.
        env_cfg: the environment's config, for its own processors.
        blank_images: show mid-grey instead of every image: what the policy can do without seeing.
        instruction_of: the instruction that is given for a task instead of the simulator's, for example of another
            task: what the policy can do when it is told something else.
        name: what to call it.

    Raises:
        ValueError: a policy that can't be asked for chunks; the message says why.
    """

    def __init__(
        self,
        policy: PreTrainedPolicy,
        preprocessor: Callable[[Batch], Batch],
        postprocessor: Callable[[Tensor], Tensor],
        env_cfg: Any,
        *,
        blank_images: bool = False,
        instruction_of: Callable[[str], str] | None = None,
        name: str = "policy",
    ) -> None:
        _check_supported(policy)
        self.name = name
        self.num_observations = getattr(policy.config, "n_obs_steps", 1)
        self._policy, self._preprocessor, self._postprocessor = policy, preprocessor, postprocessor
        self._env_preprocessor, self._env_postprocessor = make_env_pre_post_processors(env_cfg, policy.config)
        self._blank_images, self._instruction_of = blank_images, instruction_of
        self._generators: dict[int, torch.Generator] = {}

    def start(self, slot: int, episode: Episode) -> None:
        """Give the slot the random stream of the episode."""
        self._generators[slot] = episode_generator(episode)

    def act(self, requests: Sequence[Request]) -> list[np.ndarray]:
        """The next `n_action_steps` actions of each request, float32 (n_action_steps, action_dim)."""
        with self._evaluating(requests), torch.inference_mode():
            batches = [self._batch(requests, age) for age in reversed(range(self.num_observations))]
            with EpisodeNoise([self._generators[request.slot] for request in requests]):
                chunk_BTA = self._predict(batches)
            actions = [self._to_environment(chunk_BTA[:, step]) for step in range(chunk_BTA.shape[1])]
        return list(np.stack(actions, axis=1))

    def _batch(self, requests: Sequence[Request], age: int) -> Batch:
        """What upstream's `rollout` gives the policy, of the observations `age` steps ago (or the first)."""
        observations = [request.observations[max(-1 - age, -len(request.observations))] for request in requests]
        batch = preprocess_observation(_stack(observations))
        batch["task"] = [self._instruction(request) for request in requests]
        batch = self._env_preprocessor(batch)
        if self._blank_images:
            blank = {key: torch.full_like(value, BLANK) for key, value in batch.items() if _is_image(key)}
            batch = {**batch, **blank}
        return self._preprocessor(batch)

    def _instruction(self, request: Request) -> str:
        if self._instruction_of is None:
            return request.instruction
        return self._instruction_of(request.episode.task)

    def _predict(self, batches: Sequence[Batch]) -> Tensor:
        """Actions ``[B, n_action_steps, A]`` after the observations `batches`, oldest first."""
        policy, num_steps = self._policy, self._policy.config.n_action_steps
        policy.reset()
        if not _keeps_observations(policy):
            return policy.predict_action_chunk(batches[-1])[:, :num_steps]
        for batch in batches[:-1]:
            # With an action in its queue, the policy only takes note of the observation.
            policy._queues[ACTION].append(None)
            policy.select_action(batch)
        return torch.stack([policy.select_action(batches[-1]) for _ in range(num_steps)], dim=1)

    def _to_environment(self, action_BA: Tensor) -> np.ndarray:
        """One action of each request for its environment; one at a time, as upstream's processors expect."""
        transition = self._env_postprocessor({ACTION: self._postprocessor(action_BA)})
        action: np.ndarray = transition[ACTION].to("cpu", torch.float32).numpy()
        return action

    @contextmanager
    def _evaluating(self, requests: Sequence[Request]) -> Iterator[None]:
        """Evaluation mode and a random stream of these requests, undone at the end."""
        device = torch.device(self._policy.config.device)
        modes = [(module, module.training) for module in self._policy.modules()]
        uses_amp = getattr(self._policy.config, "use_amp", False)
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.autocast(device.type) if uses_amp else nullcontext():
            # For what the policy draws for no row in particular.
            torch.manual_seed(seed_from([(str(request.episode), request.num_steps) for request in requests]))
            self._policy.eval()
            try:
                yield
            finally:
                for module, training in modes:
                    module.training = training


class ExpertActor:
    """The simulator's scripted controller: it acts in the worker, and its score checks the simulator, not a policy."""

    num_observations = 0

    def __init__(self, name: str = "expert") -> None:
        self.name = name

    def start(self, slot: int, episode: Episode) -> None:
        """Nothing to prepare."""

    def act(self, requests: Sequence[Request]) -> list[np.ndarray]:
        """Never asked: an episode begun for the expert ends without requests."""
        raise AssertionError(f"the expert acts in the simulator, yet was asked for {len(requests)} actions")


class ReplayActor:
    """A fixed sequence of actions for each task, blind to everything; when it is over, its last action is held.

    Args:
        sequences: by task, float32 (T, action_dim).
        name: what to call it.

    Raises:
        ValueError: a sequence that is empty or not (T, action_dim).
    """

    num_observations = 0

    def __init__(self, sequences: Mapping[str, np.ndarray], name: str = "replay") -> None:
        for task, actions in sequences.items():
            if actions.ndim != 2 or not len(actions):
                raise ValueError(f"Actions to replay must be (T, action_dim), got {actions.shape} for {task!r}.")
        self.name = name
        self._sequences = dict(sequences)

    def start(self, slot: int, episode: Episode) -> None:
        """Check that there is a sequence for the episode's task.

        Raises:
            ValueError: there is none.
        """
        if episode.task not in self._sequences:
            raise ValueError(f"There are no actions to replay for {episode.task!r}, only for {list(self._sequences)}.")

    def act(self, requests: Sequence[Request]) -> list[np.ndarray]:
        """The rest of the sequence; after that its last action, as often as the sequence is long."""
        return [self._rest(self._sequences[request.episode.task], request.num_steps) for request in requests]

    @staticmethod
    def _rest(actions_TA: np.ndarray, num_steps: int) -> np.ndarray:
        rest_TA = actions_TA[num_steps:]
        return rest_TA if len(rest_TA) else np.repeat(actions_TA[-1:], len(actions_TA), axis=0)


def _check_supported(policy: PreTrainedPolicy) -> None:
    config = policy.config
    if getattr(config, "temporal_ensemble_coeff", None) is not None:
        raise ValueError(
            "Actions are executed in chunks of n_action_steps, and this policy averages overlapping chunks over time "
            f"(temporal_ensemble_coeff={config.temporal_ensemble_coeff}), which needs a prediction at every step. Set "
            "temporal_ensemble_coeff=null, with the n_action_steps you want, or use `lerobot-eval`."
        )
    rtc = getattr(config, "rtc_config", None)
    if rtc is not None and rtc.enabled:
        raise ValueError("Real-time chunking blends chunks of a running robot; set rtc_config=null to evaluate.")
    if not hasattr(config, "n_action_steps"):
        raise ValueError(f"A policy to evaluate must have n_action_steps in its config, got {type(config).__name__}.")
    if hasattr(policy, "_prev_mean"):
        raise ValueError(
            f"Policies are asked in batches whose episodes change, and {type(policy).__name__} plans from its previous "
            "plan, which it keeps for one batch of environments. Use `lerobot-eval`."
        )
    if getattr(config, "n_obs_steps", 1) > 1:
        policy.reset()
        if not _keeps_observations(policy):
            raise ValueError(
                f"{type(policy).__name__} wants n_obs_steps={config.n_obs_steps} observations and keeps none itself "
                "(in `_queues`, as LeRobot's policies do), so they can't be given to it."
            )


def _keeps_observations(policy: Any) -> bool:
    """Whether the policy, as LeRobot's diffusion does, reads observations from queues that `select_action` fills."""
    return any(key != ACTION for key in getattr(policy, "_queues", None) or {})


def _is_image(key: str) -> bool:
    return key == OBS_IMAGE or key.startswith(f"{OBS_IMAGES}.")


def _stack(observations: Sequence[Any]) -> Any:
    """Observations of single environments as one of a vector environment."""
    first = observations[0]
    if isinstance(first, Mapping):
        return {key: _stack([observation[key] for observation in observations]) for key in first}
    return np.stack(observations)
