# SPDX-License-Identifier: Apache-2.0
"""The processors of a checkpoint: whole, with the statistics that they normalise with, or an error that says so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import make_pre_post_processors
from lerobot.utils.constants import POLICY_POSTPROCESSOR_DEFAULT_NAME, POLICY_PREPROCESSOR_DEFAULT_NAME

from embodix.data.statistics import require_statistics

NAMES = (POLICY_PREPROCESSOR_DEFAULT_NAME, POLICY_POSTPROCESSOR_DEFAULT_NAME)
COPY = "Copy the file from the run that trained it, or save the checkpoint again."


def load_processors(
    config: PreTrainedConfig, model: str, preprocessor_overrides: Mapping[str, Any] | None = None
) -> tuple[Any, Any]:
    """Upstream's pre- and postprocessor of a model folder, or of a model on the hub.

    Raises:
        ValueError: a file that is missing or damaged, or statistics that the policy needs and the checkpoint lacks.
    """
    if Path(model).is_dir():
        _require_files(Path(model))
    overrides = dict(preprocessor_overrides or {})
    try:
        processors = make_pre_post_processors(config, pretrained_path=model, preprocessor_overrides=overrides)
    except (ImportError, KeyError, TypeError, FileNotFoundError) as error:  # a step that is unknown or changed
        raise ValueError(
            f"The processors of {model} can't be made here: {error}. Are they of this LeRobot, with its plugins?"
        ) from error
    remedy = "Train from a data set that has them, or give another checkpoint."
    require_statistics(processors, f"the checkpoint {model}", remedy=remedy)
    return processors


def require_whole_processors(folder: Path) -> None:
    """Refuse a model folder that has some of its processors' files; one without any is of a model alone.

    Raises:
        ValueError: names the file.
    """
    if any((folder / f"{name}.json").exists() for name in NAMES):
        _require_files(folder)


def _require_files(folder: Path) -> None:
    for name in NAMES:
        for step in _steps(folder / f"{name}.json"):
            state = step.get("state_file")
            if state is not None:
                _require_tensors(folder / str(state), str(step.get("registry_name", step.get("class"))))


def _steps(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(
            f"A checkpoint keeps how its inputs and actions are processed in {path}, which is missing. {COPY}"
        )
    try:
        steps: list[dict[str, Any]] = json.loads(path.read_text())["steps"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the JSON of a processor ({type(error).__name__}: {error}). {COPY}") from error
    return steps


def _require_tensors(path: Path, step: str) -> None:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ValueError(f"The statistics of {step} are in {path}, which is missing. {COPY}")
    try:
        with safe_open(path, "pt") as tensors:
            tensors.keys()
    except (SafetensorError, OSError) as error:
        raise ValueError(f"The statistics of {step} in {path} can't be read: {error}. {COPY}") from error
