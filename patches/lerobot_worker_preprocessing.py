# SPDX-License-Identifier: Apache-2.0
"""Let the run decide where upstream's preprocessor runs: in the training loop, or where the samples are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embodix.patching import Patch, replace_attribute

PATCH = Patch(
    name="lerobot_worker_preprocessing",
    target="lerobot.scripts.lerobot_train.make_pre_post_processors",
    requires={"lerobot": ">=0.5.1,<0.5.2"},
    symptom="Tokenising and normalising run in the training process, between two steps, with one set of statistics "
    "for all samples.",
    upstream="none found; upstream calls the preprocessor in its loop (lerobot/scripts/lerobot_train.py)",
    why_safe="The name in the training script only; upstream's factory builds every processor, and what the loop gets "
    "passes raw batches to upstream's own.",
    remove_when="upstream's train() takes a collate function and processors",
)


def apply(build: Callable[..., tuple[Any, Any]] | None = None) -> Callable[[], None]:
    """Patch the training script's name.

    Args:
        build: called with upstream's factory, the policy's config, the path of saved processors and the factory's
            other arguments; returns pre- and postprocessor. None calls the factory.
    """
    from lerobot.scripts import lerobot_train

    upstream = lerobot_train.make_pre_post_processors

    def make_pre_post_processors(policy_cfg: Any, pretrained_path: str | None = None, **kwargs: Any) -> Any:
        if build is None:
            return upstream(policy_cfg=policy_cfg, pretrained_path=pretrained_path, **kwargs)
        return build(upstream, policy_cfg, pretrained_path, kwargs)

    return replace_attribute(lerobot_train, "make_pre_post_processors", make_pre_post_processors)
