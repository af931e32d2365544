# SPDX-License-Identifier: Apache-2.0
"""Each embodiment of a mixture as a policy of its own in the checkpoint.

Beside upstream's files a checkpoint gets ``pretrained_model/embodiments/<member>/``: a complete pretrained model with
the member's action size, its processors (statistics, camera names) and a link to the weights. Plain LeRobot loads it:
``lerobot-eval --policy.path=<checkpoint>/pretrained_model/embodiments/<member>``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lerobot.configs.policies import PreTrainedConfig

from embodix.data.processors import ProcessorPair

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
