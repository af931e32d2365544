# SPDX-License-Identifier: Apache-2.0
"""Whether the data set's keys are those that the policy reads; where not, the line that renames or joins them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

from embodix.checks.catalogue import found
from embodix.checks.dataset_tables import DatasetTables
from embodix.checks.findings import Finding, Severity
from embodix.checks.run_needs import RunNeeds

NUMBERS = (
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
)
USUAL = {
    OBS_STATE: ("state", "states", "qpos", "proprio", "joint", "position", "pose"),
    ACTION: ("action", "actions", "command", "target", "ctrl"),
}
BOOKKEEPING = {
    "timestamp",
    "frame_index",
    "episode_index",
    "index",
    "task_index",
    "next.done",
    "next.reward",
    "next.success",
}


def naming_findings(tables: DatasetTables, needs: RunNeeds) -> Iterator[Finding]:
    """State, action and cameras by name."""
    features = tables.features
    for name in needs.rename_map:
        if name not in features:
            near = _nearest(name, features)
            yield found(
                "rename_unknown",
                name,
                f"rename_map names it; the data set has {', '.join(_own(features))}",
                f"Did you mean {near[0]}?" if near else "Name a key of the data set.",
                severity="warning",
            )
    present = {needs.rename_map.get(key, key): key for key in features}
    for wanted in (OBS_STATE, ACTION):
        if wanted not in present:
            yield _missing(wanted, features, "error" if needs.language or wanted == ACTION else "warning")
        else:
            yield from _usable(wanted, features[present[wanted]], needs)
    yield from _camera_findings(tables, needs)


def _missing(wanted: str, features: Mapping[str, Any], severity: Severity) -> Finding:
    """With the line that makes it: one key renamed, or several joined in the order of the data set."""
    parts = _parts(wanted, features)
    if parts:
        remedy = f"Name what it is made of, in order: 'dataset.join={{{wanted}: [{', '.join(parts)}]}}'."
    else:
        remedy = f"Name the keys that it is made of: 'dataset.join={{{wanted}: [<key>, ...]}}'."
    if wanted == OBS_STATE and len(parts) == 1:
        remedy = f"Rename it: '+rename_map={{{parts[0]}: {wanted}}}', or {remedy[0].lower()}{remedy[1:]}"
    got = f"the policy reads it; the data set has {', '.join(_own(features))}"
    return found("key_missing", wanted, got, remedy, severity=severity)


def _parts(wanted: str, features: Mapping[str, Any]) -> list[str]:
    """Numeric keys that are meant, by their names."""
    numeric = [key for key in _own(features) if features[key]["dtype"] in NUMBERS and len(features[key]["shape"]) == 1]
    prefixed = [key for key in numeric if key.startswith((f"{wanted}.", f"{wanted}_"))]
    if prefixed:
        return prefixed
    words = USUAL[wanted]
    named = [key for key in numeric if key.replace("observation.", "").split(".")[-1].lower() in words]
    return named or [key for key in numeric if any(word in key.lower() for word in words)][:8]


def _usable(key: str, feature: Mapping[str, Any], needs: RunNeeds) -> Iterator[Finding]:
    if feature["dtype"] not in NUMBERS or len(feature["shape"]) != 1:
        shape = "x".join(map(str, feature["shape"]))
        yield found(
            "dtype_unusable",
            key,
            f"is {feature['dtype']} of shape {shape}, not a vector of numbers",
            f"Join numeric keys to it: 'dataset.join={{{key}: [<key>, ...]}}'.",
        )
        return
    width, widest = int(feature["shape"][0]), needs.widths.get(key)
    if widest is not None and width > widest:
        name = "max_action_dim" if key == ACTION else "max_state_dim"
        yield found(
            "too_wide",
            key,
            f"has {width} dimensions, {needs.policy} takes {widest}",
            f"Set policy.{name}={width} (new weights for the wider layers), or join fewer keys by dataset.join.",
        )


def _camera_findings(tables: DatasetTables, needs: RunNeeds) -> Iterator[Finding]:
    cameras = {needs.rename_map.get(key, key): key for key in tables.cameras}
    if not cameras:
        severity: Severity = "error" if needs.language else "warning"
        got = "the data set has no image or video"
        yield found("camera_missing", OBS_IMAGES, got, "Record with a camera.", severity=severity)
        return
    if not needs.cameras:
        return
    strangers = [key for slot, key in cameras.items() if slot not in needs.cameras]
    if strangers:
        yield found(
            "camera_unknown",
            ", ".join(strangers),
            f"is in no slot of the policy, whose slots are {', '.join(needs.cameras)}",
            _rename_cameras(strangers, needs.cameras, cameras),
        )


def _rename_cameras(strangers: Sequence[str], slots: Sequence[str], cameras: Mapping[str, str]) -> str:
    free = [slot for slot in slots if slot not in cameras]
    pairs = []
    for stranger in strangers:
        near = difflib.get_close_matches(stranger, free, n=1, cutoff=0) if free else []
        if near:
            free.remove(near[0])
            pairs.append(f"{stranger}: {near[0]}")
    line = f"Rename: '+rename_map={{{', '.join(pairs)}}}' (look which camera is which), or " if pairs else ""
    return f"{line}train with the data's own cameras: policy.input_features={{}}."


def _own(features: Mapping[str, Any]) -> list[str]:
    return [key for key in features if key not in BOOKKEEPING]


def _nearest(name: str, features: Mapping[str, Any]) -> list[str]:
    return difflib.get_close_matches(name, list(features), n=1)
