# SPDX-License-Identifier: Apache-2.0
"""Upstream's processors for one embodiment, or for the loader's workers: the same factory, called with other values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.types import FeatureType
from lerobot.processor import DeviceProcessorStep, RenameObservationsProcessorStep
from lerobot.utils.constants import ACTION

from embodix.data.mixture import Member

ProcessorPair = tuple[Any, Any]


@dataclass(frozen=True)
class ProcessorCall:
    """The call of upstream's ``make_pre_post_processors`` that the training loop makes.

    It can be made again for another embodiment or device: with that embodiment's statistics, features and cameras in
    the places where upstream puts the data set's.
    """

    make: Callable[..., ProcessorPair]
    policy_cfg: PreTrainedConfig
    pretrained_path: str | None
    options: Mapping[str, Any]

    def build(self, member: Member | None = None, device: str | None = None) -> ProcessorPair:
        """Upstream's pre- and postprocessor.

        Args:
            member: the embodiment; None for what the loop asked for.
            device: where the preprocessor leaves its tensors; None for the policy's device.
        """
        policy_cfg = copy.deepcopy(self.policy_cfg) if member is None else member_config(self.policy_cfg, member)
        options = dict(self.options) if member is None else _member_options(self.options, policy_cfg, member)
        pre, post = self.make(policy_cfg=policy_cfg, pretrained_path=self.pretrained_path, **options)
        if device is not None:
            _set_device(pre, device)
        if member is not None:
            _set_embodiment(pre, member, policy_cfg)
        return pre, post


def member_config(policy_cfg: PreTrainedConfig, member: Member) -> PreTrainedConfig:
    """The policy's config for one embodiment: its action and state sizes; slots it lacks stay, as missing cameras."""
    own = member.features
    config = copy.deepcopy(policy_cfg)
    config.output_features = {key: feature for key, feature in own.items() if feature.type is FeatureType.ACTION}
    sizes = {key: feature for key, feature in own.items() if feature.type is FeatureType.STATE}
    config.input_features = {**(config.input_features or {}), **sizes}
    if hasattr(config, "embodiment_tag") and member.spec.embodiment_tag is not None:
        config.embodiment_tag = member.spec.embodiment_tag
    if hasattr(config, "action_feature_names"):
        names = member.dataset.meta.features[ACTION].get("names")
        config.action_feature_names = list(names) if names is not None else None
    return config


def _member_options(options: Mapping[str, Any], config: PreTrainedConfig, member: Member) -> dict[str, Any]:
    changed = {**options, "dataset_stats": member.stats}
    features = {**(config.input_features or {}), **(config.output_features or {})}
    steps = {
        "preprocessor_overrides": {"normalizer_processor": {"stats": member.stats, "features": features}},
        "postprocessor_overrides": {
            "unnormalizer_processor": {"stats": member.stats, "features": config.output_features}
        },
    }
    for place, own in steps.items():
        if place in options:
            overrides = {step: dict(values) for step, values in options[place].items()}
            for step, values in own.items():
                if step in overrides:
                    overrides[step] |= values
            changed[place] = overrides
    return changed


def _set_device(preprocessor: Any, device: str) -> None:
    for step in preprocessor.steps:
        if isinstance(step, DeviceProcessorStep):
            step.device = device
            step.__post_init__()


def _set_embodiment(preprocessor: Any, member: Member, config: PreTrainedConfig) -> None:
    for step in preprocessor.steps:
        if isinstance(step, RenameObservationsProcessorStep):
            step.rename_map = {camera: slot for camera, slot in member.slots.items() if camera != slot}
        if hasattr(step, "embodiment_tag"):
            step.embodiment_tag = config.embodiment_tag
