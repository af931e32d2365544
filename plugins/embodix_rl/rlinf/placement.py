# SPDX-License-Identifier: Apache-2.0
"""Which processes a run has, and where: RLinf's ``cluster.component_placement``.

On a machine with accelerators components are placed on them, elsewhere on the node (RLinf's ``resource:process``
syntax, rlinf/scheduler/placement/placement.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from embodix_rl.schema import PlacementSettings

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
