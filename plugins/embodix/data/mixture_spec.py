# SPDX-License-Identifier: Apache-2.0
"""What ``dataset=mixture`` may hold, checked before anything is loaded, and which camera fills which policy slot."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.types import FeatureType

from embodix.data.joined_columns import JOIN, complete_join, decode_join, joined_features

MEMBERS, EVALUATE_AS, STATISTICS = "members", "evaluate_as", "statistics"
HOST_FIELDS = ("image_transforms", "use_imagenet_stats", "streaming")
OWN_FIELDS = (JOIN, STATISTICS)  # of a data set's node, which upstream's config does not have


@dataclass(frozen=True)
class MemberSpec:
    """One dataset of a mixture.

    Attributes:
        name: of the embodiment, in tables and checkpoints.
        repo_id, root, episodes, revision, video_backend: as in upstream's ``DatasetConfig``.
        weight: its share of the draws, relative to the others'; None in every member for shares by size.
        cameras: dataset camera -> policy slot; a camera mapped to None, or left out of a mapping that is given, is
            not read. None keeps every camera under its own name. The prefix ``observation.images.`` may be left out.
        embodiment_tag: for a policy whose config has one; None for the config's.
        join: key -> the keys of the data set that it is made of, in order (``embodix.data.joined_columns``).
    """

    name: str
    repo_id: str
    root: str | None = None
    episodes: list[int] | None = None
    weight: float | None = None
    cameras: dict[str, str | None] | None = None
    embodiment_tag: str | None = None
    revision: str | None = None
    video_backend: str | None = None
    join: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class MixtureSpec:
    """A mixture as the config asks for it.

    Attributes:
        members: in the order of the config.
        evaluate_as: the member whose processors the checkpoint's top level and evaluation during training use.
        host: fields of upstream's ``DatasetConfig`` that hold for all members.
    """

    members: tuple[MemberSpec, ...]
    evaluate_as: str
    host: dict[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> list[float] | None:
        """The members' weights, None for shares by size."""
        weights = [member.weight for member in self.members if member.weight is not None]
        return weights or None

    @property
    def evaluated_index(self) -> int:
        return [member.name for member in self.members].index(self.evaluate_as)


def is_mixture(dataset_node: Mapping[str, Any]) -> bool:
    """Whether a config's ``dataset`` node asks for a mixture."""
    return MEMBERS in dataset_node


def is_own_field(name: str) -> bool:
    """Whether a field of a config's ``dataset`` node is embodix's, so that upstream's config does not have it."""
    return name in (*OWN_FIELDS, MEMBERS, EVALUATE_AS)


def host_dataset_fields(dataset_node: Mapping[str, Any]) -> dict[str, Any]:
    """What upstream's ``DatasetConfig`` is decoded from; for a mixture, a record of it under a name of its own."""
    if not is_mixture(dataset_node):
        return {key: value for key, value in dataset_node.items() if key not in OWN_FIELDS}
    own = {key: value for key, value in dataset_node.items() if key in HOST_FIELDS}
    return {"repo_id": "mixture/" + "+".join(dataset_node[MEMBERS] or {}), **own}


def decode_mixture(dataset_node: Mapping[str, Any]) -> MixtureSpec:
    """Read and check the ``dataset`` node of a mixture.

    Raises:
        ValueError: no members, unknown fields, weights that are not positive or not given to all, two cameras on one
            slot, or an ``evaluate_as`` that is no member.
    """
    _require_known("dataset", dataset_node, (MEMBERS, EVALUATE_AS, STATISTICS, *HOST_FIELDS))
    nodes = dataset_node[MEMBERS]
    if not isinstance(nodes, Mapping) or not nodes:
        raise ValueError(
            "dataset=mixture needs at least one member: "
            "'dataset.members={arm: {repo_id: user/arm, root: data/arm}, hand: {repo_id: user/hand}}'."
        )
    members = tuple(_decode_member(str(name), node) for name, node in nodes.items())
    _require_weights(members)
    names = [member.name for member in members]
    evaluate_as = str(dataset_node.get(EVALUATE_AS) or names[0])
    if evaluate_as not in names:
        raise ValueError(f"dataset.evaluate_as names a member; got {evaluate_as!r}, members: {', '.join(names)}.")
    host = {key: dataset_node[key] for key in HOST_FIELDS if key in dataset_node}
    if host.get("streaming"):
        raise ValueError("A mixture is read by index; set dataset.streaming=false.")
    return MixtureSpec(members, evaluate_as, host)


def _decode_member(name: str, node: Any) -> MemberSpec:
    place = f"dataset.members.{name}"
    if not isinstance(node, Mapping):
        raise ValueError(f"{place} is a mapping with a repo_id; got {node!r}.")
    known = tuple(f.name for f in dataclasses.fields(MemberSpec) if f.name != "name")
    _require_known(place, node, known)
    if not isinstance(node.get("repo_id"), str):
        raise ValueError(f"{place} needs repo_id, the name of its dataset; got {node.get('repo_id')!r}.")
    if not name.replace("_", "").replace("-", "").isalnum():
        raise ValueError(f"A member's name becomes a folder of the checkpoint: letters, digits, - and _; got {name!r}.")
    fields = dict(node)
    if fields.get("cameras") is not None:
        fields["cameras"] = _decode_cameras(place, fields["cameras"])
    fields[JOIN] = decode_join(f"{place}.{JOIN}", fields.get(JOIN))
    if fields.get("episodes") is not None and not fields["episodes"]:
        raise ValueError(f"{place}.episodes lists no episode; leave it out to use all of them.")
    return MemberSpec(name=name, **fields)


def _decode_cameras(place: str, cameras: Any) -> dict[str, str | None]:
    if not isinstance(cameras, Mapping):
        raise ValueError(f"{place}.cameras maps dataset cameras to policy slots; got {cameras!r}.")
    decoded = {camera_key(str(key)): None if slot is None else camera_key(str(slot)) for key, slot in cameras.items()}
    used = [slot for slot in decoded.values() if slot is not None]
    for slot in used:
        if used.count(slot) > 1:
            owners = [camera for camera, its_slot in decoded.items() if its_slot == slot]
            raise ValueError(
                f"{place}.cameras puts {' and '.join(owners)} on one slot, {slot}. Give each camera a slot of its own, "
                "or null to leave it out."
            )
    return decoded


def camera_key(name: str) -> str:
    """The full key of a camera or slot given with or without upstream's prefix."""
    return name if name.startswith("observation.") else f"observation.images.{name}"


def _require_weights(members: tuple[MemberSpec, ...]) -> None:
    given = [member for member in members if member.weight is not None]
    for member in given:
        if isinstance(member.weight, bool) or not isinstance(member.weight, int | float) or not member.weight > 0:
            raise ValueError(
                f"Weights are positive; dataset.members.{member.name}.weight is {member.weight!r}. "
                "Leave out a member that is not to be drawn."
            )
    if given and len(given) < len(members):
        missing = ", ".join(member.name for member in members if member.weight is None)
        raise ValueError(f"Give every member a weight, or none for shares by size; without one: {missing}.")


def _require_known(place: str, node: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in node:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{place} has no field {key!r}.{hint} Known: {', '.join(known)}.")


def require_local_members(spec: MixtureSpec) -> None:
    """Check what can be checked without loading data; a member only on the hub is left to upstream.

    Raises:
        ValueError: no dataset at an explicit root, no task strings, or no state or action in it.
    """
    for member in spec.members:
        if member.root is None:
            continue
        root, place = Path(member.root), f"dataset.members.{member.name}"
        info_path = root / "meta" / "info.json"
        if not info_path.is_file():
            raise ValueError(
                f"No LeRobotDataset at {place}.root={root} (meta/info.json is missing). "
                "Record one with `lerobot data <source>`, or give the folder of an existing dataset."
            )
        if not (root / "meta" / "tasks.parquet").is_file():
            raise ValueError(
                f"{place}: the dataset at {root} has no task strings (meta/tasks.parquet is missing), which a "
                "language-conditioned policy needs. Re-record with a `task` in every frame."
            )
        features = _features(info_path)
        features = joined_features(complete_join(member.join, features), features)
        lacking = [key for key in ("observation.state", "action") if key not in features]
        if lacking:
            raise ValueError(f"{place}: the dataset at {root} has no {' and no '.join(lacking)}.")


def _features(info_path: Path) -> dict[str, Any]:
    try:
        features: dict[str, Any] = json.loads(info_path.read_text())["features"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{info_path} is no JSON object with features: {error!r}. Take an undamaged copy.") from error
    return features


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
