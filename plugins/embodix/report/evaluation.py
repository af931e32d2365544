# SPDX-License-Identifier: Apache-2.0
"""Success in simulation: the record of an evaluation, its interval, its controls and its pairing.

A success rate alone says little: a fixed action sequence may solve a task that resets to almost the same state.
Every evaluation therefore carries its controls, and two policies are compared on the same episodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embodix.report.statistics import mcnemar_p_value, wilson_interval

CONTROLS = {
    "blind": "blind control: a fixed action sequence that never looks",
    "blank_image": "blank-image control: the same policy with every camera blanked",
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
class Evaluation:
    """One policy in the simulator.

    Attributes:
        success: over all episodes.
        outcomes: (task, seed) -> solved, for pairing.
        by_task: success of each task.
        controls: success of each control that was run, by its name in ``CONTROLS``.
        videos: recorded episodes, relative to the run folder.
    """

    success: SuccessRate
    outcomes: dict[tuple[str, int], bool]
    by_task: dict[str, SuccessRate]
    controls: dict[str, SuccessRate] = field(default_factory=dict)
    videos: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PairedSuccess:
    """Two policies on the same episodes; ``p_value`` is the exact McNemar test of "no difference"."""

    num_episodes: int
    both: int
    only_baseline: int
    only_variant: int
    neither: int
    p_value: float


def read_evaluation(path: Path | str) -> Evaluation | None:
    """Read ``evaluation.json``; None where the run was not evaluated.

    The file holds ``episodes``, a list of ``{"task": str, "seed": int, "success": bool}``, and optionally
    ``controls`` (name in ``CONTROLS`` -> such a list) and ``videos`` (paths relative to the file).

    Raises:
        ValueError: the file has no such episodes, or one episode twice.
    """
    path = Path(path)
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text())
        outcomes = _outcomes(record["episodes"])
        controls = {name: _outcomes(episodes) for name, episodes in record.get("controls", {}).items()}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} must hold at least one episode for the policy and each control, every (task, seed) once; got "
            f"{type(error).__name__}: {error}. Evaluate the run again."
        ) from error
    tasks = dict.fromkeys(task for task, _ in outcomes)
    return Evaluation(
        success=SuccessRate.of(list(outcomes.values())),
        outcomes=outcomes,
        by_task={task: SuccessRate.of([won for (name, _), won in outcomes.items() if name == task]) for task in tasks},
        controls={name: SuccessRate.of(list(episodes.values())) for name, episodes in controls.items()},
        videos=list(record.get("videos", [])),
    )


def pair_success(baseline: Evaluation, variant: Evaluation) -> PairedSuccess | None:
    """Compare two evaluations on the episodes they share; None when they share none."""
    shared = [key for key in baseline.outcomes if key in variant.outcomes]
    if not shared:
        return None
    pairs = [(baseline.outcomes[key], variant.outcomes[key]) for key in shared]
    only_baseline, only_variant = pairs.count((True, False)), pairs.count((False, True))
    return PairedSuccess(
        num_episodes=len(pairs),
        both=pairs.count((True, True)),
        only_baseline=only_baseline,
        only_variant=only_variant,
        neither=pairs.count((False, False)),
        p_value=mcnemar_p_value(only_baseline, only_variant),
    )


def _outcomes(episodes: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], bool]:
    outcomes = {(str(episode["task"]), int(episode["seed"])): bool(episode["success"]) for episode in episodes}
    if not outcomes or len(outcomes) != len(episodes):
        raise ValueError(f"{len(episodes)} episodes with {len(outcomes)} different (task, seed) pairs")
    return outcomes
