# SPDX-License-Identifier: Apache-2.0
"""Each embodiment of a mixture as a policy of its own: its config, its processors, its folder in a checkpoint.

Upstream's own factory makes the processors, called with the embodiment's values. Beside upstream's files a checkpoint
gets ``pretrained_model/embodiments/<member>/``: a complete pretrained model with the member's action size, its
processors (statistics, camera names) and a link to the weights. Plain LeRobot loads it:
``lerobot-eval --policy.path=<checkpoint>/pretrained_model/embodiments/<member>``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.types import FeatureType
from lerobot.processor import DeviceProcessorStep, RenameObservationsProcessorStep
from lerobot.utils.constants import ACTION

from embodix.data.mixture_dataset import Member

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


EMBODIMENTS_DIR = "embodiments"
WEIGHT_FILES = ("model.safetensors", "adapter_model.safetensors", "adapter_config.json")


def save_embodiments(
    model_dir: Path,
    names: Sequence[str],
    configs: Sequence[PreTrainedConfig],
    processors: Sequence[ProcessorPair],
) -> None:
    """Write each member's config and processors, and links to the weights, below ``model_dir``."""
    for member, config, pair in zip(names, configs, processors, strict=True):
        folder = model_dir / EMBODIMENTS_DIR / member
        folder.mkdir(parents=True, exist_ok=True)
        config._save_pretrained(folder)
        for processor in pair:
            processor.save_pretrained(folder)
        for name in WEIGHT_FILES:
            if (model_dir / name).exists():
                (folder / name).symlink_to(Path("..") / ".." / name)


def load_embodiment(model_dir: Path, name: str) -> tuple[Any, MemberPostprocessor]:
    """The processors of one member of a mixture, from a checkpoint's ``pretrained_model`` folder.

    They serve the policy of the whole mixture, whose actions are as wide as the widest member's, and the member's own.

    Raises:
        ValueError: no such member; the message lists those of the checkpoint.
    """
    from lerobot.policies.factory import make_pre_post_processors

    folder = embodiment_folder(model_dir, name)
    config = PreTrainedConfig.from_pretrained(folder)
    preprocessor, postprocessor = make_pre_post_processors(config, pretrained_path=str(folder))
    assert config.output_features is not None
    return preprocessor, MemberPostprocessor(postprocessor, config.output_features["action"].shape[0])


def embodiment_folder(model_dir: Path, name: str) -> Path:
    """The member's folder: a pretrained model of its own.

    Raises:
        ValueError: no such member; the message lists those of the checkpoint.
    """
    parent = model_dir / EMBODIMENTS_DIR
    folder = parent / name
    if not folder.is_dir():
        known = sorted(path.name for path in parent.iterdir()) if parent.is_dir() else []
        raise ValueError(f"{model_dir} holds no embodiment {name!r}; it holds: {', '.join(known) or 'none'}.")
    return folder


class MemberPostprocessor:
    """Upstream's postprocessor of one member, given actions as wide as the widest member's."""

    def __init__(self, upstream: Any, action_dim: int) -> None:
        self._upstream = upstream
        self._action_dim = action_dim

    def __call__(self, action: Any) -> Any:
        return self._upstream(action[..., : self._action_dim])

    def __getattr__(self, name: str) -> Any:
        if name == "_upstream":
            raise AttributeError(name)
        return getattr(self._upstream, name)
