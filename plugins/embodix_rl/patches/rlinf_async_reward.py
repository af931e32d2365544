# SPDX-License-Identifier: Apache-2.0
"""Hand RLinf's asynchronous PPO runner its reward workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embodix.patching import Patch, replace_attribute

PATCH = Patch(
    name="rlinf_async_reward",
    target="rlinf.runners.async_ppo_embodied_runner.AsyncPPOEmbodiedRunner.__init__",
    requires={"rlinf": ">=0.3.0,<0.3.1"},
    symptom="critic and reward are handed to the base class in each other's places, so a reward model is never asked.",
    upstream="none known",
    why_safe="upstream's constructor runs unchanged with the two exchanged, which puts them where they belong",
    remove_when="AsyncPPOEmbodiedRunner passes critic and reward to EmbodiedRunner by name",
)


def apply() -> Callable[[], None]:
    """Patch the constructor; returns the undo."""
    from rlinf.runners.async_ppo_embodied_runner import AsyncPPOEmbodiedRunner

    upstream = AsyncPPOEmbodiedRunner.__init__

    def __init__(  # noqa: N807
        self: Any, cfg: Any, actor: Any, rollout: Any, env: Any, critic: Any = None, reward: Any = None
    ) -> None:
        upstream(self, cfg, actor, rollout, env, critic=reward, reward=critic)

    return replace_attribute(AsyncPPOEmbodiedRunner, "__init__", __init__)
