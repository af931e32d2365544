# SPDX-License-Identifier: Apache-2.0
"""Which samples a run draws, from its config and the metadata of its data sets: images and prompt lengths."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodix.contracts import PolicySupport, SampleLayout, SampleShape
from embodix.costs.dataset_facts import DatasetFacts, read_dataset_facts
from embodix.data.mixture_spec import decode_mixture, is_mixture, map_cameras

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
    """Prompt lengths of one task, in tokens, and the frames that carry it; ``cut_at`` where upstream cuts a prompt."""

    task: str
    num_frames: int
    shortest: int
    longest: int
    cut_at: int | None = None


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
        facts = read_dataset_facts(vars(member))
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
        longest: tokens after which upstream cuts a prompt.
    """
    count, how = token_counter(config, support)
    draws: Draws = {}
    prompts: list[TaskPrompt] = []
    for source in sources:
        lengths: dict[tuple[str, int], Draws] = {}
        whole: dict[str, list[int]] = {}
        for episode in source.facts.episodes:
            images = len(source.slots) - episode.num_absent_cameras
            key = (episode.task, images)
            if key not in lengths:
                texts = support.prompt_texts(config["policy"], episode.task, images, source.facts.state_stats)
                lengths[key] = {}
                for text, share in texts.items():
                    length = count(text)
                    whole.setdefault(episode.task, []).append(length)
                    sample = (images, min(longest or length, length))
                    lengths[key][sample] = lengths[key].get(sample, 0.0) + share
            for sample, share in lengths[key].items():
                draws[sample] = draws.get(sample, 0.0) + share * episode.length * source.weight
        for task, frames in source.facts.frames_by_task().items():
            seen = whole[task]
            cut_at = longest if longest is not None and max(seen) > longest else None
            prompts.append(TaskPrompt(task, frames, min(seen), max(seen), cut_at))
    return draws, prompts, how


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


def token_counter(config: Mapping[str, Any], support: PolicySupport) -> tuple[Callable[[str], int], str]:
    """A function that counts tokens, and a sentence on how it does.

    Takes the tokenizer that the run would take, else estimates: one token a word, digit and punctuation mark, and one
    to begin with.
    """
    directory = (config.get("tokenizer") or {}).get("directory")
    hub_id = support.tokenizer_hub_id
    path = _hub_file(hub_id, directory) if hub_id is not None else support.tokenizer_file(config)
    if path is None:
        return _estimate, (
            f"Prompt lengths are estimates: the tokenizer{f' of {hub_id}' * (hub_id is not None)} is not on this "
            "machine, so each word, digit and punctuation mark counts as one token."
        )
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return (lambda text: len(tokenizer.encode(text).ids)), f"Prompt lengths are counted with the tokenizer {path}."


def _estimate(text: str) -> int:
    return 1 + len(re.findall(r"<[|/\w ]+>|[^\W\d_]+|\d|[^\w ]|_", text))


def _hub_file(hub_id: str, directory: str | None) -> Path | None:
    if directory is not None:
        folder = Path(directory) / "hub" / f"models--{hub_id.replace('/', '--')}" / "snapshots"
        return max(folder.glob("*/tokenizer.json"), default=None)
    from huggingface_hub import try_to_load_from_cache

    cached: Any = try_to_load_from_cache(hub_id, "tokenizer.json")
    return Path(cached) if isinstance(cached, str) else None
