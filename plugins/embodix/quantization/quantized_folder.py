# SPDX-License-Identifier: Apache-2.0
"""The model folder that ``lerobot quantize`` writes: all of the source's files, with its weights quantized."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embodix.checkpoints.finished_folder import copy_files
from embodix.policies.quantizers import CONFIG_FILE, CONFIG_KEY
from embodix.tensor_file import DIGESTS_FILE, INDEX_FILE, WEIGHTS_FILE
from embodix.training.checkpoint import OVERRIDES_FILE

RECORD_FILE = "quantize.json"


def require_place(source: Path, output: Path, *, overwrite: bool) -> None:
    """Refuse a folder that may not be written.

    Raises:
        ValueError: it is the source, exists without ``overwrite``, or is no earlier result of ``lerobot quantize``.
    """
    if output.resolve() == source.resolve():
        raise ValueError(f"The quantized model needs a folder of its own; got the checkpoint's, {output}.")
    if not output.exists():
        return
    if not overwrite:
        raise ValueError(f"{output} exists. Give another folder, or replace it with overwrite=true.")
    if not (output / RECORD_FILE).is_file():
        raise ValueError(
            f"overwrite=true replaces what `lerobot quantize` has written ({RECORD_FILE} tells); {output} is something "
            "else. Remove it yourself, or give another folder."
        )


def copy_model_files(source: Path, folder: Path, quantization_config: Mapping[str, Any], overrides: list[str]) -> None:
    """Everything of a model folder but its weights: configs, processors, and the members of a mixture.

    Args:
        source: a model folder.
        folder: where the quantized model is written.
        quantization_config: put into every ``config.json``, so that plain LeRobot refuses the folder.
        overrides: of the run, the quantization included.
    """
    members = copy_files(source, folder, _weight_files(source))
    for member in members:
        (member / DIGESTS_FILE).symlink_to(Path("..") / ".." / DIGESTS_FILE)
    for config in (folder / CONFIG_FILE, *(member / CONFIG_FILE for member in members)):
        fields = {**json.loads(config.read_text()), CONFIG_KEY: dict(quantization_config)}
        config.write_text(json.dumps(fields, indent=4) + "\n")
    (folder / OVERRIDES_FILE).write_text(json.dumps(overrides, indent=2) + "\n")


def _weight_files(source: Path) -> Sequence[str]:
    """Names of the files that hold the weights."""
    index = source / INDEX_FILE
    shards = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else []
    return [WEIGHTS_FILE, INDEX_FILE, *shards]
