# SPDX-License-Identifier: Apache-2.0
"""``results.json``: one policy in the simulator, with all that is needed to read, repeat and pair it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embodix.report.evaluation import EpisodeRecord, SuccessRate
from embodix.report.json_lines import append_line, read_lines
from embodix.report.manifest import collect_provenance, write_text_atomically

RESULTS_FILE, EPISODES_FILE = "results.json", "episodes.jsonl"


@dataclasses.dataclass(frozen=True)
class EvaluationRun:
    """How an evaluation was made.

    Attributes:
        name: what acted, in tables.
        checkpoint: the folder that was evaluated; None for a controller without one.
        policy: type, features in force and patches of the policy; empty for a controller.
        env: the simulator's configuration.
        settings: episodes, seeds, slots and workers.
        wall_s, cpu_s: seconds that all episodes took, and seconds of processor time in this process and its workers.
    """

    name: str
    checkpoint: str | None
    policy: Mapping[str, Any]
    env: Mapping[str, Any]
    settings: Mapping[str, Any]
    wall_s: float
    cpu_s: float


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
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "success": _success(episodes),
        "tasks": {task: _task([episode for episode in episodes if episode.task == task]) for task in tasks},
        "episodes": _fields(episodes),
        "controls": {name: _fields(of_control) for name, of_control in controls.items()},
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
    append_line(path, {"actor": actor, **dataclasses.asdict(episode)}, _decode)


def read_episodes(path: Path | str) -> dict[str, list[EpisodeRecord]]:
    """The episodes of each actor in ``episodes.jsonl``; nothing where there is no such file.

    Raises:
        ValueError: a line that is no episode.
    """
    if not Path(path).is_file():
        return {}
    by_actor: dict[str, list[EpisodeRecord]] = {}
    for actor, episode in read_lines(path, _decode, "an episode"):
        by_actor.setdefault(actor, []).append(episode)
    return by_actor


def _decode(line: bytes) -> tuple[str, EpisodeRecord]:
    fields = json.loads(line)
    return str(fields.pop("actor")), EpisodeRecord(**fields)


def _fields(episodes: Sequence[EpisodeRecord]) -> list[dict[str, Any]]:
    """Every field but the instruction, which the task has."""
    fields = [dataclasses.asdict(episode) for episode in episodes]
    return [{name: value for name, value in episode.items() if name != "instruction"} for episode in fields]


def _task(episodes: Sequence[EpisodeRecord]) -> dict[str, Any]:
    steps = [episode.num_steps for episode in episodes if episode.num_steps is not None]
    rewards = [episode.sum_reward for episode in episodes if episode.sum_reward is not None]
    return {
        **_success(episodes),
        "instruction": next((episode.instruction for episode in episodes if episode.instruction), ""),
        "mean_steps": statistics.fmean(steps) if steps else None,
        "mean_reward": statistics.fmean(rewards) if rewards else None,
    }


def _success(episodes: Sequence[EpisodeRecord]) -> dict[str, Any]:
    return dataclasses.asdict(SuccessRate.of([episode.success for episode in episodes]))
