# SPDX-License-Identifier: Apache-2.0
"""Success of the policies of `experiment=learn_metaworld` on seeds held out, beside their controls.

Gathers what `lerobot eval` left: folders with `results.json`, one for each trained policy, the first the baseline.

    lerobot eval 'checkpoint={upstream: <run>, embodix: <run>}' eval.n_episodes=40 hydra.run.dir=outputs/learned
    python benchmarks/learned_tasks.py upstream=outputs/learned/upstream embodix=outputs/learned/embodix
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from embodix.report.benchmark import require_quotable, write_benchmark
from embodix.report.evaluation import EpisodeRecord, Evaluation, pair_success, read_evaluation, success_by_task
from embodix.report.steps import read_steps
from embodix.report.words import success_words


def read_named(argument: str) -> tuple[str, Evaluation]:
    """``name=folder`` of an evaluation.

    Raises:
        ValueError: no name, or no results in the folder.
    """
    name, _, folder = argument.partition("=")
    evaluation = read_evaluation(Path(folder) / "results.json") if folder else None
    if evaluation is None:
        raise ValueError(f"An evaluation is given as name=folder, the folder with results.json; got {argument!r}.")
    return name, evaluation


def rows_of(name: str, evaluation: Evaluation) -> list[dict[str, Any]]:
    """The policy and its controls, a row each with the success of every task."""
    actors: dict[str, tuple[EpisodeRecord, ...]] = {name: evaluation.episodes}
    actors |= {f"{name}, {control}": episodes for control, episodes in evaluation.control_episodes.items()}
    return [{"actor": actor, **_by_task(episodes)} for actor, episodes in actors.items()]


def _by_task(episodes: tuple[EpisodeRecord, ...]) -> dict[str, str]:
    return {task: success_words(rate) for task, rate in success_by_task(episodes).items()}


def training_cost(evaluation: Evaluation) -> dict[str, Any]:
    """Steps and processor time of the run that trained the checkpoint."""
    checkpoint = Path(str(evaluation.details["checkpoint"]))
    run = next(folder for folder in checkpoint.parents if (folder / "steps.jsonl").is_file())
    steps = read_steps(run / "steps.jsonl")
    return {"steps": len(steps), "CPU min": round(sum(sum(step.cpu_s.values()) for step in steps) / 60, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluations", nargs="*", help="name=folder, the baseline first")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "learned_tasks")
    parser.add_argument("--allow-dirty", action="store_true")
    options = parser.parse_args()
    if not options.evaluations:
        print("Nothing to gather: train and evaluate first, then name the folders; --help says how.")
        return
    require_quotable(options.allow_dirty)
    evaluations = dict(read_named(argument) for argument in options.evaluations)
    (baseline_name, baseline), *others = evaluations.items()
    pairs = {name: pair_success(baseline, other) for name, other in others}
    result = {
        "title": "Policies of experiment=learn_metaworld on held-out seeds",
        "setting": f"seeds from {baseline.episodes[0].seed}; episodes of at most "
        f"{baseline.details['env']['episode_length']} steps; 95 % Wilson intervals",
        "success": [row for name, evaluation in evaluations.items() for row in rows_of(name, evaluation)],
        "training": [{"run": name, **training_cost(evaluation)} for name, evaluation in evaluations.items()],
        f"pairs with {baseline_name}": [{"run": name, **asdict(pair)} for name, pair in pairs.items() if pair],
    }
    write_benchmark(options.output, result, options.allow_dirty)
    print(options.output.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
