# SPDX-License-Identifier: Apache-2.0
"""Which camera of each embodiment fills which slot of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.types import FeatureType

from embodix.data.mixture_spec import MemberSpec

if TYPE_CHECKING:
    from rich.table import Table

    from embodix.data.mixture import Member

CameraMap = Mapping[str, str | None]


def policy_slots(policy: PreTrainedConfig) -> tuple[str, ...]:
    """Camera slots that the policy's config fixes; none for a policy whose slots come from the data."""
    features = policy.input_features or {}
    return tuple(key for key, feature in features.items() if feature.type is FeatureType.VISUAL)


def map_cameras(spec: MemberSpec, cameras: tuple[str, ...], slots: tuple[str, ...]) -> CameraMap:
    """The slot of each camera of a dataset, None for one that is not read.

    Raises:
        ValueError: a camera the dataset does not have, a slot the policy does not have, or no camera at all.
    """
    place = f"dataset.members.{spec.name}.cameras"
    asked = spec.cameras if spec.cameras is not None else {camera: camera for camera in cameras}
    unknown = [camera for camera in asked if camera not in cameras]
    if unknown:
        raise ValueError(f"{place} names {', '.join(unknown)}; the dataset has {', '.join(cameras) or 'no camera'}.")
    mapped: dict[str, str | None] = {camera: asked.get(camera) for camera in cameras}
    stray = [f"{camera} -> {slot}" for camera, slot in mapped.items() if slot is not None and slot not in slots]
    if slots and stray:
        raise ValueError(
            f"{place}: the policy has no such slot for {', '.join(stray)}; its slots are {', '.join(slots)}. "
            f"Map the camera to one of them, or to null to leave it out: {place}={{<camera>: <slot>}}."
        )
    if not any(mapped.values()):
        raise ValueError(f"{place} leaves no camera; a sample needs one at least. Cameras: {', '.join(cameras)}.")
    return mapped


def describe_cameras(members: Sequence[Member]) -> list[dict[str, Any]]:
    """One entry a camera and one for each slot a member lacks, for tables and the manifest."""
    all_slots = list(dict.fromkeys(slot for member in members for slot in member.slots.values()))
    rows: list[dict[str, Any]] = []
    for member in members:
        rows += [{"member": member.name, "camera": camera, "slot": slot} for camera, slot in member.cameras.items()]
        filled = set(member.slots.values())
        rows += [{"member": member.name, "camera": None, "slot": slot} for slot in all_slots if slot not in filled]
    return rows


def camera_table(members: Sequence[Member], quotas: Sequence[int]) -> Table:
    """A rich table: members with their share and sizes, dataset camera -> slot, or absent."""
    from rich.table import Table

    table = Table(title="Mixture", title_justify="left")
    for column in ("member", "share", "frames", "fps", "state", "action", "dataset camera", "policy slot"):
        table.add_column(column, justify="right" if column in ("share", "frames", "fps", "state", "action") else "left")
    rows = describe_cameras(members)
    for member, quota in zip(members, quotas, strict=True):
        meta = member.dataset.meta
        sizes = [f"{quota / sum(quotas):.1%}", str(len(member.dataset)), str(meta.fps)]
        leading = [member.name, *sizes, str(member.state_dim), str(member.action_dim)]
        for row in (row for row in rows if row["member"] == member.name):
            camera, slot = _short(row["camera"]), _short(row["slot"])
            table.add_row(*leading, camera or "absent: 0 tokens", slot or "left out: not read")
            leading = [""] * len(leading)
        table.add_section()
    return table


def _short(camera: str | None) -> str | None:
    return camera.removeprefix("observation.images.") if camera is not None else None
