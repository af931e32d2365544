# SPDX-License-Identifier: Apache-2.0
"""Success in simulation: the records of evaluations, their files, intervals, controls and pairing.

A success rate alone says little: a fixed action sequence may solve a task that resets to almost the same state.
Every evaluation therefore carries its controls, and two policies are compared on the same episodes.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embodix.report.manifest import collect_provenance, write_text_atomically
from embodix.report.statistics import mcnemar_p_value, paired_difference_interval, wilson_interval
from embodix.report.steps import append_line, read_lines

RESULTS_FILE, EPISODES_FILE, EVALUATIONS_FILE = "results.json", "episodes.jsonl", "evaluations.jsonl"
CONTROLS = {
    "blind": "blind control: a fixed action sequence that never looks",
    "blank_image": "blank-image control: the same policy with every camera blanked",
    "wrong_prompt": "wrong-prompt control: the same policy told to do another task",
    "expert": "scripted expert: a controller that reads the simulator's state, a check of the simulator",
}


@dataclass(frozen=True)
class SuccessRate:
    """Successes of a number of episodes, with the 95 % Wilson interval."""

    num_success: int
    num_episodes: int
    rate: float
    low: float
    high: float

    @classmethod
    def of(cls, outcomes: Sequence[bool]) -> SuccessRate:
        num_success, num_episodes = sum(outcomes), len(outcomes)
        return cls(num_success, num_episodes, num_success / num_episodes, *wilson_interval(num_success, num_episodes))


@dataclass(frozen=True)
class EpisodeRecord:
    """One episode as a file keeps it; what an older file does not tell is None.

    Attributes:
        num_steps: until success, or until the limit.
        sum_reward, max_reward: over these steps; None where a reward was not finite, too.
        num_repeats: how often it was begun again because its simulator died.
        video: path relative to the file.
        instruction: what the simulator's task says; the results name it once a task.
    """

    task: str
    seed: int
    success: bool
    num_steps: int | None = None
    sum_reward: float | None = None
    max_reward: float | None = None
    num_repeats: int = 0
    video: str | None = None
    instruction: str = ""

    @property
    def key(self) -> tuple[str, int]:
        return self.task, self.seed


@dataclass(frozen=True)
class Evaluation:
    """One policy in the simulator.

    Attributes:
        success: over all episodes.
        outcomes: (task, seed) -> solved, for pairing.
        by_task: success of each task.
        controls: success of each control that was run, by its name in ``CONTROLS``.
        videos: recorded episodes, relative to the file.
        name: what acted.
        episodes: every episode, in the order of the file.
        control_episodes: those of each control.
        details: the rest of the file: checkpoint, environment, settings, provenance, times, instructions.
    """

    success: SuccessRate
    outcomes: dict[tuple[str, int], bool]
    by_task: dict[str, SuccessRate]
    controls: dict[str, SuccessRate] = field(default_factory=dict)
    videos: list[str] = field(default_factory=list)
    name: str = "policy"
    episodes: tuple[EpisodeRecord, ...] = ()
    control_episodes: dict[str, tuple[EpisodeRecord, ...]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def success_where_fails(self, control: str) -> SuccessRate | None:
        """Success on the episodes that a control fails, which it cannot explain; None where there are none."""
        failed = [episode.key for episode in self.control_episodes[control] if not episode.success]
        outcomes = [self.outcomes[key] for key in failed if key in self.outcomes]
        return SuccessRate.of(outcomes) if outcomes else None


@dataclass(frozen=True)
class PairedSuccess:
    """Two policies on the same episodes.

    Attributes:
        p_value: of the exact McNemar test of "no difference".
        difference: success rate of the variant minus that of the baseline, on these episodes.
        low, high: its 95 % score interval (Tango 1998).
    """

    num_episodes: int
    both: int
    only_baseline: int
    only_variant: int
    neither: int
    p_value: float
    difference: float
    low: float
    high: float


def read_evaluation(path: Path | str) -> Evaluation | None:
    """Read ``results.json``; None where the run was not evaluated.

    The file holds ``episodes``, a list of ``{"task": str, "seed": int, "success": bool}`` with the other fields of
    ``EpisodeRecord`` where they are known, and optionally ``name``, ``controls`` (name in ``CONTROLS`` -> such a
    list) and ``videos`` (paths relative to the file); the rest is kept as it is.

    Raises:
        ValueError: the file has no such episodes, or one episode twice.
    """
    path = Path(path)
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text())
        episodes = _episodes(record["episodes"])
        controls = {name: _episodes(episodes) for name, episodes in record.get("controls", {}).items()}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} must hold at least one episode for the policy and each control, every (task, seed) once; got "
            f"{type(error).__name__}: {error}. Evaluate the run again."
        ) from error
    known = ("episodes", "controls", "videos", "name", "success")
    return Evaluation(
        success=_success(episodes),
        outcomes={episode.key: episode.success for episode in episodes},
        by_task=success_by_task(episodes),
        controls={name: _success(episodes) for name, episodes in controls.items()},
        videos=list(record.get("videos", [])),
        name=str(record.get("name", "policy")),
        episodes=episodes,
        control_episodes=controls,
        details={key: value for key, value in record.items() if key not in known},
    )


def success_by_task(episodes: Sequence[EpisodeRecord]) -> dict[str, SuccessRate]:
    """The success of each task, in the order of the episodes."""
    tasks = dict.fromkeys(episode.task for episode in episodes)
    return {task: _success([episode for episode in episodes if episode.task == task]) for task in tasks}


def distinct_controls(evaluations: Sequence[Evaluation]) -> list[dict[str, tuple[EpisodeRecord, ...]]]:
    """The controls of each evaluation without those that an earlier one has shown: what no checkpoint changes."""
    shown: dict[str, list[tuple[EpisodeRecord, ...]]] = {}
    distinct = []
    for evaluation in evaluations:
        own = {
            name: episodes
            for name, episodes in evaluation.control_episodes.items()
            if episodes not in shown.get(name, [])
        }
        for name, episodes in own.items():
            shown.setdefault(name, []).append(episodes)
        distinct.append(own)
    return distinct


def pair_success(baseline: Evaluation, variant: Evaluation) -> PairedSuccess | None:
    """Compare two evaluations on the episodes they share; None when they share none."""
    shared = [key for key in baseline.outcomes if key in variant.outcomes]
    if not shared:
        return None
    pairs = [(baseline.outcomes[key], variant.outcomes[key]) for key in shared]
    only_baseline, only_variant = pairs.count((True, False)), pairs.count((False, True))
    low, high = paired_difference_interval(only_variant, only_baseline, len(pairs))
    return PairedSuccess(
        num_episodes=len(pairs),
        both=pairs.count((True, True)),
        only_baseline=only_baseline,
        only_variant=only_variant,
        neither=pairs.count((False, False)),
        p_value=mcnemar_p_value(only_baseline, only_variant),
        difference=(only_variant - only_baseline) / len(pairs),
        low=low,
        high=high,
    )


def _success(episodes: Sequence[EpisodeRecord]) -> SuccessRate:
    return SuccessRate.of([episode.success for episode in episodes])


def _episodes(records: Sequence[Mapping[str, Any]]) -> tuple[EpisodeRecord, ...]:
    names = [field.name for field in dataclasses.fields(EpisodeRecord)]
    episodes = tuple(EpisodeRecord(**{key: record[key] for key in names if key in record}) for record in records)
    num_different = len({episode.key for episode in episodes})
    for episode in episodes:
        _require_sound(episode)
    if not episodes or num_different != len(episodes):
        raise ValueError(f"{len(episodes)} episodes with {num_different} different (task, seed) pairs")
    return episodes


def _require_sound(episode: EpisodeRecord) -> None:
    """An outcome is true or false, and a figure finite: of anything else no rate or mean can be taken."""
    rewards = (episode.sum_reward, episode.max_reward)
    if not isinstance(episode.success, bool):
        raise ValueError(f"success of {episode.task}, seed {episode.seed}, is {episode.success!r}, not true or false")
    if any(reward is not None and not math.isfinite(reward) for reward in rewards):
        raise ValueError(f"a reward of {episode.task}, seed {episode.seed}, is not finite; null stands for such a one")


@dataclass(frozen=True)
class EvaluationRun:
    """How an evaluation was made.

    Attributes:
        name: what acted, in tables.
        checkpoint: the folder that was evaluated; None for a controller without one.
        policy: type, features in force and patches of the policy; empty for a controller.
        env: the simulator's configuration.
        settings: episodes, seeds, slots and workers.
        wall_s, cpu_s: seconds that all episodes took, and seconds of processor time in this process and its workers.
        identity: the checkpoint's folder and hashes of its files.
    """

    name: str
    checkpoint: str | None
    policy: Mapping[str, Any]
    env: Mapping[str, Any]
    settings: Mapping[str, Any]
    wall_s: float
    cpu_s: float
    identity: Mapping[str, Any] = field(default_factory=dict)


def results_record(
    run: EvaluationRun,
    episodes: Sequence[EpisodeRecord],
    controls: Mapping[str, Sequence[EpisodeRecord]],
) -> dict[str, Any]:
    """The content of ``results.json`` as plain containers.

    Raises:
        ValueError: no episodes.
    """
    if not episodes:
        raise ValueError("An evaluation needs at least one episode.")
    tasks = dict.fromkeys(episode.task for episode in episodes)
    return {
        "name": run.name,
        "checkpoint": run.checkpoint,
        "identity": dict(run.identity),
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "success": dataclasses.asdict(_success(episodes)),
        "tasks": {task: _task_fields([episode for episode in episodes if episode.task == task]) for task in tasks},
        "episodes": _episode_fields(episodes),
        "controls": {name: _episode_fields(of_control) for name, of_control in controls.items()},
        "videos": [episode.video for episode in episodes if episode.video is not None],
        "policy": dict(run.policy),
        "env": dict(run.env),
        "settings": dict(run.settings),
        "provenance": dataclasses.asdict(collect_provenance()),
        "wall_s": run.wall_s,
        "cpu_s": run.cpu_s,
    }


def write_results(folder: Path, record: Mapping[str, Any]) -> Path:
    """Write ``results.json`` into a folder, beside and renamed."""
    path = folder / RESULTS_FILE
    write_text_atomically(path, json.dumps(record, indent=2, allow_nan=False) + "\n")
    return path


def append_episode(path: Path | str, actor: str, episode: EpisodeRecord) -> None:
    """Add an episode to ``episodes.jsonl`` as soon as it has ended, so that nothing is lost when the run is."""
    append_line(path, {"actor": actor, **dataclasses.asdict(episode)}, _decode_episode)


def read_episodes(path: Path | str) -> dict[str, list[EpisodeRecord]]:
    """The episodes of each actor in ``episodes.jsonl``; nothing where there is no such file.

    Raises:
        ValueError: a line that is no episode.
    """
    if not Path(path).is_file():
        return {}
    by_actor: dict[str, list[EpisodeRecord]] = {}
    for actor, episode in read_lines(path, _decode_episode, "an episode"):
        by_actor.setdefault(actor, []).append(episode)
    return by_actor


def _decode_episode(line: bytes) -> tuple[str, EpisodeRecord]:
    fields = json.loads(line)
    return str(fields.pop("actor")), EpisodeRecord(**fields)


def _episode_fields(episodes: Sequence[EpisodeRecord]) -> list[dict[str, Any]]:
    """Every field but the instruction, which the task has."""
    fields = [dataclasses.asdict(episode) for episode in episodes]
    return [{name: value for name, value in episode.items() if name != "instruction"} for episode in fields]


def _task_fields(episodes: Sequence[EpisodeRecord]) -> dict[str, Any]:
    steps = [episode.num_steps for episode in episodes if episode.num_steps is not None]
    rewards = [episode.sum_reward for episode in episodes if episode.sum_reward is not None]
    return {
        **dataclasses.asdict(_success(episodes)),
        "instruction": next((episode.instruction for episode in episodes if episode.instruction), ""),
        "mean_steps": statistics.fmean(steps) if steps else None,
        "mean_reward": statistics.fmean(rewards) if rewards else None,
    }


@dataclass(frozen=True)
class EvaluationRecord:
    """Success of one checkpoint.

    Attributes:
        step: training steps behind the checkpoint.
        checkpoint: its folder, relative to the run folder.
        success: over all episodes.
        by_task: success of each task.
        wall_s: seconds from the checkpoint to its result.
    """

    step: int
    checkpoint: str
    success: SuccessRate
    by_task: dict[str, SuccessRate]
    wall_s: float


def append_evaluation(run_folder: Path | str, record: EvaluationRecord) -> None:
    """Add one record to the run's evaluations."""
    append_line(Path(run_folder) / EVALUATIONS_FILE, dataclasses.asdict(record), _decode_evaluation)


def read_evaluations(run_folder: Path | str) -> list[EvaluationRecord]:
    """The run's evaluations ordered by step, of two of one step the later; none where there is no file.

    Raises:
        ValueError: a line other than an incomplete last one is not an evaluation.
    """
    path = Path(run_folder) / EVALUATIONS_FILE
    if not path.is_file():
        return []
    by_step = {record.step: record for record in read_lines(path, _decode_evaluation, "an evaluation")}
    return [by_step[step] for step in sorted(by_step)]


def best_evaluation(records: Sequence[EvaluationRecord]) -> EvaluationRecord | None:
    """The record of the highest success rate, the latest of equals; None where there is none."""
    return max(records, key=lambda record: (record.success.rate, record.step), default=None)


def _decode_evaluation(line: bytes) -> EvaluationRecord:
    fields = json.loads(line)
    success = SuccessRate(**fields.pop("success"))
    by_task = {task: SuccessRate(**rate) for task, rate in fields.pop("by_task").items()}
    return EvaluationRecord(**fields, success=success, by_task=by_task)
