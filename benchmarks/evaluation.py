# SPDX-License-Identifier: Apache-2.0
"""One checkpoint on four MetaWorld tasks: upstream's evaluation against the evaluation engine, on the same cores.

Upstream is ``eval_policy_all``, what ``lerobot-eval`` runs, with one vector environment a task (its synchronous one:
the asynchronous one has no instructions), without videos. Both get the same policy object, which computes as upstream
does, the same seeds, cameras and number of executed actions. Times are wall-clock and CPU time of this process and
its workers, the start of workers included; runs alternate.

    python benchmarks/evaluation.py --checkpoint outputs/.../my_run
    python benchmarks/evaluation.py                       # records and trains a small policy for 100 steps first
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hydra.utils import instantiate
from lerobot.envs.factory import make_env, make_env_pre_post_processors
from lerobot.envs.utils import close_envs
from lerobot.scripts.lerobot_eval import eval_policy_all
from lerobot.utils.random_utils import set_seed
from omegaconf import OmegaConf

from embodix.checkpoints.model_folder import find_model
from embodix.checkpoints.policy_loading import LoadedPolicy, PolicyChoices, loaded_policy
from embodix.config.compose import compose
from embodix.evaluation.actors import PolicyActor
from embodix.evaluation.engine import EngineSettings, run_episodes
from embodix.evaluation.episodes import Episode, plan_episodes
from embodix.evaluation.noise import EpisodeNoise, episode_generator
from embodix.report.benchmark import require_quotable, write_benchmark
from embodix.simulation.rendering import select_gl_backend
from embodix.simulation.simulators import simulators_of
from embodix.training.run import run_training
from embodix_metaworld.environment import EmbodixMetaworldConfig
from embodix_metaworld.recorder import record_metaworld
from embodix_metaworld.simulator import MetaWorldScene

TASKS = ("reach-v3", "drawer-close-v3", "button-press-topdown-v3", "coffee-button-v3")
NUM_EXECUTED = 5  # actions of each chunk
FIRST_SEED = 70_000
UPSTREAM, ENGINE = "upstream", "engine"
SPARSE, ALONE = "upstream, frames between chunks not rendered", "engine in one process"
PACKED = "engine, packed computation"


@dataclass(frozen=True)
class Outcome:
    """Of one episode."""

    success: bool
    num_steps: int


@dataclass(frozen=True)
class Measured:
    """One evaluation of all episodes."""

    wall_s: float
    cpu_s: float
    outcomes: dict[Episode, Outcome]


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measured(evaluate: Callable[[], dict[Episode, Outcome]]) -> Measured:
    wall, cpu = time.perf_counter(), cpu_seconds()
    outcomes = evaluate()
    return Measured(time.perf_counter() - wall, cpu_seconds() - cpu, outcomes)


def by_upstream(
    loaded: LoadedPolicy, env: EmbodixMetaworldConfig, episodes: Sequence[Episode], own_noise: bool
) -> dict[Episode, Outcome]:
    """Upstream's evaluation of all tasks, a task's episodes in one vector environment.

    Args:
        own_noise: draw the policy's noise from each episode's stream, as the engine does, instead of from one for all.
    """
    seeds = sorted({episode.seed for episode in episodes})
    outcomes: dict[Episode, Outcome] = {}
    for task in dict.fromkeys(episode.task for episode in episodes):
        envs = make_env(replace(env, task=task), n_envs=len(seeds))
        try:
            (vector_env,) = envs[env.type].values()
            generators = [episode_generator(Episode(task, seed)) for seed in seeds]
            set_seed(FIRST_SEED)
            with torch.no_grad(), EpisodeNoise(generators) if own_noise else contextlib.nullcontext():
                eval_policy_all(
                    envs,
                    loaded.policy,
                    *make_env_pre_post_processors(env, loaded.policy.config),
                    loaded.preprocessor,
                    loaded.postprocessor,
                    n_episodes=len(seeds),
                    start_seed=seeds[0],
                )
            for single in vector_env.envs:
                for episode in single.seeded_episodes:
                    outcomes[Episode(task, episode.seed)] = Outcome(episode.success, episode.num_steps)
        finally:
            close_envs(envs)
    return outcomes


def by_engine(
    loaded: LoadedPolicy, env: EmbodixMetaworldConfig, episodes: Sequence[Episode], settings: EngineSettings
) -> dict[Episode, Outcome]:
    actor = PolicyActor(loaded.policy, loaded.preprocessor, loaded.postprocessor, env)
    results = run_episodes(simulators_of(env), actor, episodes, settings)
    return {result.episode: Outcome(result.success, result.num_steps) for result in results}


@contextlib.contextmanager
def counting(method: str) -> Iterator[list[int]]:
    """Count the calls of a method of the scene in this process."""
    calls, original = [0], getattr(MetaWorldScene, method)

    def counting_call(self: MetaWorldScene, *arguments: Any) -> Any:
        calls[0] += 1
        return original(self, *arguments)

    with mock.patch.object(MetaWorldScene, method, counting_call):
        yield calls


def counted(evaluate: Callable[[], dict[Episode, Outcome]]) -> tuple[Measured, dict[str, int]]:
    """An evaluation in this process with its simulated steps and rendered observations."""
    with counting("step") as steps, counting("render") as renders:
        run = measured(evaluate)
    return run, {"simulated steps": steps[0], "rendered observations": renders[0]}


def agreement(left: dict[Episode, Outcome], right: dict[Episode, Outcome]) -> str:
    same = sum(left[episode].success == right[episode].success for episode in left)
    equal = sum(left[episode] == right[episode] for episode in left)
    return f"{same} of {len(left)} in success, {equal} in success and length"


def train_small(folder: Path, tasks: Sequence[str]) -> Path:
    """A run of 100 steps on ten demonstrations of each task; made once."""
    run = folder / "run"
    if (run / "checkpoints" / "last").exists():
        return run
    fields: Any = OmegaConf.to_container(compose("data", ["data=metaworld"]), resolve=True)
    del fields["source"]
    fields |= {"root": str(folder / "recording"), "tasks": list(tasks), "episodes_per_task": 10, "episodes": {}}
    root = record_metaworld(instantiate(fields, _convert_="all")).root
    overrides = ["experiment=demo", f"dataset.root={root}", "dataset.episodes=null", "train.steps=100"]
    overrides.append(f"train.output_dir={run}")
    return run_training(compose("train", overrides), overrides).output_dir


def measure(options: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    env = EmbodixMetaworldConfig(task=",".join(options.tasks))
    episodes = plan_episodes(options.tasks, options.episodes, FIRST_SEED)
    choices = {
        "upstream's computation": PolicyChoices(("+plugin=none",), {"n_action_steps": NUM_EXECUTED}),
        "packed computation": PolicyChoices(("+plugin=embodix",), {"n_action_steps": NUM_EXECUTED}),
    }
    settings = EngineSettings(num_workers=options.workers, num_slots=options.slots)
    alone = replace(settings, num_workers=0)
    sparse = replace(env, render_every=NUM_EXECUTED)
    with loaded_policy(find_model(str(checkpoint)), env, choices["upstream's computation"]) as loaded:
        repeated = alternate(
            {
                UPSTREAM: lambda: by_upstream(loaded, env, episodes, own_noise=False),
                ENGINE: lambda: by_engine(loaded, env, episodes, settings),
            },
            options.repetitions,
        )
        steps = {SPARSE: measured(lambda: by_upstream(loaded, sparse, episodes, own_noise=False))}
        steps[ALONE], engine_work = counted(lambda: by_engine(loaded, env, episodes, alone))
        given_noise, upstream_work = counted(lambda: by_upstream(loaded, env, episodes, own_noise=True))
    with loaded_policy(find_model(str(checkpoint)), env, choices["packed computation"]) as packed:
        steps[PACKED] = measured(lambda: by_engine(packed, env, episodes, settings))
    work = [{"evaluation": UPSTREAM, **upstream_work}, {"evaluation": ALONE, **engine_work}]
    return {**summary(repeated, steps, episodes), "work": work, **agreements(repeated, steps, given_noise.outcomes)}


def alternate(runs: dict[str, Callable[[], dict[Episode, Outcome]]], repetitions: int) -> dict[str, list[Measured]]:
    """Every run so often, in turns A B B A."""
    results: dict[str, list[Measured]] = {name: [] for name in runs}
    for repetition in range(repetitions):
        for name in sorted(runs, reverse=repetition % 2 == 0):
            results[name].append(measured(runs[name]))
            print(name, f"{results[name][-1].wall_s:.1f} s", flush=True)
    return results


def summary(
    repeated: dict[str, list[Measured]], steps: dict[str, Measured], episodes: Sequence[Episode]
) -> dict[str, Any]:
    """The ratio, and the runs between upstream and the engine that say where it comes from."""
    pairs = list(zip(repeated[UPSTREAM], repeated[ENGINE], strict=True))
    wall = [slow.wall_s / fast.wall_s for slow, fast in pairs]
    baseline = statistics.median(run.wall_s for run in repeated[UPSTREAM])
    everything = repeated | {name: [run] for name, run in steps.items()}
    return {
        "ratio": {
            "wall time, upstream over engine": statistics.median(wall),
            "of each pair": wall,
            "CPU time, upstream over engine": statistics.median(slow.cpu_s / fast.cpu_s for slow, fast in pairs),
            "wanted": 2.0,
        },
        "runs": [
            {
                "evaluation": name,
                "wall s": statistics.median(run.wall_s for run in everything[name]),
                "CPU s": statistics.median(run.cpu_s for run in everything[name]),
                "upstream's wall time over it": baseline / statistics.median(run.wall_s for run in everything[name]),
                "success": f"{sum(o.success for o in everything[name][0].outcomes.values())}/{len(episodes)}",
                "repetitions": len(everything[name]),
            }
            for name in (UPSTREAM, SPARSE, ALONE, ENGINE, PACKED)
        ],
    }


def agreements(
    repeated: dict[str, list[Measured]], steps: dict[str, Measured], given_noise: dict[Episode, Outcome]
) -> dict[str, Any]:
    """Whether the same episodes end alike."""
    upstream, engine = (repeated[name][0].outcomes for name in (UPSTREAM, ENGINE))
    return {
        "agreement_by_episode": {
            "engine with workers and in one process": agreement(engine, steps[ALONE].outcomes),
            "engine and upstream, upstream given each episode's own noise": agreement(engine, given_noise),
            "engine and upstream, upstream with one stream of noise": agreement(engine, upstream),
            "upstream with one stream and with each episode's own noise": agreement(upstream, given_noise),
            "upstream with and without frames between chunks": agreement(upstream, steps[SPARSE].outcomes),
            "engine with packed and with upstream's computation": agreement(engine, steps[PACKED].outcomes),
        }
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="run or checkpoint folder; none: train one for 100 steps")
    parser.add_argument("--tasks", nargs=len(TASKS), default=TASKS, help="four MetaWorld tasks")
    parser.add_argument("--episodes", type=int, default=10, help="of each task")
    parser.add_argument("--repetitions", type=int, default=2, help="of the two evaluations that are compared")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the policy's computation")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--allow-dirty", action="store_true", help="measure uncommitted code; marks the result")
    options = parser.parse_args()
    require_quotable(options.allow_dirty)
    torch.set_num_threads(options.threads)
    select_gl_backend()
    checkpoint = options.checkpoint or train_small(Path("outputs/benchmarks/evaluation"), options.tasks)
    result = {
        "title": "Evaluation of one checkpoint on four MetaWorld tasks",
        "what": f"{options.episodes} episodes of each of {', '.join(options.tasks)} (seeds from {FIRST_SEED}), two "
        f"cameras of 56 pixels, {NUM_EXECUTED} actions executed of each chunk, {options.threads} threads for the "
        f"policy in both. Upstream: eval_policy_all, {options.episodes} environments a task, no videos. Engine: "
        f"{options.slots} slots in 2 groups, {options.workers} worker processes, whose start is part of the time.",
        **measure(options, checkpoint),
    }
    for path in write_benchmark(options.output / "evaluation", result, options.allow_dirty):
        print(path)


if __name__ == "__main__":
    main()
