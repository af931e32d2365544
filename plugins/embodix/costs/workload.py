# SPDX-License-Identifier: Apache-2.0
"""Which samples a run draws, from its config and the metadata of its data sets: images and prompt lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embodix.contracts import PolicySupport, SampleLayout, SampleShape
from embodix.costs.dataset_facts import DatasetFacts, read_dataset_facts
from embodix.data.mixture_spec import STATISTICS, decode_mixture, is_mixture, map_cameras
from embodix.data.token_counts import token_counter

Draws = dict[tuple[int, int], float]  # (images, prompt length) -> share


@dataclass(frozen=True)
class Source:
    """A data set of the run.

    Attributes:
        facts: from its metadata.
        slots: the policy's camera slots that it fills, with the shape of an image.
        weight: of one of its frames.
    """

    facts: DatasetFacts
    slots: dict[str, list[int]]
    weight: float = 1.0


@dataclass(frozen=True)
class TaskPrompt:
    """Prompt lengths of one task, in tokens, and the frames that carry it.

    Attributes:
        shortest, longest: as far as the policy takes them.
        excess: tokens that the longest is too long by.
        share_too_long: share of the task's frames whose prompt is longer than the policy takes.
    """

    task: str
    num_frames: int
    shortest: int
    longest: int
    excess: int = 0
    share_too_long: float = 0.0


def read_sources(config: Mapping[str, Any]) -> list[Source]:
    """The data set of a composed config, or the members of its mixture.

    Raises:
        ValueError: no data set there, or a camera without a slot.
    """
    features = config["policy"].get("input_features") or {}
    declared = tuple(key for key, feature in features.items() if str(feature["type"]) == "VISUAL")
    if not is_mixture(config["dataset"]):
        facts = read_dataset_facts(config["dataset"])
        return [Source(facts, _filled_slots(facts, declared, config.get("rename_map") or {}))]
    spec, sources = decode_mixture(config["dataset"]), []
    for member in spec.members:
        facts = read_dataset_facts({**vars(member), STATISTICS: config["dataset"].get(STATISTICS)})
        cameras = map_cameras(member, tuple(facts.cameras), declared)
        slots = {slot: facts.cameras[camera] for camera, slot in cameras.items() if slot is not None}
        sources.append(Source(facts, slots, 1.0 if member.weight is None else member.weight / facts.num_frames))
    return sources


def _filled_slots(facts: DatasetFacts, declared: tuple[str, ...], renamed: Mapping[str, str]) -> dict[str, list[int]]:
    present = {renamed.get(camera, camera): shape for camera, shape in facts.cameras.items()}
    strangers = [camera for camera in present if declared and camera not in declared]
    if strangers:
        raise ValueError(
            f"Camera {', '.join(strangers)} of the data set is in no slot of the policy. Policy slots: "
            f"{', '.join(declared)}. Data set cameras: {', '.join(present)}. Rename with rename_map."
        )
    return present


def draws_of(
    config: Mapping[str, Any], support: PolicySupport, sources: list[Source], longest: int | None
) -> tuple[Draws, list[TaskPrompt], str]:
    """How often each kind of sample is drawn, the prompts by task, and how they were counted.

    Args:
        longest: tokens that the policy takes of a prompt; None for any number.
    """
    count, how = token_counter(config, support)
    draws: Draws = {}
    prompts: list[TaskPrompt] = []
    for source in sources:
        lengths: dict[tuple[str, int], Draws] = {}  # whole prompts, of a task with as many images
        for episode in source.facts.episodes:
            images = len(source.slots) - episode.num_absent_cameras
            key = (episode.task, images)
            if key not in lengths:
                texts = support.prompt_texts(config["policy"], episode.task, images, source.facts.state_stats)
                lengths[key] = {}
                for text, share in texts.items():
                    sample = (images, count(text))
                    lengths[key][sample] = lengths[key].get(sample, 0.0) + share
            for (_, length), share in lengths[key].items():
                sample = (images, _taken(length, longest))
                draws[sample] = draws.get(sample, 0.0) + share * episode.length * source.weight
        for task, frames in source.facts.frames_by_task().items():
            of_task = [shares for (name, _), shares in lengths.items() if name == task]
            prompts.append(_task_prompt(task, frames, of_task, longest))
    return draws, prompts, how


def _task_prompt(task: str, num_frames: int, lengths: Sequence[Draws], longest: int | None) -> TaskPrompt:
    """The prompts of a task from its whole lengths, for each number of images."""
    whole = [length for shares in lengths for _, length in shares]
    too_long = [
        share for shares in lengths for (_, length), share in shares.items() if length > _taken(length, longest)
    ]
    return TaskPrompt(
        task,
        num_frames,
        _taken(min(whole), longest),
        _taken(max(whole), longest),
        max(whole) - _taken(max(whole), longest),
        sum(too_long) / len(lengths),
    )


def _taken(length: int, longest: int | None) -> int:
    return length if longest is None else min(length, longest)


def padded(draws: Draws, layout: SampleLayout | None, batch_size: int) -> dict[SampleShape, float]:
    """The draws with the rows that upstream appends: a fixed length, or that of the longest of a random batch."""
    if layout is None:
        return {SampleShape(images, length): share for (images, length), share in draws.items()}
    if layout.prompt_length is not None:
        return {SampleShape(*draw, layout.padding(*draw)): share for draw, share in draws.items()}
    total = sum(draws.values())
    rows = {draw: draw[0] * layout.image_tokens + draw[1] for draw in draws}
    below = {
        length: sum(share for draw, share in draws.items() if rows[draw] <= length) / total
        for length in sorted(set(rows.values()))
    }
    workload: dict[SampleShape, float] = {}
    for draw, share in draws.items():
        reached = 0.0  # chance that no other sample of the batch is longer
        for length in (length for length in below if length >= rows[draw]):
            chance = below[length] ** (batch_size - 1)
            workload[SampleShape(*draw, length - rows[draw])] = share * (chance - reached)
            reached = chance
    return workload
