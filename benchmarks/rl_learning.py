# SPDX-License-Identifier: Apache-2.0
"""What `lerobot rl` makes of a partly trained policy: PPO and GRPO, synchronous and asynchronous, to the same frames.

A small π0.5 that `experiment=learn_metaworld` has trained for a part of its steps goes on in MetaWorld, each run in
processes of its own. Two measures: returns of the episodes that are trained on, all whole and each begun elsewhere, by
the policy with its noise, which is what PPO and GRPO improve; and success of the initial policy and of the checkpoints
in the same held-out episodes by `lerobot eval`, without noise in denoising.

    lerobot train experiment=learn_metaworld train.steps=600 train.save_freq=200 hydra.run.dir=outputs/learn_early
    python benchmarks/rl_learning.py --start outputs/learn_early/run/checkpoints/000400

A run whose folder holds all its steps is not trained again, so that a comparison can be made in several sittings.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import linregress, t

from embodix.report.benchmark import require_quotable, write_benchmark
from embodix.report.drawing import WIDTH_IN, drawing, legend
from embodix.report.evaluation import Evaluation, SuccessRate, pair_success, read_evaluation
from embodix.report.words import success_words
from embodix_rl.report.rl_steps import RlStep, rates, read_rl_steps

TASK, TOKENIZER = "button-press-topdown-v3", "data/metaworld_learn/tokenizer"
EPISODE_STEPS, EXECUTED, NUM_ENVS, EPISODES_OF_VERSION = 100, 10, 16, 32
INITIAL = "initial"
ENVIRONMENT = ["env=metaworld", f"env.task={TASK}", f"env.episode_length={EPISODE_STEPS}"]
COMMON = [
    *ENVIRONMENT,
    "policy=pi05_small",
    f"tokenizer.directory={TOKENIZER}",
    # What denoises. An epsilon above the gradients' elements makes Adam SGD with momentum: parameters without a signal
    # stay where they are. Its steps are as long as the gradient, which is not shortened.
    "trainable=[gemma_expert,action_in_proj,action_out_proj,time_mlp]",
    "optim.adam_eps=0.2",
    "optim.clip_grad=20.0",
    "optim.lr_warmup_steps=2",
    "sampler={noise_level: 1.0, stochastic_steps: all}",
    f"rollout.num_envs={NUM_ENVS}",
    f"rollout.steps={EPISODE_STEPS}",
    f"rollout.epochs={EPISODES_OF_VERSION // NUM_ENVS}",
    "rollout.auto_reset=false",
    f"rollout.chunk={EXECUTED}",
    "reward.source=progress",
    "reward.scale=0.1",
    "reward.success_bonus=1.0",
    "optim.weight_decay=0.0",
    "optim.lr_schedule=cosine",
    "optim.global_batch=160",
    "optim.micro_batch=40",
    "algorithm.update_epoch=2",
    "cluster.num_cpus=2",
    "cluster.start_timeout_s=300",
]
ALGORITHMS = {
    "ppo": [
        "algorithm=ppo",
        "algorithm.gamma=0.9",
        "algorithm.gae_lambda=0.95",
        "optim.value_lr=0.8",
        "optim.critic_warmup_steps=8",  # of the first two versions
    ],
    "grpo": ["algorithm=grpo", "rollout.group_size=8"],
}
RUNNERS = {"sync": ["runner=sync"], "rl_vla3": ["runner=rl_vla3", "rollout.stages=2"]}


@dataclass(frozen=True)
class Run:
    """One run of `lerobot rl`: its folder, and the steps after which it saves its policy."""

    algorithm: str
    runner: str
    folder: Path
    num_steps: int
    save_every: int
    learning_rate: float

    @property
    def name(self) -> str:
        return f"{self.algorithm}_{self.runner}"

    @property
    def saved_steps(self) -> list[int]:
        return sorted({*range(self.save_every, self.num_steps + 1, self.save_every), self.num_steps})

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"global_step_{step}"

    def steps(self) -> list[RlStep]:
        """Those that the folder holds."""
        file = self.folder / "metrics.jsonl"
        return read_rl_steps(file) if file.is_file() else []

    def commit(self) -> str:
        """Of the package that trained it."""
        provenance = json.loads((self.folder / "manifest.json").read_text())["provenance"]
        return str(provenance["commit"])[:12] + (" and uncommitted changes" if provenance["dirty"] else "")

    def command(self, start: Path, seed: int) -> list[str]:
        """`lerobot rl` of this run."""
        own = [
            f"checkpoint={start}",
            f"rl.seed={seed}",
            f"rl.steps={self.num_steps}",
            f"rl.save_every={self.save_every}",
            f"optim.lr={self.learning_rate}",
            f"hydra.run.dir={self.folder}",
        ]
        chosen = [*ALGORITHMS[self.algorithm], *COMMON, *RUNNERS[self.runner], *own]
        return [sys.executable, "-m", "embodix", "rl", *chosen]


def train(run: Run, start: Path, seed: int) -> None:
    """Train unless it is done.

    Raises:
        RuntimeError: the run failed; the message names its log.
    """
    if len(run.steps()) == run.num_steps:
        return
    if run.steps():
        raise RuntimeError(f"{run.folder} holds a part of a run; remove it, or give another --folder.")
    run.folder.mkdir(parents=True, exist_ok=True)
    log = run.folder / "rl.log"
    with log.open("w") as output:
        code = subprocess.run(run.command(start, seed), stdout=output, stderr=subprocess.STDOUT).returncode
    if code or len(run.steps()) != run.num_steps:
        raise RuntimeError(f"{run.name} ended with code {code} after {len(run.steps())} steps; see {log}.")


def evaluate(runs: Sequence[Run], start: Path, num_episodes: int, folder: Path) -> dict[str, Evaluation]:
    """The initial policy and every checkpoint on the same episodes, by name.

    Raises:
        RuntimeError: the evaluation failed; the message names its log.
    """
    models = {INITIAL: start} | {f"{run.name}_{step}": run.checkpoint(step) for run in runs for step in run.saved_steps}
    for name, path in models.items():
        if not (folder / name / "results.json").is_file():
            _evaluate_one(name, path, num_episodes, folder)
    found = {name: read_evaluation(folder / name / "results.json") for name in models}
    return {name: evaluation for name, evaluation in found.items() if evaluation is not None}


def _evaluate_one(name: str, model: Path, num_episodes: int, folder: Path) -> None:
    log = folder / f"{name}.log"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "embodix", "eval", f"checkpoint={model}", *ENVIRONMENT]
    command += [f"tokenizer.directory={TOKENIZER}", f"+policy.n_action_steps={EXECUTED}"]
    command += [f"eval.n_episodes={num_episodes}", f"eval.num_slots={NUM_ENVS}", "eval.num_workers=0", "eval.videos=0"]
    with log.open("w") as output:
        done = subprocess.run(
            [*command, f"hydra.run.dir={folder / name}"], stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        raise RuntimeError(f"The evaluation of {name} ended with code {done.returncode}; see {log}.")


def frames_after(run: Run, step: int) -> int:
    """Fresh frames that a checkpoint was trained on."""
    return sum(record.fresh_frames for record in run.steps()[:step])


def curve(run: Run, evaluations: Mapping[str, Evaluation]) -> list[dict[str, Any]]:
    """Success and length of held-out episodes against fresh frames."""
    points = [(0, evaluations[INITIAL])]
    points += [(frames_after(run, step), evaluations[f"{run.name}_{step}"]) for step in run.saved_steps]
    return [{"run": run.name, "fresh_frames": frames, **_point(evaluation)} for frames, evaluation in points]


def _point(evaluation: Evaluation) -> dict[str, Any]:
    lengths = [episode.num_steps or 0 for episode in evaluation.episodes]
    success = evaluation.success
    return {
        "success": success_words(success),
        "mean_steps": sum(lengths) / len(lengths),
        "rate": success.rate,
        "low": success.low,
        "high": success.high,
    }


@dataclass(frozen=True)
class TrainedEpisodes:
    """The episodes of a part of a run, with their noise: the mean of their returns and its standard error.

    The records hold a mean for each version; its variance times its number of episodes is that of one episode. Every
    environment runs one whole episode a rollout, its frames after success included.
    """

    run: str
    begin: int
    end: int
    num_episodes: int
    mean: float
    error: float
    num_solved: int

    @classmethod
    def of(cls, run: str, begin: int, steps: Sequence[RlStep]) -> TrainedEpisodes:
        """Of a run's training steps from ``begin`` on, each with the same policy throughout or nearly so."""
        counts = np.array([step.fresh_frames // EPISODE_STEPS for step in steps])
        returns, rates = (np.array([s.metrics[f"env/{name}"] for s in steps]) for name in ("return", "success_once"))
        total, mean = counts.sum(), (counts * returns).sum() / counts.sum()
        variance = (counts * (returns - mean) ** 2).sum() / (len(steps) - 1)
        solved = round(float((counts * rates).sum()))
        end = begin + len(steps)
        return cls(run, begin, end, int(total), float(mean), float(np.sqrt(variance / total)), solved)

    @property
    def half_width(self) -> float:
        """Of the mean's 95 % interval."""
        return float(t.ppf(0.975, self.end - self.begin - 1)) * self.error

    def row(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "steps": f"{self.begin} to {self.end - 1}",
            "mean_return": f"{self.mean:.3f} [{self.mean - self.half_width:.3f} to {self.mean + self.half_width:.3f}]",
            "success": success_words(SuccessRate.of([i < self.num_solved for i in range(self.num_episodes)])),
        }


def training_curve(run: Run, num_parts: int = 4) -> list[TrainedEpisodes]:
    """The parts of a run, as equal as they come."""
    steps = run.steps()
    cuts = [round(part * len(steps) / num_parts) for part in range(num_parts + 1)]
    return [TrainedEpisodes.of(run.name, begin, steps[begin:end]) for begin, end in pairwise(cuts)]


def training_improvement(run: Run) -> dict[str, Any]:
    """The rise of the line through the mean returns of all versions, from the first to the last."""
    returns = [step.metrics["env/return"] for step in run.steps()]
    line = linregress(np.linspace(0, 1, len(returns)), returns)
    half_width = float(t.ppf(0.975, len(returns) - 2)) * line.stderr
    low, high = line.slope - half_width, line.slope + half_width
    return {
        "run": run.name,
        "initial": f"{line.intercept:.3f}",
        "rise": f"{line.slope:+.3f} [{low:+.3f} to {high:+.3f}]",
        "p_value": round(float(line.pvalue), 4),
        "verdict": _verdict(low, high),
    }


def training_agreement(curves: Sequence[Sequence[TrainedEpisodes]]) -> dict[str, Any] | None:
    """Whether the intervals of two runners' returns overlap in every part."""
    if len(curves) < 2:
        return None
    first, second = curves
    overlapping = [abs(a.mean - b.mean) <= a.half_width + b.half_width for a, b in zip(first, second, strict=True)]
    return {"run": second[0].run, "over": first[0].run, **_overlap(overlapping)}


def improvement(run: Run, evaluations: Mapping[str, Evaluation]) -> dict[str, Any]:
    """The last policy against the initial one on the same episodes."""
    pair = pair_success(evaluations[INITIAL], evaluations[f"{run.name}_{run.num_steps}"])
    assert pair is not None
    return {"run": run.name, "over": INITIAL, **_difference(pair), "verdict": _verdict(pair.low, pair.high)}


def _verdict(low: float, high: float) -> str:
    """On a change whose interval is given."""
    return "improved" if low > 0 else "worse" if high < 0 else "not told apart"


def agreement(runs: Sequence[Run], evaluations: Mapping[str, Evaluation]) -> dict[str, Any] | None:
    """Whether the curves of two runners agree: their intervals at every checkpoint, and the last policies in pairs."""
    if len(runs) < 2:
        return None
    first, second = runs
    at = [[evaluations[f"{run.name}_{step}"].success for run in runs] for step in first.saved_steps]
    overlapping = [max(a.low, b.low) <= min(a.high, b.high) for a, b in at]
    last = [evaluations[f"{run.name}_{run.num_steps}"] for run in runs]
    pair = pair_success(*last)
    assert pair is not None
    return {"run": second.name, "over": first.name, **_difference(pair), **_overlap(overlapping)}


def _overlap(overlapping: Sequence[bool]) -> dict[str, str]:
    verdict = "intervals overlap" if all(overlapping) else "intervals do not overlap everywhere"
    return {"overlapping": f"{sum(overlapping)} of {len(overlapping)}", "verdict": verdict}


def _difference(pair: Any) -> dict[str, Any]:
    return {
        "difference": f"{100 * pair.difference:+.0f} points [{100 * pair.low:+.0f} to {100 * pair.high:+.0f}]",
        "p_value": round(pair.p_value, 4),
    }


def time_row(run: Run) -> dict[str, Any]:
    """How long a run took; its first step has the start of the workers in it."""
    steps = run.steps()
    rate = rates(steps, 1)
    return {
        "run": run.name,
        "fresh_frames": sum(step.fresh_frames for step in steps),
        "versions": len(steps),
        "commit": run.commit(),
        "minutes": (steps[-1].end_s - steps[0].begin_s) / 60,
        "minutes_without_the_first_step": rate.seconds / 60,
        "fresh_frames_per_s": rate.fresh_frames_per_s,
        "staleness": {str(age): round(share, 3) for age, share in rate.staleness.items()},
    }


def draw(
    runs: Sequence[Run], trained: Mapping[str, Sequence[TrainedEpisodes]], rows: Sequence[Mapping[str, Any]], path: Path
) -> None:
    """Returns of training and success of held-out episodes against fresh frames, a column for each algorithm."""
    algorithms = list(dict.fromkeys(run.algorithm for run in runs))
    with drawing({"figure.facecolor": "white", "axes.facecolor": "white"}):
        figure = Figure(figsize=(WIDTH_IN, 4.8), layout="constrained")
        panels = figure.subplots(2, len(algorithms), sharey="row", sharex="col", squeeze=False)
        for (upper, lower), algorithm in zip(panels.T, algorithms, strict=True):
            of_panel = [run for run in runs if run.algorithm == algorithm]
            for index, run in enumerate(of_panel):
                _draw_returns(upper, run, trained[run.name], index)
                _draw_success(lower, [row for row in rows if row["run"] == run.name], run.runner, index)
            lower.set(xlabel=f"fresh frames, {algorithm.upper()}", ylim=(-2, 102))
            legend(upper, len(of_panel))
        panels[0][0].set_ylabel("return in training")
        panels[1][0].set_ylabel("held-out episodes solved, %")
        figure.savefig(path, dpi=160)


def _draw_returns(axes: Axes, run: Run, parts: Sequence[TrainedEpisodes], index: int) -> None:
    middles = [(frames_after(run, part.begin) + frames_after(run, part.end)) / 2 for part in parts]
    low, high = ([part.mean + sign * part.half_width for part in parts] for sign in (-1, 1))
    _draw_curve(axes, middles, [part.mean for part in parts], low, high, run.runner, index)


def _draw_success(axes: Axes, points: Sequence[Mapping[str, Any]], label: str, index: int) -> None:
    frames = [point["fresh_frames"] for point in points]
    low, rate, high = ([100 * point[name] for point in points] for name in ("low", "rate", "high"))
    _draw_curve(axes, frames, rate, low, high, label, index)


def _draw_curve(
    axes: Axes,
    frames: Sequence[float],
    middle: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    label: str,
    index: int,
) -> None:
    axes.plot(frames, middle, "o-", color=f"C{index}", label=label, markersize=4)
    axes.fill_between(frames, low, high, color=f"C{index}", alpha=0.18, linewidth=0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, required=True, help="checkpoint to begin with")
    parser.add_argument("--algorithms", nargs="+", choices=tuple(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--runners", nargs="+", choices=tuple(RUNNERS), default=list(RUNNERS))
    parser.add_argument("--frames", type=int, default=64_000, help="action steps of all environments, of each run")
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--checkpoints", type=int, default=2, help="that are evaluated, of each run")
    parser.add_argument("--episodes", type=int, default=192, help="held-out episodes")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=Path("outputs/rl_learning"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--train-only", action="store_true", help="evaluate in another sitting")
    parser.add_argument("--allow-dirty", action="store_true")
    return parser.parse_args()


def planned_runs(arguments: argparse.Namespace) -> list[Run]:
    """Every algorithm with every runner."""
    runs = []
    for algorithm in arguments.algorithms:
        num_steps = arguments.frames // (EPISODE_STEPS * EPISODES_OF_VERSION)
        save_every = -(-num_steps // arguments.checkpoints)
        for runner in arguments.runners:
            folder = arguments.folder / f"{algorithm}_{runner}"
            runs.append(Run(algorithm, runner, folder, num_steps, save_every, arguments.learning_rate))
    return runs


def _setting(arguments: argparse.Namespace) -> str:
    return (
        f"{TASK}, at most {EPISODE_STEPS} steps, {EXECUTED} of 10 predicted steps executed; trained by `lerobot rl` "
        "from a checkpoint of experiment=learn_metaworld, of the policy what denoises, learning rate "
        f"{arguments.learning_rate} falling along a cosine, seed {arguments.seed}; {arguments.episodes} held-out "
        "episodes, without noise in denoising; 95 % intervals: Wilson's of rates, Tango's of paired differences."
    )


def main() -> None:
    arguments = parse_arguments()
    require_quotable(arguments.allow_dirty)
    runs = planned_runs(arguments)
    for run in runs:
        train(run, arguments.start, arguments.seed)
        print(time_row(run), flush=True)
    if arguments.train_only:
        return
    trained = {run.name: training_curve(run) for run in runs}
    evaluations = evaluate(runs, arguments.start, arguments.episodes, arguments.folder / "evaluation")
    rows = [row for run in runs for row in curve(run, evaluations)]
    by_algorithm = [[run for run in runs if run.algorithm == algorithm] for algorithm in arguments.algorithms]
    verdicts = {
        "improvement_in_training": [training_improvement(run) for run in runs],
        "runners_in_training": [training_agreement([trained[run.name] for run in alike]) for alike in by_algorithm],
        "improvement_held_out": [improvement(run, evaluations) for run in runs],
        "runners_held_out": [agreement(alike, evaluations) for alike in by_algorithm],
    }
    told = {name: [row for row in found if row is not None] for name, found in verdicts.items()}
    for name, found in told.items():
        print(name, *found, sep="\n  ")
    result = {
        "title": "Reinforcement learning of a partly trained π0.5-small in MetaWorld",
        "setting": _setting(arguments),
        **told,
        "training": [part.row() for parts in trained.values() for part in parts],
        "held_out": rows,
        "time": [time_row(run) for run in runs],
        "commands": {run.name: " ".join(run.command(arguments.start, arguments.seed)[1:]) for run in runs},
    }
    write_benchmark(arguments.output / "rl_learning", result, arguments.allow_dirty)
    draw(runs, trained, rows, arguments.output / "rl_learning.png")


if __name__ == "__main__":
    main()
