# SPDX-License-Identifier: Apache-2.0
"""The strategy that a run asks for, on the processes that were started; what can't be trained so is refused here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from embodix import plugins
from embodix.contracts import ParallelStrategy, RankLayout, RunTraits
from embodix.parallel.replicated import HostStrategy

KIND = "parallel_strategies"


@dataclass(frozen=True)
class OutsideChoice:
    """A variable by which accelerate's launcher chooses how a run is spread or computed.

    Attributes:
        neutral: values, in lower case, that choose nothing.
        what: it chooses, in words.
        instead: what to do.
    """

    neutral: tuple[str, ...]
    what: str
    instead: str


_OFF = ("", "0", "false", "no", "none")
OUTSIDE_CHOICES: Mapping[str, OutsideChoice] = {
    "ACCELERATE_USE_FSDP": OutsideChoice(_OFF, "FSDP", "Choose parallel=fsdp2"),
    "ACCELERATE_USE_DEEPSPEED": OutsideChoice(_OFF, "DeepSpeed", "Choose parallel=zero1, zero2 or zero3"),
    "ACCELERATE_USE_MEGATRON_LM": OutsideChoice(_OFF, "Megatron-LM", "Choose parallel=tensor or parallel=pipeline"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": OutsideChoice(_OFF, "a mesh of its own", "Choose an option of parallel"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": OutsideChoice(
        ("", "1"), "accumulated gradients, whose losses it divides", "Choose packing.options.bins_per_step"
    ),
    "ACCELERATE_DYNAMO_BACKEND": OutsideChoice(_OFF, "a compiled policy", "Set policy.compile_model"),
}


@dataclass(frozen=True)
class ParallelChoice:
    """A strategy by its name in the config, with the arrangement of the processes that were started."""

    name: str = HostStrategy.name
    strategy: ParallelStrategy = field(default_factory=HostStrategy)
    layout: RankLayout = field(default_factory=RankLayout)


def choose_parallel(name: str, options: Mapping[str, Any], traits: RunTraits, num_processes: int) -> ParallelChoice:
    """The strategy of a run that can start.

    Raises:
        embodix.plugins.PluginError: an unknown strategy.
        embodix.arguments.ArgumentError: an option that it does not take.
        ValueError: what it can't do, a sentence a line, or a choice made outside of the config.
    """
    require_no_outside_choice(name)
    strategy: ParallelStrategy = plugins.build(KIND, name, dict(options))
    layout = strategy.layout(num_processes)
    faults = [*_common_faults(name, traits, layout, strategy.keeps_whole), *strategy.faults(traits, layout)]
    if faults:
        raise ValueError("\n".join(faults))
    return ParallelChoice(name, strategy, layout)


def require_no_outside_choice(name: str) -> None:
    """
    Raises:
        ValueError: accelerate's launcher was told to do something else than the config asks for.
    """
    for variable, choice in OUTSIDE_CHOICES.items():
        value = os.environ.get(variable, "")
        if value.lower() not in choice.neutral:
            raise ValueError(
                f"The config decides how a run is spread: it has parallel={name}, and {variable}={value}, set outside "
                f"of it, asks for {choice.what}. {choice.instead}, and start the processes plainly: torchrun "
                "--nproc_per_node=N -m embodix train ..."
            )


SAVING_PATCH = "lerobot_atomic_checkpoint"


def _common_faults(name: str, run: RunTraits, layout: RankLayout, keeps_whole: bool) -> Iterator[str]:
    """What no strategy can do that shares samples, saves in parts, or leaves a rank without the whole."""
    if layout.num_batches < layout.num_processes and run.streaming:
        yield (
            f"parallel={name} gives the same samples to {layout.num_processes // layout.num_batches} ranks, which a "
            "streamed data set can't; got dataset.streaming=true. Set it to false, or choose parallel=ddp."
        )
    in_parts = run.checkpoint_format == "sharded" or (not keeps_whole and run.checkpoint_format is not None)
    if in_parts and SAVING_PATCH not in run.patches:
        yield (
            f"Checkpoints of which each process writes its part need the patch {SAVING_PATCH}; got "
            f"patches={', '.join(run.patches) or 'none'}. Choose patches=host_guards, or train.save_checkpoint=false."
        )
    if run.checkpoint_format == "sharded" and run.adapters:
        yield (
            "checkpoint.format=sharded writes every weight, and a checkpoint of adapters has theirs alone; got "
            "peft=lora. Choose checkpoint.format=upstream."
        )
    if not keeps_whole:
        yield from _faults_without_the_whole(name, run)


def _faults_without_the_whole(name: str, run: RunTraits) -> Iterator[str]:
    """What of upstream's needs a process that has the whole policy and its optimizer's state."""
    if run.checkpoint_format == "upstream":
        yield (
            f"parallel={name} leaves no process with all that checkpoint.format=upstream saves. Choose "
            "checkpoint.format=auto: plain LeRobot loads its pretrained_model, too."
        )
    if run.publishes is not None:
        yield (
            f"parallel={name} leaves no process with the whole policy that {run.publishes} uploads. Turn that off, and "
            "upload pretrained_model of the last checkpoint when the run has ended."
        )
    if run.adapters:
        yield (
            f"parallel={name} cuts what is trained, and a checkpoint of adapters is written from whole ones; got "
            "peft=lora. Choose parallel=ddp, which holds no optimizer state of the frozen weights either."
        )
    if run.evaluates_in_loop:
        yield (
            f"parallel={name} leaves no rank with the whole policy, which upstream's evaluation between steps needs; "
            "got evaluation=upstream with an env. Choose evaluation=background, or train.eval_freq=0."
        )
    if run.clips_nothing:
        yield (
            f"parallel={name} needs a norm to clip gradients at, since upstream takes their norm by itself otherwise; "
            "got a grad_clip_norm of 0. Set it high, to 1e9, to clip nothing."
        )
