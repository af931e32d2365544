# SPDX-License-Identifier: Apache-2.0
"""The sizes of a run and the places of its processes, checked before anything starts.

RLinf asserts the same one after the other in its processes, after minutes. Here every violated rule is named at once,
with the nearest sizes that satisfy it.

On a machine with accelerators components are placed on them, elsewhere on the node: RLinf's
``cluster.component_placement`` in its ``resource:process`` syntax (rlinf/scheduler/placement/placement.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from embodix_rl.schema import PlacementSettings

PPO, GRPO = "gae", "grpo"  # RLinf's names of the advantage estimators


@dataclass(frozen=True)
class RunSizes:
    """The sizes of a run.

    Attributes:
        num_envs: environments simulated at once, over all processes.
        num_stages: groups of each process's environments that take turns (``pipeline_stage_num``).
        group_size: environments that begin in the same state.
        steps_per_epoch: action steps of each environment in a rollout epoch.
        rollout_epochs: rollout epochs before a training step.
        chunk: action steps of a chunk.
        env_workers: environment processes.
        rollout_workers: inference processes.
        actor_workers: training processes.
        micro_batch: chunks of a forward and backward pass in one process.
        global_batch: chunks of an optimizer step.
        advantage: RLinf's ``adv_type``.
        update_epochs: times that a training step uses its chunks.
        reward_type: RLinf's ``reward_type``.
    """

    num_envs: int
    num_stages: int
    group_size: int
    steps_per_epoch: int
    rollout_epochs: int
    chunk: int
    env_workers: int
    rollout_workers: int
    actor_workers: int
    micro_batch: int
    global_batch: int
    advantage: str
    update_epochs: int = 1
    reward_type: str = "chunk_level"

    @property
    def chunks_per_step(self) -> int:
        """Chunks that one training step gets: those of all environments and rollout epochs."""
        return self.num_envs * self.rollout_epochs * (self.steps_per_epoch // self.chunk)

    @property
    def frames_per_step(self) -> int:
        """Action steps that one training step gets."""
        return self.chunks_per_step * self.chunk

    @property
    def trajectories_per_actor(self) -> int:
        """Trajectories that each training process gets for a step: one of each environment process and stage, split
        where there are more training processes (rlinf/utils/metric_utils.py, ``compute_split_num``)."""
        sent = self.env_workers * self.num_stages
        return math.lcm(sent, self.actor_workers) // self.actor_workers


def require_legal(sizes: RunSizes, *, pipeline: bool = False, decoupled: bool = False) -> None:
    """Refuse sizes that RLinf would refuse later.

    Args:
        pipeline: trained on micro-batches as they arrive (``runner=pipeline``).
        decoupled: inference takes whichever environment processes are ready.

    Raises:
        ValueError: every violated rule, with the nearest legal sizes.
    """
    faults = [*_counts(sizes)] or [*_environments(sizes), *_batches(sizes)]
    if not faults and pipeline:
        faults += _pipeline(sizes)
    if not faults and decoupled:
        faults += _decoupled(sizes)
    if faults:
        raise ValueError("These sizes can't run: " + " ".join(f"({n}) {fault}" for n, fault in enumerate(faults, 1)))


def require_legal_evaluation(num_envs: int, steps: int, sizes: RunSizes) -> None:
    """Refuse an evaluation that RLinf would refuse later.

    Args:
        num_envs: environments at once, over all processes.
        steps: action steps of each.

    Raises:
        ValueError: they can't be spread over the run's processes and stages, or are no whole chunks.
    """
    unit = math.lcm(sizes.env_workers * sizes.num_stages, sizes.num_stages * sizes.rollout_workers)
    for name, value, divisor in (("num_envs", num_envs, unit), ("steps", steps, sizes.chunk)):
        if value < 1 or value % divisor:
            raise ValueError(
                f"evaluation.{name}={value} must be a multiple of {divisor}, which processes, stages and chunk "
                f"ask for; nearest: {_nearest(max(value, 1), divisor)}."
            )


def _counts(sizes: RunSizes) -> Iterator[str]:
    for name, value in vars(sizes).items():
        if isinstance(value, int) and value < 1:
            yield f"{name} must be at least 1; got {value}."


def _environments(sizes: RunSizes) -> Iterator[str]:
    unit = sizes.env_workers * sizes.num_stages * sizes.group_size
    unit = math.lcm(unit, sizes.num_stages * sizes.rollout_workers)
    if sizes.num_envs % unit:
        yield (
            f"rollout.num_envs={sizes.num_envs} is no multiple of {unit}, which env_workers={sizes.env_workers} × "
            f"stages={sizes.num_stages} × group_size={sizes.group_size} and rollout_workers={sizes.rollout_workers} "
            f"ask for; nearest: {_nearest(sizes.num_envs, unit)}."
        )
    if sizes.steps_per_epoch % sizes.chunk:
        yield (
            f"rollout.steps={sizes.steps_per_epoch} is no multiple of the chunk of {sizes.chunk} action steps; "
            f"nearest: {_nearest(sizes.steps_per_epoch, sizes.chunk)}."
        )
    if sizes.advantage == GRPO and sizes.group_size < 2:
        yield "algorithm=grpo compares the environments of a group; rollout.group_size must be at least 2, such as 4."


def _batches(sizes: RunSizes) -> Iterator[str]:
    unit = sizes.micro_batch * sizes.actor_workers
    if sizes.global_batch % unit:
        yield (
            f"optim.global_batch={sizes.global_batch} is no multiple of micro_batch={sizes.micro_batch} × "
            f"actor_workers={sizes.actor_workers}; nearest: {_nearest(sizes.global_batch, unit)}."
        )
    if sizes.chunks_per_step and sizes.chunks_per_step % sizes.global_batch:
        yield (
            f"a training step gets {sizes.chunks_per_step} chunks ({sizes.num_envs} environments × "
            f"{sizes.rollout_epochs} epochs × {sizes.steps_per_epoch // sizes.chunk} chunks), which optim.global_batch="
            f"{sizes.global_batch} does not divide; nearest global_batch: {_divisors_near(sizes, unit)}."
        )


def _pipeline(sizes: RunSizes) -> Iterator[str]:
    if sizes.advantage != PPO:
        yield f"runner=pipeline computes advantages by GAE in the environment processes; got {sizes.advantage}."
    senders = sizes.env_workers * sizes.num_stages
    chunks = sizes.steps_per_epoch // sizes.chunk
    sent = sizes.num_envs // max(senders, sizes.actor_workers) * chunks
    if sent % sizes.micro_batch:
        legal = [size for size in range(1, sent + 1) if sent % size == 0]
        yield (
            f"runner=pipeline sends {sent} chunks at a time to a training process, which optim.micro_batch="
            f"{sizes.micro_batch} does not divide; nearest: {_closest(sizes.micro_batch, legal)}."
        )


def _decoupled(sizes: RunSizes) -> Iterator[str]:
    if sizes.num_stages != 1:
        yield f"decoupled inference takes one stage; set rollout.stages=1 (got {sizes.num_stages})."
    if sizes.env_workers < sizes.rollout_workers:
        yield (
            f"decoupled inference needs at least as many environment processes ({sizes.env_workers}) as inference "
            f"processes ({sizes.rollout_workers})."
        )


def _nearest(value: int, unit: int) -> str:
    below = value // unit * unit
    return " or ".join(str(near) for near in (below, below + unit) if near > 0)


def _divisors_near(sizes: RunSizes, unit: int) -> str:
    total = sizes.chunks_per_step
    legal = [size for size in range(unit, total + 1, unit) if total % size == 0]
    if not legal:
        return f"none: no multiple of micro_batch × actor_workers = {unit} divides {total}"
    return _closest(sizes.global_batch, legal)


def _closest(value: int, legal: list[int]) -> str:
    near = sorted(legal, key=lambda size: (abs(size - value), size))[:2]
    return " or ".join(map(str, sorted(near)))


PLACEMENTS = ("colocated", "disaggregated", "hybrid")


@dataclass(frozen=True)
class Placement:
    """Number of processes and RLinf's placement string of each component."""

    workers: dict[str, int]
    component_placement: dict[str, str]


def place(settings: PlacementSettings) -> Placement:
    """The processes of a run.

    Raises:
        ValueError: an unknown name, or accelerators that can't be divided so; the message has the nearest legal
            numbers.
    """
    if settings.name not in PLACEMENTS:
        raise ValueError(f"placement is one of {', '.join(PLACEMENTS)}; got {settings.name!r}.")
    if settings.accelerators < 0:
        raise ValueError(f"placement.accelerators is 0 or more; got {settings.accelerators}.")
    ranges = _accelerator_ranges(settings) if settings.accelerators else dict.fromkeys(_COMPONENTS, range(1))
    asked = {
        "env": settings.env_workers,
        "rollout": settings.rollout_workers,
        "actor": settings.actor_workers,
    }
    workers = {name: len(ranges[name]) if number is None else number for name, number in asked.items()}
    _require_even(workers, ranges, on_accelerators=settings.accelerators > 0)
    strings = {name: f"{_span(ranges[name])}:{_span(range(workers[name]))}" for name in _COMPONENTS}
    return Placement(workers, strings)


_COMPONENTS = ("env", "rollout", "actor")


def _accelerator_ranges(settings: PlacementSettings) -> dict[str, range]:
    total = settings.accelerators
    if settings.name == "colocated":
        return dict.fromkeys(_COMPONENTS, range(total))
    if total < 2:
        raise ValueError(
            f"placement={settings.name} divides at least 2 accelerators; got {total}. Choose placement=colocated, or "
            "accelerators=0 for processes on the node."
        )
    own = settings.own_accelerators if settings.own_accelerators is not None else total // 2
    if not 0 < own < total:
        near = min(max(own, 1), total - 1)
        raise ValueError(
            f"placement.own_accelerators leaves some of the {total} accelerators to the other components; got {own}, "
            f"nearest: {near}."
        )
    if settings.name == "disaggregated":
        others = range(total - own)
        return {"env": others, "rollout": others, "actor": range(total - own, total)}
    return {"env": range(own), "rollout": range(own, total), "actor": range(total)}


def _require_even(workers: dict[str, int], ranges: dict[str, range], *, on_accelerators: bool) -> None:
    for name, number in workers.items():
        if number < 1:
            raise ValueError(f"placement.{name}_workers is at least 1; got {number}.")
        places = len(ranges[name])
        if on_accelerators and number % places and places % number:
            legal = [size for size in range(1, max(number, places) * 2 + 1) if size % places == 0 or places % size == 0]
            near = sorted(legal, key=lambda size: (abs(size - number), size))[:2]
            raise ValueError(
                f"placement.{name}_workers={number} can't share {places} accelerators evenly; nearest: "
                f"{' or '.join(map(str, sorted(near)))}."
            )


def _span(numbers: range) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
