# SPDX-License-Identifier: Apache-2.0
"""The verdicts of benchmarks/rl_learning.py, from evaluations that are written here."""

import importlib.util
import sys
from pathlib import Path

import pytest

from embodix.report.evaluation import EpisodeRecord, Evaluation, SuccessRate
from embodix_rl.report.rl_steps import RlStep, append_rl_step

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rl_learning.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("rl_learning", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def _evaluation(solved, of=64):
    episodes = tuple(EpisodeRecord("task", seed, seed < solved, num_steps=10) for seed in range(of))
    outcomes = {episode.key: episode.success for episode in episodes}
    return Evaluation(SuccessRate.of(list(outcomes.values())), outcomes, {}, episodes=episodes)


def _run(benchmark, folder, runner="sync", num_steps=5, returns=tuple(range(7))):
    run = benchmark.Run("ppo", runner, folder / runner, num_steps, 2, 1e-4)
    run.folder.mkdir()
    for step in range(num_steps):
        metrics = {"env/success_once": 0.5, "env/return": float(returns[step])}
        append_rl_step(
            run.folder / "metrics.jsonl", RlStep(step, step, step + 1, 400, 400, 2, {0: 400}, False, metrics)
        )
    return run


def test_a_run_is_scored_at_what_it_saved_and_at_its_end(benchmark, tmp_path):
    run = _run(benchmark, tmp_path)
    assert run.saved_steps == [2, 4, 5]
    evaluations = {"initial": _evaluation(10), **{f"ppo_sync_{step}": _evaluation(20) for step in run.saved_steps}}
    points = benchmark.curve(run, evaluations)
    assert [point["fresh_frames"] for point in points] == [0, 800, 1600, 2000]
    assert points[0]["rate"] == 10 / 64 and points[-1]["rate"] == 20 / 64


@pytest.mark.parametrize(("solved", "verdict"), [(40, "improved"), (21, "not told apart"), (2, "worse")])
def test_improvement_is_what_a_paired_interval_says(benchmark, tmp_path, solved, verdict):
    run = _run(benchmark, tmp_path)
    row = benchmark.improvement(run, {"initial": _evaluation(20), "ppo_sync_5": _evaluation(solved)})
    assert row["verdict"] == verdict


def test_runners_agree_where_all_their_intervals_overlap(benchmark, tmp_path):
    runs = [_run(benchmark, tmp_path), _run(benchmark, tmp_path, "rl_vla3")]
    alike = {f"{run.name}_{step}": _evaluation(20) for run in runs for step in run.saved_steps}
    assert benchmark.agreement(runs, alike)["verdict"] == "intervals overlap"
    apart = benchmark.agreement(runs, {**alike, "ppo_rl_vla3_4": _evaluation(60)})
    assert apart["overlapping"] == "2 of 3" and "not" in apart["verdict"]
    assert benchmark.agreement(runs[:1], alike) is None


def test_returns_of_training_are_means_over_the_episodes_that_ended(benchmark, tmp_path):
    parts = benchmark.training_curve(_run(benchmark, tmp_path, num_steps=6), num_parts=2)
    assert [(part.begin, part.end, part.mean, part.num_episodes) for part in parts] == [
        (0, 3, 1.0, 12),
        (3, 6, 4.0, 12),
    ]
    # Means of 4 episodes that vary by 1 are episodes that vary by 4; a mean of 12 of them varies by a third.
    assert parts[0].error == pytest.approx((4 / 12) ** 0.5)
    assert parts[0].row()["success"].startswith("6/12")


@pytest.mark.parametrize(
    ("returns", "verdict"),
    [((0, 1, 2, 3, 4.1), "improved"), ((0, 5, 1, 4, 2), "not told apart"), ((4, 3, 2, 1, 0.1), "worse")],
)
def test_improvement_in_training_is_the_rise_of_the_line_through_all_versions(benchmark, tmp_path, returns, verdict):
    row = benchmark.training_improvement(_run(benchmark, tmp_path, returns=returns))
    assert row["verdict"] == verdict
    assert verdict != "improved" or row["rise"].startswith("+4.080 [")


def _part(benchmark, mean, error=0.1):
    return benchmark.TrainedEpisodes("ppo_sync", 0, 5, 100, mean, error, 50)


def test_runners_agree_in_training_where_all_their_intervals_overlap(benchmark):
    one, near, far = _part(benchmark, 1.0), _part(benchmark, 1.5), _part(benchmark, 1.6)  # half widths of .28
    assert benchmark.training_agreement([[one, one], [one, near]])["verdict"] == "intervals overlap"
    assert benchmark.training_agreement([[one, one], [one, far]])["overlapping"] == "1 of 2"
    assert benchmark.training_agreement([[one]]) is None


def test_a_part_of_a_run_is_not_taken_for_a_run(benchmark, tmp_path):
    run = _run(benchmark, tmp_path)
    longer = benchmark.Run("ppo", "sync", run.folder, 7, 2, 1e-4)
    with pytest.raises(RuntimeError, match="part of a run"):
        benchmark.train(longer, tmp_path, 1000)
