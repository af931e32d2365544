# SPDX-License-Identifier: Apache-2.0
"""Checks of a local dataset before a run starts: it exists, it has tasks, and its cameras are known to the policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lerobot.configs.train import TrainPipelineConfig
from lerobot.utils.constants import HF_LEROBOT_HOME, OBS_IMAGES

from embodix.data.mixture_spec import decode_mixture, is_mixture, require_local_members


def require_trainable_dataset(host_cfg: TrainPipelineConfig, dataset_node: Mapping[str, Any]) -> None:
    """Check what can be checked without loading data; a dataset only on the hub is left to upstream.

    Args:
        host_cfg: upstream's config.
        dataset_node: the config's ``dataset``, which may ask for a mixture.

    Raises:
        ValueError: no dataset at an explicit root, no task strings, or cameras that the policy and the dataset
            name differently (both lists are printed).
    """
    if is_mixture(dataset_node):
        require_local_members(decode_mixture(dataset_node))
        return
    root = Path(host_cfg.dataset.root) if host_cfg.dataset.root else HF_LEROBOT_HOME / host_cfg.dataset.repo_id
    info_path = root / "meta" / "info.json"
    if not info_path.is_file():
        if host_cfg.dataset.root is None:
            return
        raise ValueError(
            f"No LeRobotDataset at dataset.root={root} (meta/info.json is missing). "
            "Record one with `lerobot data <source>`, or give the folder of an existing dataset."
        )
    if not (root / "meta" / "tasks.parquet").is_file():
        raise ValueError(
            f"The dataset at {root} has no task strings (meta/tasks.parquet is missing), which a language-conditioned "
            "policy needs. Re-record with a `task` in every frame, or convert it with upstream's dataset tools."
        )
    info: dict[str, Any] = json.loads(info_path.read_text())
    _require_known_cameras(host_cfg, info["features"])


def _require_known_cameras(host_cfg: TrainPipelineConfig, features: dict[str, Any]) -> None:
    policy = host_cfg.policy
    expected = {key for key in (policy.input_features or {}) if key.startswith(OBS_IMAGES)} if policy else set()
    present = {key for key, feature in features.items() if feature["dtype"] in ("image", "video")}
    present = {host_cfg.rename_map.get(key, key) for key in present}
    if not expected or present <= expected:
        return
    raise ValueError(
        f"Camera {', '.join(sorted(present - expected))} of the dataset is in no slot of the policy. "
        f"Policy slots: {', '.join(sorted(expected))}. Dataset cameras: {', '.join(sorted(present))}. "
        "Rename with +rename_map={<dataset key>: <policy key>}, or train with policy.input_features={}."
    )
