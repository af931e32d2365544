# SPDX-License-Identifier: Apache-2.0
"""Plan a π0.5 training run from its config and the data set's metadata: tokens, waste, bound, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embodix.policies.cost import DatasetFacts, padded_action_share, read_dataset_facts
from embodix.report.compare import SpeedBound
from embodix_pi05.cost import (
    EMBODIX,
    UPSTREAM,
    Computation,
    Sample,
    computation_of,
    flop_bound,
    mean_flops,
    real_sizes,
    token_shares,
)
from embodix_pi05.cost_memory import MemoryEstimate, Remedy, estimate_memory, remedies
from embodix_pi05.cost_prompt import prompt_lengths, token_counter
from embodix_pi05.cost_sizes import Pi05Sizes, num_parameters, sizes_of

REAL_NAME = "π0.5 at its real size (4.1 B parameters, 224 px, prompts padded to 200)"


@dataclass(frozen=True)
class TaskPrompt:
    """Prompt lengths of one task, in tokens, and the frames that carry it."""

    task: str
    num_frames: int
    shortest: int
    longest: int


@dataclass(frozen=True)
class VariantPlan:
    """What one variant will cost a sample; bounds are against upstream."""

    name: str
    computation: Computation
    tokens: float
    images: float
    utilisation: float
    forward_flops: float
    backward_flops: float
    bound: float
    forward_bound: float
    real_bound: float
    memory: MemoryEstimate


@dataclass(frozen=True)
class TrainingPlan:
    """Everything that can be known before training.

    Attributes:
        tokens: mean tokens a sample by what they carry, as upstream lays them out.
        waste: share of upstream's tokens that carry no input.
        padded_action_share: share of the loss that lies after the end of episodes.
        variants: upstream, each step towards the fast path, and the config's own choice.
        chosen: name of the variant that the config selects.
    """

    dataset: str
    num_episodes: int
    num_frames: int
    real_cameras: list[str]
    blank_cameras: list[str]
    num_parameters: int
    batch_size: int
    dtype: str
    checkpointing: bool
    features: dict[str, Any]
    tokens: dict[str, float]
    waste: float
    prompts: list[TaskPrompt]
    prompt_source: str
    padded_action_share: float
    variants: list[VariantPlan]
    chosen: str
    remedies: list[Remedy]


def plan_training(config: Mapping[str, Any]) -> TrainingPlan:
    """Plan the run that a composed train config describes.

    Args:
        config: plain containers, as ``lerobot train --cfg job`` shows them.

    Raises:
        ValueError: another policy than π0.5, no data set, or cameras that fit no slot of the policy.
    """
    policy = config["policy"]
    sizes = sizes_of(policy, config.get("architecture"))
    facts = read_dataset_facts(config["dataset"])
    real, blank = camera_slots(config, facts)
    workload, prompts, source = _workload(config, facts, sizes, len(real), len(blank))
    dtype, checkpointing = policy.get("dtype", "float32"), bool(policy.get("gradient_checkpointing", False))
    batch_size = int(config["train"]["batch_size"])
    batch = [max(workload, key=lambda sample: (sample.images, sample.prompt))] * batch_size
    choice = computation_of(config)
    memory = {"dtype": dtype, "checkpointing": checkpointing}
    named = _variants(choice)
    return TrainingPlan(
        dataset=facts.name,
        num_episodes=len(facts.episodes),
        num_frames=facts.num_frames,
        real_cameras=real,
        blank_cameras=blank,
        num_parameters=num_parameters(sizes),
        batch_size=batch_size,
        **memory,
        features=_features(config),
        **_mean_tokens(sizes, workload),
        prompts=prompts,
        prompt_source=source,
        padded_action_share=padded_action_share([e.length for e in facts.episodes], sizes.chunk_size),
        variants=[
            _variant(name, what, sizes, real_sizes(policy), workload, estimate_memory(sizes, batch, what, **memory))
            for name, what in named.items()
        ],
        chosen=next(name for name, computation in named.items() if computation == choice),
        remedies=remedies(sizes, batch, choice, **memory),
    )


def speed_bounds(configs: Mapping[str, Mapping[str, Any]], baseline: str) -> dict[str, SpeedBound]:
    """Bounds of a comparison's variants against its baseline, for the report.

    Args:
        configs: composed train config of each variant; they share data set and policy.

    Raises:
        ValueError: see :func:`plan_training`.
    """
    config = configs[baseline]
    sizes, facts = sizes_of(config["policy"], config.get("architecture")), read_dataset_facts(config["dataset"])
    real_cameras, blank_cameras = camera_slots(config, facts)
    workload, prompts, _ = _workload(config, facts, sizes, len(real_cameras), len(blank_cameras))
    base, real = computation_of(config), real_sizes(config["policy"])
    lengths = [prompt.shortest for prompt in prompts] + [prompt.longest for prompt in prompts]
    basis = (
        f"Matrix products of forward and backward for {len(real_cameras)} real and {len(blank_cameras)} blank cameras, "
        f"prompts of {min(lengths)} to {max(lengths)} tokens."
    )
    return {
        name: SpeedBound(
            this_size=flop_bound(sizes, workload, computation_of(other), base),
            real_size=None if sizes == real else flop_bound(real, workload, computation_of(other), base),
            real_name=REAL_NAME,
            basis=basis,
        )
        for name, other in configs.items()
        if name != baseline
    }


def camera_slots(config: Mapping[str, Any], facts: DatasetFacts) -> tuple[list[str], list[str]]:
    """Image keys of the policy that the data set fills, and those that stay blank.

    Raises:
        ValueError: a camera of the data set is in no slot; both lists are in the message.
    """
    policy, renamed = config["policy"], config.get("rename_map") or {}
    present = [renamed.get(camera, camera) for camera in facts.cameras]
    declared = [
        key for key, feature in (policy.get("input_features") or {}).items() if str(feature["type"]) == "VISUAL"
    ]
    strangers = [camera for camera in present if declared and camera not in declared]
    if strangers:
        raise ValueError(
            f"Camera {', '.join(strangers)} of the data set is in no slot of the policy. Policy slots: "
            f"{', '.join(declared)}. Data set cameras: {', '.join(present)}. Rename with rename_map."
        )
    blank = [slot for slot in declared if slot not in present]
    empty = [f"observation.images.empty_camera_{index}" for index in range(int(policy.get("empty_cameras") or 0))]
    return present, blank + [slot for slot in empty if slot not in blank]


def _workload(
    config: Mapping[str, Any], facts: DatasetFacts, sizes: Pi05Sizes, num_real: int, num_blank: int
) -> tuple[dict[Sample, float], list[TaskPrompt], str]:
    """How often each kind of sample is drawn (every frame once), the prompts by task, and how they were counted."""
    count, source = token_counter((config.get("tokenizer") or {}).get("directory"))
    modes = config["policy"].get("normalization_mapping") or {}
    frames = facts.frames_by_task()
    lengths = {
        task: prompt_lengths(task, facts.state_stats, str(modes.get("STATE", "QUANTILES")), count, sizes.prompt_length)
        for task in frames
    }
    workload: dict[Sample, float] = {}
    for episode in facts.episodes:
        absent = episode.num_absent_cameras
        for length, share in lengths[episode.task].items():
            sample = Sample(num_real - absent, num_blank + absent, length)
            workload[sample] = workload.get(sample, 0.0) + share * episode.length
    prompts = [TaskPrompt(task, frames[task], min(shares), max(shares)) for task, shares in lengths.items()]
    return workload, prompts, source


def _mean_tokens(sizes: Pi05Sizes, workload: Mapping[Sample, float]) -> dict[str, Any]:
    names = ("images", "prompt", "actions", "blank_images", "prompt_padding")
    total = sum(workload.values())
    tokens = {
        name: sum(getattr(token_shares(sizes, sample), name) * share for sample, share in workload.items()) / total
        for name in names
    }
    return {"tokens": tokens, "waste": (tokens["blank_images"] + tokens["prompt_padding"]) / sum(tokens.values())}


def _variants(choice: Computation) -> dict[str, Computation]:
    """The variants to show; the config's own is added where it is none of them."""
    named = {
        "upstream": UPSTREAM,
        "vision_tokens=valid": Computation(vision_tokens="valid"),
        "packing=padding_free": Computation(packing="padding_free"),
        "embodix": EMBODIX,
    }
    if choice not in named.values():
        named["this config"] = choice
    return named


def _variant(
    name: str,
    computation: Computation,
    sizes: Pi05Sizes,
    real: Pi05Sizes,
    workload: Mapping[Sample, float],
    memory: MemoryEstimate,
) -> VariantPlan:
    flops, upstream = mean_flops(sizes, workload, computation), mean_flops(sizes, workload)
    means = _mean_tokens(sizes, workload)["tokens"]
    padding = means["blank_images"] + means["prompt_padding"]
    actions = means["actions"] * computation.flow_samples
    valid = means["images"] + means["prompt"] + actions
    computed = valid + (padding if computation.packing == "none" else 0)
    images = (means["images"] + means["blank_images"] * (computation.vision_tokens == "upstream")) / sizes.patches
    return VariantPlan(
        name=name,
        computation=computation,
        tokens=computed,
        images=images,
        utilisation=valid / computed,
        forward_flops=flops.forward,
        backward_flops=flops.backward,
        bound=flop_bound(sizes, workload, computation),
        forward_bound=upstream.forward / flops.forward * computation.flow_samples,
        real_bound=flop_bound(real, workload, computation),
        memory=memory,
    )


def _features(config: Mapping[str, Any]) -> dict[str, Any]:
    """The switches of the run by group."""
    groups = ("packing", "attention", "vision_tokens", "action_pad")
    return {
        **{group: config[group]["name"] for group in groups},
        "flow_samples": config.get("flow_samples", 1),
        "plugin": config.get("plugin"),
        "patches": sorted(config.get("patches") or {}),
    }
