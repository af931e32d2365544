# SPDX-License-Identifier: Apache-2.0
"""Add trained adapters into the weights that they stand beside: a model folder that plain upstream loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lerobot.configs.train import TRAIN_CONFIG_NAME
from lerobot.policies.factory import get_policy_class

from embodix.checkpoints.finished_folder import copy_files, finished_folder
from embodix.checkpoints.model_folder import ModelFolder
from embodix.checkpoints.policy_loading import policy_config, prepared_host
from embodix.policies.adapters import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from embodix.policies.quantizers import CONFIG_FILE
from embodix.tensor_file import WEIGHTS_FILE
from embodix.training.checkpoint import OVERRIDES_FILE

LEFT_OUT = (ADAPTER_FILE, ADAPTER_CONFIG_FILE, "README.md")  # PEFT's own card tells how to load adapters


@dataclass(frozen=True)
class Merged:
    """What was merged.

    Attributes:
        base: the model whose weights the adapters were added to.
        num_adapters: layers that had one.
    """

    base: str
    num_adapters: int


def merge_adapters(source: ModelFolder, output: Path, base: str | None = None, tokenizer: str | None = None) -> Merged:
    """Write the merged policy of a model folder with adapters.

    Args:
        source: a model with adapters.
        output: the folder that is written.
        base: the model that the adapters stand beside; None for where they were trained.
        tokenizer: folder of an offline tokenizer; None for the run's.

    Raises:
        ValueError: no adapters, adapters that can't be merged, one embodiment of a mixture, no base, or an output that
            exists.
    """
    if output.exists():
        raise ValueError(f"{output} exists. Give another folder.")
    source = source.local()
    source.require_whole_mixture()
    folder = Path(source.model)
    found = base or source.adapter_base()
    if found is None:
        raise ValueError(f"lerobot merge takes a checkpoint with adapters ({ADAPTER_FILE}); {folder} holds none.")
    policy, num_adapters = _merged_policy(source, found, tokenizer)
    with finished_folder(output) as unfinished:
        policy.save_pretrained(unfinished)
        _copy_files(folder, unfinished)
    return Merged(found, num_adapters)


def _merged_policy(source: ModelFolder, base: str, tokenizer: str | None) -> tuple[Any, int]:
    """The policy with the adapters in its weights, on the CPU, and how many there were."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    run_cfg = source.compose_run(source.policy_type(), [])
    with prepared_host(source, run_cfg, tokenizer):
        config = policy_config(source, {"device": "cpu"})
        policy = get_policy_class(config.type).from_pretrained(base, config=config)
        adapted = PeftModel.from_pretrained(policy, source.model)
    layers = sum(isinstance(module, BaseTunerLayer) for module in adapted.modules())
    if not hasattr(adapted.base_model, "merge_and_unload"):
        kind = adapted.active_peft_config.peft_type.value
        raise ValueError(f"Adapters of {kind} can't be merged into weights; evaluate {source.model} as it is.")
    return adapted.merge_and_unload(safe_merge=True), layers


def _copy_files(source: Path, folder: Path) -> None:
    """Everything of a model folder but its adapters: configs, processors, and the members of a mixture."""
    members = copy_files(source, folder, LEFT_OUT)
    for member in members:
        for name in (ADAPTER_FILE, ADAPTER_CONFIG_FILE):
            (member / name).unlink()
        (member / WEIGHTS_FILE).symlink_to(Path("..") / ".." / WEIGHTS_FILE)
    for config in (folder, *members):
        _change_json(config / CONFIG_FILE, _without_peft)
    _change_json(folder / TRAIN_CONFIG_NAME, lambda run: {**run, "peft": None, "policy": _without_peft(run["policy"])})
    _change_json(folder / OVERRIDES_FILE, _without_peft_overrides)


def _without_peft(policy: Mapping[str, Any]) -> dict[str, Any]:
    return {**policy, "use_peft": False}


def _without_peft_overrides(overrides: list[str]) -> list[str]:
    names = [override.lstrip("+").partition("=")[0] for override in overrides]
    return [o for o, name in zip(overrides, names, strict=True) if name != "peft" and not name.startswith("peft.")]


def _change_json(path: Path, change: Any) -> None:
    """Rewrite a file of the folder that a run of embodix or of plain upstream may lack."""
    if path.is_file():
        path.write_text(json.dumps(change(json.loads(path.read_text())), indent=4) + "\n")
