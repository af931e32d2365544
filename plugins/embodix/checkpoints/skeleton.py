# SPDX-License-Identifier: Apache-2.0
"""A policy of a checkpoint without memory: its modules, names, shapes and dtypes on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import draccus
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class
from torch import nn

from embodix.patching import patched
from embodix.policies.support import sizes_patch, support_of

MAX_NAMES = 12


class WeightLoadError(ValueError):
    """A checkpoint did not give every tensor of the policy its value."""


def policy_skeleton(
    config: PreTrainedConfig, architecture: Mapping[str, Any] | None = None, device: str = "meta"
) -> nn.Module:
    """Upstream's policy with the names and dtypes that it has once it is loaded, on the meta device or a real one.

    Args:
        config: of the checkpoint.
        architecture: its sizes; None for those of the public checkpoint.
        device: where it is built, with random weights.

    Raises:
        ValueError: a policy type whose sizes embodix does not know.
    """
    if architecture is None:
        architecture = support_of(config.type).public_architecture()
    config = copy.deepcopy(config)
    config.device = device
    with ExitStack() as stack:
        if architecture is not None:
            stack.enter_context(patched({sizes_patch(config.type): {"architecture": architecture}}))
        stack.enter_context(torch.device(device))
        policy: nn.Module = get_policy_class(config.type)(config)
    return policy


def unfed_config(fields: Mapping[str, Any]) -> PreTrainedConfig:
    """Upstream's config from the fields of a policy group, for a policy that is built but never given a sample.

    Raises:
        ValueError: fields that upstream's config does not have.
    """
    size = list(fields.get("image_resolution") or fields.get("image_size") or (224, 224))
    inputs = {
        "observation.images.camera": {"type": "VISUAL", "shape": [3, *size]},
        "observation.state": {"type": "STATE", "shape": [fields["max_state_dim"]]},
    }
    named = {name: value for name, value in fields.items() if value is not None}
    return fed_config(named, inputs, {"action": {"type": "ACTION", "shape": [fields["max_action_dim"]]}})


def fed_config(
    fields: Mapping[str, Any], inputs: Mapping[str, Mapping[str, Any]], outputs: Mapping[str, Mapping[str, Any]]
) -> PreTrainedConfig:
    """Upstream's config from the fields of a policy group and the ``type`` and ``shape`` of its features.

    Raises:
        ValueError: fields that upstream's config does not have.
    """
    features = {"input_features": dict(inputs), "output_features": dict(outputs), "device": "cpu"}
    try:
        config: PreTrainedConfig = draccus.decode(PreTrainedConfig, {**fields, **features})
    except Exception as error:  # draccus raises several unrelated kinds for a bad value
        raise ValueError(f"Upstream's config rejects a value: {error}") from error
    return config


def source_names(policy: nn.Module, file_names: Iterable[str]) -> dict[str, str]:
    """Name in the policy -> name in a checkpoint's file, as upstream maps them when it loads one.

    Args:
        policy: the skeleton.
        file_names: in the order of the file.

    Raises:
        WeightLoadError: names that the policy has not, or that the file lacks.
    """
    named = {name: _FileName(name) for name in file_names}
    renamed = support_of(policy.config.type).policy_names(policy, named)  # type: ignore[union-attr, arg-type]
    found = {name: value.name for name, value in renamed.items()}
    wanted = set(policy.state_dict())
    missing = sorted(name for name in wanted - set(found) if not name.endswith("lm_head.weight"))
    unexpected = sorted(set(found) - wanted)
    if missing or unexpected:
        raise WeightLoadError(
            "The checkpoint's tensors are not those of its policy.\n"
            f"{listed({'missing': missing, 'unexpected': unexpected})}\n"
            "Is the architecture the checkpoint's own?"
        )
    return found


@dataclass(frozen=True)
class _FileName:
    """Stands for a tensor while upstream renames it."""

    name: str

    def clone(self) -> _FileName:
        return self


def listed(parts: Mapping[str, Sequence[str]]) -> str:
    """A paragraph for each title with its tensors, the first ``MAX_NAMES`` by name."""
    return "\n".join(_paragraph(title, names) for title, names in parts.items())


def _paragraph(title: str, names: Sequence[str]) -> str:
    shown = [f"    {name}" for name in names[:MAX_NAMES]]
    if len(names) > MAX_NAMES:
        shown.append(f"    ... and {len(names) - MAX_NAMES} more")
    return "\n".join([f"  {title} ({len(names)}):", *shown])
