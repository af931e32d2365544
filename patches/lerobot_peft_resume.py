# SPDX-License-Identifier: Apache-2.0
"""Let upstream go on training the adapters of a checkpoint, where it puts untrained ones in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embodix.patching import Patch, replace_attribute

PATCH = Patch(
    name="lerobot_peft_resume",
    target="lerobot.scripts.lerobot_train.make_policy",
    requires={"lerobot": ">=0.5.1,<0.5.2"},
    symptom="A run with PEFT that is resumed wraps the policy a second time: the trained adapters are overwritten by "
    "new ones, and training begins again without a word.",
    upstream="https://github.com/huggingface/lerobot/issues/3459, fixed after 0.5.1 by "
    "https://github.com/huggingface/lerobot/pull/3485",
    why_safe="A policy that upstream loads without adapters is returned as it is; one with adapters is upstream's own "
    "model with them trainable, and only its second wrapping is left out.",
    remove_when="a release with that fix is the one this package is built for",
)


def apply() -> Callable[[], None]:
    """Patch upstream's name; returns the undo."""
    from lerobot.scripts import lerobot_train

    from embodix.policies.adapters import is_adapted

    make_policy = lerobot_train.make_policy

    def make_trainable_policy(*args: Any, **kwargs: Any) -> Any:
        policy = make_policy(*args, **kwargs)
        return _trainable(policy) if is_adapted(policy) else policy

    return replace_attribute(lerobot_train, "make_policy", make_trainable_policy)


def _trainable(policy: Any) -> Any:
    """The loaded model of PEFT, ready to go on; upstream's next call, which would wrap it, gets it as it is."""
    for config in policy.peft_config.values():
        config.inference_mode = False
    policy.set_adapter(policy.active_adapter)
    policy.wrap_with_peft = lambda **_: policy
    return policy
