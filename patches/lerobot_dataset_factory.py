# SPDX-License-Identifier: Apache-2.0
"""Let the run decide how upstream's training loop gets its data set: a mixture, or upstream's own read faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embodix.patching import Patch, replace_attribute

PATCH = Patch(
    name="lerobot_dataset_factory",
    target="lerobot.scripts.lerobot_train.make_dataset",
    requires={"lerobot": ">=0.5.1,<0.5.2"},
    symptom="The training loop builds one LeRobotDataset; several data sets raise NotImplementedError, and nothing "
    "can be set on the data set before it is read.",
    upstream="https://github.com/huggingface/lerobot/issues/912",
    why_safe="The name in the training script only; upstream's factory still builds every data set, and its result is "
    "returned as it is unless the run asks for more.",
    remove_when="upstream's train() takes a data set",
)


def apply(build: Callable[[Any, Callable[[Any], Any]], Any] | None = None) -> Callable[[], None]:
    """Patch the training script's name.

    Args:
        build: called with upstream's config and upstream's factory; returns the data set. None calls the factory.
    """
    from lerobot.scripts import lerobot_train

    upstream = lerobot_train.make_dataset

    def make_dataset(cfg: Any) -> Any:
        return upstream(cfg) if build is None else build(cfg, upstream)

    return replace_attribute(lerobot_train, "make_dataset", make_dataset)
