# SPDX-License-Identifier: Apache-2.0
"""Success in simulation: the record of an evaluation, its interval, its controls and its pairing.

A success rate alone says little: a fixed action sequence may solve a task that resets to almost the same state.
Every evaluation therefore carries its controls, and two policies are compared on the same episodes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embodix.report.statistics import mcnemar_p_value, paired_difference_interval, wilson_interval

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
    if not episodes or num_different != len(episodes):
        raise ValueError(f"{len(episodes)} episodes with {num_different} different (task, seed) pairs")
    return episodes
