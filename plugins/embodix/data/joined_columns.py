# SPDX-License-Identifier: Apache-2.0
"""State or action that a data set keeps in several columns, or in a column of single numbers, as one vector.

``dataset.join`` says what a key is made of, in order: ``{action: [action.left_arm, action.gripper]}``. The parts'
names and statistics are joined in the same order, and the parts themselves are no features any more. A state or action
of one dimension is joined by itself: LeRobot reads it as single numbers, which lose their axis in a batch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Join = Mapping[str, Sequence[str]]
DatasetPlace = tuple[str, str | None]  # repo id and root
JOIN = "join"
VECTORS = ("observation.state", "action")
NOT_NUMBERS = ("image", "video", "string", "language")


def dataset_place(repo_id: str, root: str | Path | None) -> DatasetPlace:
    """What tells a data set from another of a run; several may have one repo id in folders of their own."""
    return repo_id, None if root is None else str(Path(root))


def decode_join(place: str, node: Any) -> dict[str, list[str]]:
    """Read ``dataset.join``.

    Args:
        place: the config key, for messages.

    Raises:
        ValueError: no mapping of a key to a list of keys.
    """
    if node is None:
        return {}
    if not isinstance(node, Mapping):
        raise ValueError(f"{place} maps a key to the keys that it is made of, in order; got {node!r}.")
    joined = {str(key): [parts] if isinstance(parts, str) else list(parts or []) for key, parts in node.items()}
    for key, parts in joined.items():
        if not parts or not all(isinstance(part, str) for part in parts):
            raise ValueError(f"{place}.{key} lists the keys that it is made of; got {node[key]!r}.")
        if len(set(parts)) < len(parts):
            raise ValueError(f"{place}.{key} names a key twice: {', '.join(parts)}.")
    return joined


def complete_join(join: Join, features: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """The join with a state or action of one dimension joined by itself.

    Raises:
        ValueError: a part that the data set does not have, that is no vector of numbers, or that is used twice.
    """
    own = {key: [key] for key in VECTORS if key in features and tuple(features[key]["shape"]) == (1,)}
    taken = [part for parts in join.values() for part in parts]
    complete = {**{key: parts for key, parts in own.items() if key not in taken}, **join}
    for key, parts in complete.items():
        for part in parts:
            _require_numbers(key, part, features)
    repeated = sorted({part for part in taken if taken.count(part) > 1})
    if repeated:
        raise ValueError(f"dataset.join puts {', '.join(repeated)} into two keys; a column goes into one.")
    kept = set(features) - set(taken)
    hidden = [key for key in complete if key in kept and key not in own]
    if hidden:
        raise ValueError(
            f"dataset.join would hide the data set's own {', '.join(hidden)}; name it among its parts, or leave it out."
        )
    return {key: list(parts) for key, parts in complete.items()}


def _require_numbers(key: str, part: str, features: Mapping[str, Mapping[str, Any]]) -> None:
    if part not in features:
        near = difflib.get_close_matches(part, list(features), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"dataset.join.{key} names {part!r}; the data set has {', '.join(features)}.{hint}")
    feature = features[part]
    if feature["dtype"] in NOT_NUMBERS or len(feature["shape"]) != 1:
        raise ValueError(
            f"dataset.join.{key} joins vectors of numbers; {part!r} is {feature['dtype']} {feature['shape']}."
        )


def joined_features(join: Join, features: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Features with the joined keys in the place of their parts, as float32 vectors with the parts' names."""
    taken = {part for parts in join.values() for part in parts}
    result = {key: dict(feature) for key, feature in features.items() if key not in taken}
    for key, parts in join.items():
        width = sum(int(features[part]["shape"][0]) for part in parts)
        names = [name for part in parts for name in _names(part, features[part])]
        result[key] = {"dtype": "float32", "shape": (width,), "names": names}
    return result


def _names(part: str, feature: Mapping[str, Any]) -> list[str]:
    """One name a dimension; numbered where the data set has none."""
    names, width = feature.get("names"), int(feature["shape"][0])
    if isinstance(names, Mapping):
        names = next(iter(names.values()), None)
    if isinstance(names, list) and len(names) == width:
        return [str(name) for name in names]
    return [part if width == 1 else f"{part}.{d}" for d in range(width)]


def joined_stats(join: Join, stats: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Statistics with the joined keys' in the place of their parts'; those that a part lacks are left out."""
    taken = {part for parts in join.values() for part in parts}
    result = {key: dict(values) for key, values in stats.items() if key not in taken}
    for key, parts in join.items():
        if not all(part in stats for part in parts):
            continue
        common = [name for name in stats[parts[0]] if all(name in stats[part] for part in parts)]
        vectors = {name: [np.asarray(stats[part][name]).reshape(-1) for part in parts] for name in common}
        result[key] = {name: own[0] if name == "count" else np.concatenate(own) for name, own in vectors.items()}
    return result


def joined_rows(join: Join, dataset: Any) -> Any:
    """A Hugging Face ``Dataset`` with the joined columns in the place of their parts; its transform is not kept."""
    import datasets
    import pyarrow as pa

    taken = sorted({part for parts in join.values() for part in parts})
    columns = {
        key: np.concatenate([_vectors(dataset.data.column(part)) for part in parts], 1) for key, parts in join.items()
    }
    result = dataset.with_format(None).remove_columns(taken)
    for key, values_ND in columns.items():
        flat = pa.array(values_ND.astype(np.float32).reshape(-1))
        feature = datasets.Sequence(datasets.Value("float32"), length=values_ND.shape[1])
        result = result.add_column(key, pa.FixedSizeListArray.from_arrays(flat, values_ND.shape[1]), feature=feature)
    return result


def _vectors(column: Any) -> np.ndarray:
    """``[N, D]`` of an Arrow column of numbers or of lists of one length."""
    import pyarrow as pa

    parts = []
    for chunk in column.chunks:
        rows = len(chunk)
        while pa.types.is_nested(chunk.type):
            chunk = chunk.flatten()
        parts.append(chunk.to_numpy(zero_copy_only=False).reshape(rows, -1))
    return np.concatenate(parts)
