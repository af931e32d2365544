# SPDX-License-Identifier: Apache-2.0
"""PPO or GRPO of a partly trained π0.5 or GR00T on one MetaWorld task, in this process, without any framework.

Episodes of one iteration start together and are trained on once they are over; there is no staleness. Score is the
share of fixed, held-out episodes that the deterministic policy solves, before and after; the curve is that of the
episodes that were sampled for training, with their noise. Time is process CPU time, simulators and rendering included.

A chunk is rewarded with the change of MetaWorld's dense reward over it, in units of its maximum, plus one for success
(``--reward shaped``), or with one for success alone (``--reward success``): the dense reward itself would pay for
staying away from the goal, where an episode ends with success.

    python benchmarks/rl_in_process.py --checkpoint outputs/learn/embodix_1000 \
        --tokenizer data/metaworld_learn/tokenizer
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from in_process_learner import (
    Transitions,
    UpdateSettings,
    explained_variance,
    generalized_advantages,
    group_advantages,
    normalised,
    update,
)
from lerobot.envs.factory import make_env_pre_post_processors
from lerobot.envs.utils import preprocess_observation
from torch import Tensor

from embodix.attention.cpu import SegmentAuto
from embodix.checkpoints.model_folder import find_model
from embodix.checkpoints.policy_loading import LoadedPolicy, PolicyChoices, loaded_policy
from embodix.contracts import StepOutcome
from embodix.packing.layout import PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix.report.benchmark import require_quotable, write_benchmark
from embodix_metaworld.environment import EmbodixMetaworldConfig
from embodix_rl.flow.chain import ChainSettings
from embodix_rl.flow.flow_policy import FlowPolicy, ValueSettings, flow_policy
from embodix_rl.objectives.objective import ObjectiveSettings, SampledChunks, ValueLossSettings

TRAIN_SEEDS, SCORE_SEEDS = 500_000, 900_000
MAX_DENSE_REWARD = 10.0


@dataclass(frozen=True)
class Episodes:
    """Episodes that were run together, ``[S, B]``; a chunk is valid until its episode is over."""

    inputs: list[dict[str, Tensor]]
    rows: list[Tensor]
    log_probs: Tensor
    values: Tensor
    rewards: Tensor
    ended: Tensor
    valid: Tensor
    last_values: Tensor
    success: Tensor
    num_frames: int

    @property
    def returns(self) -> Tensor:
        """``[B]`` sum of rewards."""
        return torch.where(self.valid, self.rewards, 0.0).sum(dim=0)


class Collector:
    """Simulators of one task and the policy that acts in them."""

    def __init__(self, env_cfg: Any, loaded: LoadedPolicy, policy: FlowPolicy, num_envs: int, reward: str) -> None:
        simulators = env_cfg.simulators()
        self._simulators = [simulators.build(simulators.tasks[0]) for _ in range(num_envs)]
        self._loaded, self._policy, self._reward = loaded, policy, reward
        self._env_preprocessor, _ = make_env_pre_post_processors(env_cfg, loaded.policy.config)
        self._num_chunks = -(-env_cfg.episode_length // policy.host.sizes.num_executed)

    def run(self, seeds: Sequence[int], mode: str, generator: torch.Generator) -> Episodes:
        """One episode for each seed, at most as many as there are simulators."""
        simulators = self._simulators[: len(seeds)]
        for simulator, seed in zip(simulators, seeds, strict=True):
            simulator.reset(seed)
        shape, num_envs = (self._num_chunks, len(seeds)), len(seeds)
        values, rewards, dense = torch.zeros(shape), torch.zeros(shape), torch.zeros(num_envs)
        ended, valid = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        success, num_frames = torch.zeros(num_envs, dtype=torch.bool), 0
        inputs, rows, log_probs = [], [], []
        for chunk in range(self._num_chunks):
            active = (~success).nonzero().flatten()
            if not active.numel():
                break
            rollout = self._policy.sample(self._batch(active), mode=mode, generator=generator)
            actions_BTA = self._to_environment(rollout.actions)
            valid[chunk, active] = True
            if rollout.values is not None:
                values[chunk, active] = rollout.values
            for place, index in enumerate(active.tolist()):
                outcomes = execute(simulators[index], actions_BTA[place])
                solved, reached = outcomes[-1].success, outcomes[-1].reward
                before = outcomes[0].reward if chunk == 0 else dense[index]
                rewards[chunk, index] = float(solved)
                if self._reward == "shaped":
                    rewards[chunk, index] += (reached - before) / MAX_DENSE_REWARD
                dense[index], success[index], ended[chunk, index] = reached, solved, solved
                num_frames += len(outcomes)
            inputs.append(rollout.forward_inputs)
            rows.append(chunk * num_envs + active)
            log_probs.append(rollout.log_probs)
        left = (~success).nonzero().flatten()
        last_values = torch.zeros(num_envs)
        if mode == "train" and left.numel() and self._policy.value_head is not None:
            last_values[left] = self._policy.sample(self._batch(left), mode="eval", generator=generator).values
        drawn = torch.cat(log_probs) if mode == "train" else torch.zeros(0)
        return Episodes(inputs, rows, drawn, values, rewards, ended, valid, last_values, success, num_frames)

    def _batch(self, active: Tensor) -> dict[str, Any]:
        simulators = [self._simulators[index] for index in active.tolist()]
        seen = [simulator.observe() for simulator in simulators]
        pixels = {name: np.stack([one["pixels"][name] for one in seen]) for name in seen[0]["pixels"]}
        observation = {"pixels": pixels, "agent_pos": np.stack([one["agent_pos"] for one in seen])}
        batch = preprocess_observation(observation)
        batch["task"] = [simulator.instruction for simulator in simulators]
        return self._loaded.preprocessor(self._env_preprocessor(batch))

    def _to_environment(self, actions_BTA: Tensor) -> np.ndarray:
        num_executed = self._policy.host.sizes.num_executed
        steps = [self._loaded.postprocessor(actions_BTA[:, step]) for step in range(num_executed)]
        return torch.stack(steps, dim=1).numpy()


def execute(simulator: Any, actions_TA: np.ndarray) -> list[StepOutcome]:
    """The outcomes of a chunk, up to the end of the episode."""
    outcomes = []
    for action in actions_TA:
        outcomes.append(simulator.step(action))
        if outcomes[-1].done:
            break
    return outcomes


@dataclass(frozen=True)
class Recipe:
    """What is varied."""

    algorithm: str
    reward: str
    noise_level: float
    learning_rate: float
    value_learning_rate: float
    epochs: int
    global_batch: int
    warm_up: int
    group_size: int
    discount: float
    gae_lambda: float


class Trainer:
    """Advantages and updates of one recipe."""

    def __init__(self, policy: FlowPolicy, recipe: Recipe) -> None:
        self.policy, self.recipe, self.version = policy, recipe, 0
        groups = [{"params": [one for one in policy.policy.parameters() if one.requires_grad]}]
        if policy.value_head is not None:
            groups.append({"params": list(policy.value_head.parameters()), "lr": recipe.value_learning_rate})
        self.optimizer = torch.optim.AdamW(groups, recipe.learning_rate, weight_decay=0.0)
        value = ValueLossSettings() if policy.value_head is not None else None
        self.objective = ObjectiveSettings(value=value)
        self.settings = UpdateSettings(recipe.epochs, recipe.global_batch, micro_batch=64)
        self.generator = torch.Generator().manual_seed(1)

    def train(self, episodes: Episodes, groups_B: Tensor) -> dict[str, float]:
        """One update with all chunks of these episodes."""
        order = torch.cat(episodes.rows)
        returns, advantages = self._advantages(episodes, groups_B)
        chosen = [part.flatten()[order] for part in (advantages, returns, episodes.values)]
        warming = self.version < self.recipe.warm_up
        if warming:
            chosen[0] = torch.zeros_like(chosen[0])
        ones = torch.ones(order.shape, dtype=torch.bool)
        # Nothing is stale: the policy that sampled is the proximal one.
        sampled = SampledChunks(episodes.log_probs, chosen[0], ones, chosen[1], chosen[2], episodes.log_probs)
        metrics = update(
            self.policy,
            self.optimizer,
            self.policy.host.concatenate(episodes.inputs),
            sampled,
            self.objective,
            self.settings,
            self.generator,
        )
        self.version += 1
        return {"explained_variance": explained_variance(chosen[2], chosen[1]), **metrics}

    def _advantages(self, episodes: Episodes, groups_B: Tensor) -> tuple[Tensor, Tensor]:
        valid, recipe = episodes.valid, self.recipe
        if recipe.algorithm == "grpo":
            everyone = torch.ones(groups_B.shape, dtype=torch.bool)
            advantages_B = group_advantages(episodes.returns, groups_B, everyone)
            return torch.zeros_like(episodes.rewards), advantages_B.expand_as(valid)
        following = torch.cat([episodes.values[1:], episodes.last_values[None]])
        last = torch.zeros_like(valid)
        last[-1] = ~episodes.success & valid[-1]
        steps = Transitions(episodes.rewards, episodes.values, following, episodes.ended, last, valid)
        advantages, returns = generalized_advantages(steps, recipe.discount, recipe.gae_lambda)
        return returns, normalised(advantages, valid)


def score(collector: Collector, first_seed: int, num_episodes: int, num_envs: int) -> dict[str, float]:
    """Success and return of the deterministic policy on some episodes, each with the same noise every time."""
    runs = []
    for start in range(0, num_episodes, num_envs):
        seeds = range(first_seed + start, first_seed + min(start + num_envs, num_episodes))
        runs.append(collector.run(seeds, "eval", torch.Generator().manual_seed(start)))
    success, returns = torch.cat([run.success for run in runs]), torch.cat([run.returns for run in runs])
    return {"solved": int(success.sum()), "of": num_episodes, "mean_return": round(returns.mean().item(), 4)}


def scores(collector: Collector, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """On held-out starts, and on those of training where they are few."""
    first = {"held_out": SCORE_SEEDS}
    if arguments.starts <= arguments.score_episodes:
        first["of_training"] = TRAIN_SEEDS + 10_000 * arguments.seed
    numbers = {"held_out": arguments.score_episodes, "of_training": arguments.starts}
    return {name: score(collector, seed, numbers[name], arguments.num_envs) for name, seed in first.items()}


def train(collector: Collector, trainer: Trainer, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The curve: one row an iteration."""
    curve, frames, group = [], 0, trainer.recipe.group_size
    generator = torch.Generator().manual_seed(arguments.seed)
    for iteration in range(arguments.iterations):
        started = time.process_time()
        num_groups = arguments.num_envs // group
        groups_B = torch.arange(num_groups).repeat_interleave(group)
        starts_B = (iteration * num_groups + groups_B) % arguments.starts
        seeds_B = TRAIN_SEEDS + 10_000 * arguments.seed + starts_B
        episodes = collector.run(seeds_B.tolist(), "train", generator)
        sampled = time.process_time()
        metrics = trainer.train(episodes, groups_B)
        frames += episodes.num_frames
        curve.append(
            {
                "iteration": iteration,
                "frames": frames,
                "success": episodes.success.float().mean().item(),
                "mean_return": round(episodes.returns.mean().item(), 4),
                "rollout_s": round(sampled - started, 1),
                "train_s": round(time.process_time() - sampled, 1),
                **{name: round(value, 4) for name, value in metrics.items()},
            }
        )
        if arguments.verbose:
            print(curve[-1], flush=True)
    return curve


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--tokenizer")
    parser.add_argument("--task", default="reach-v3")
    parser.add_argument("--algorithm", choices=("ppo", "grpo"), default="ppo")
    parser.add_argument("--reward", choices=("shaped", "success"), default="shaped")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=4, help="episodes of one start; GRPO only")
    parser.add_argument("--starts", type=int, default=10_000, help="different starts to train on, again and again")
    parser.add_argument("--executed", type=int, default=10, help="action steps of a chunk that are executed")
    parser.add_argument("--episode-length", type=int, default=150)
    parser.add_argument("--expert-only", action="store_true", help="π0.5: freeze vision and language")
    parser.add_argument("--noise-level", type=float, default=0.5)
    parser.add_argument("--transition", choices=("flow_sde", "flow_cps"), default="flow_sde")
    parser.add_argument("--candidates", type=int, nargs="*", help="denoising steps that may be stochastic")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--value-learning-rate", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=2, help="iterations that train the value head alone; PPO only")
    parser.add_argument("--discount", type=float, default=0.95)
    parser.add_argument("--gae-lambda", type=float, default=0.95)
    parser.add_argument("--score-episodes", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--allow-dirty", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    recipe = Recipe(**{item.name: getattr(arguments, item.name) for item in fields(Recipe)})
    return replace(recipe, group_size=1) if recipe.algorithm == "ppo" else replace(recipe, warm_up=0)


def main() -> None:
    arguments = parse_arguments()
    require_quotable(arguments.allow_dirty)
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    recipe = recipe_of(arguments)
    env_cfg = EmbodixMetaworldConfig(task=arguments.task, episode_length=arguments.episode_length)
    changes = {"n_action_steps": arguments.executed, "train_expert_only": arguments.expert_only or None}
    choices = PolicyChoices(tokenizer=arguments.tokenizer, policy=changes)
    started = time.process_time()
    with loaded_policy(find_model(arguments.checkpoint), env_cfg, choices) as loaded:
        candidates = tuple(arguments.candidates) if arguments.candidates else None
        chain = ChainSettings(arguments.transition, recipe.noise_level, candidate_steps=candidates)
        value = ValueSettings() if recipe.algorithm == "ppo" else None
        settings = FastPathSettings(PaddingFreePacker(), SegmentAuto())
        policy = flow_policy(loaded.policy, settings, chain, value)
        collector = Collector(env_cfg, loaded, policy, arguments.num_envs, recipe.reward)
        before = scores(collector, arguments)
        if arguments.verbose:
            print("before", before, flush=True)
        curve = train(collector, Trainer(policy, recipe), arguments)
        after = scores(collector, arguments)
    result = {
        "title": f"{recipe.algorithm.upper()} on {arguments.task}, in one process",
        "setting": {
            **asdict(chain),
            **asdict(recipe),
            "num_envs": arguments.num_envs,
            "executed": arguments.executed,
            "expert_only": arguments.expert_only,
            "starts": arguments.starts,
        },
        "before": before,
        "after": after,
        "cpu_s": round(time.process_time() - started, 1),
        "curve": curve,
    }
    print("before", before, "after", after, "cpu_s", result["cpu_s"])
    write_benchmark(arguments.output / f"rl_in_process_{recipe.algorithm}", result, arguments.allow_dirty)


if __name__ == "__main__":
    main()
