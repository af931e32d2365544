# SPDX-License-Identifier: Apache-2.0
"""Make GR00T-N1.5 play the first actions of a chunk where it plays fewer than it predicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embodix.patching import Patch, replace_attribute

PATCH = Patch(
    name="lerobot_groot_action_queue",
    target="lerobot.policies.groot.modeling_groot.GrootPolicy.select_action",
    requires={"lerobot": ">=0.5.1,<0.5.2"},
    symptom="with n_action_steps below the predicted chunk (at most 16), select_action plays the last n_action_steps "
    "actions of the chunk: its queue holds that many and pushes out the first ones.",
    upstream="none known; the port of N1.5 is gone in 0.6",
    why_safe="upstream's method runs unchanged on the first n_action_steps actions; where all are played, nothing "
    "changes",
    remove_when="upstream cuts the chunk before it fills the queue, as its other policies do",
)


def apply() -> Callable[[], None]:
    """Wrap upstream's ``select_action``; returns the undo."""
    from lerobot.policies.groot.modeling_groot import GrootPolicy

    upstream = GrootPolicy.select_action

    def select_action(self: Any, batch: dict[str, Any]) -> Any:
        predict = self.predict_action_chunk

        def first_actions(observations: dict[str, Any]) -> Any:
            return predict(observations)[:, : self.config.n_action_steps]

        restore = replace_attribute(self, "predict_action_chunk", first_actions)
        try:
            return upstream(self, batch)
        finally:
            restore()

    return replace_attribute(GrootPolicy, "select_action", select_action)
