# SPDX-License-Identifier: Apache-2.0
"""Keep the state and the closing word of every prompt of π0.5, and refuse a state that is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embodix.patching import Patch, replace_attribute

PATCH = Patch(
    name="lerobot_pi05_prompts",
    target="lerobot.policies.pi05.processor_pi05.Pi05PrepareStateTokenizerProcessorStep.__call__, "
    "lerobot.processor.tokenizer_processor.TokenizerProcessorStep._tokenize_text",
    requires={"lerobot": ">=0.5.1,<0.5.2"},
    symptom="a prompt above tokenizer_max_length loses its end, which is the state and 'Action:', without a word; NaN "
    "in a state is written as 255, the highest of its numbers.",
    upstream="none found: the tokenizer step truncates whatever it is given",
    why_safe="a prompt that is not too long is upstream's to the bit; of one that is, the task's text alone is cut",
    remove_when="upstream cuts the task before it appends the state, and refuses states that are not finite",
)


def apply() -> Callable[[], None]:
    """Wrap upstream's two steps; returns the undo. Texts of other policies pass as they are."""
    from lerobot.policies.pi05.processor_pi05 import Pi05PrepareStateTokenizerProcessorStep
    from lerobot.processor.tokenizer_processor import TokenizerProcessorStep

    prepare = _marking(Pi05PrepareStateTokenizerProcessorStep.__call__)
    undo_prepare = replace_attribute(Pi05PrepareStateTokenizerProcessorStep, "__call__", prepare)
    tokenize = _keeping_whole(TokenizerProcessorStep._tokenize_text)
    undo_tokenize = replace_attribute(TokenizerProcessorStep, "_tokenize_text", tokenize)

    def undo() -> None:
        undo_tokenize()
        undo_prepare()

    return undo


def _marking(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from lerobot.types import TransitionKey
    from lerobot.utils.constants import OBS_STATE

    from embodix.data.preprocessing import require_finite_state
    from embodix_pi05.prompts import Prompt

    def __call__(self: Any, transition: Any) -> Any:  # noqa: N807
        data = transition.get(TransitionKey.COMPLEMENTARY_DATA) or {}
        state = (transition.get(TransitionKey.OBSERVATION) or {}).get(OBS_STATE)
        if state is not None:
            require_finite_state(OBS_STATE, state, data)
        prepared = upstream(self, transition)
        texts = prepared[TransitionKey.COMPLEMENTARY_DATA]
        texts[self.task_key] = [Prompt(text) for text in texts[self.task_key]]
        return prepared

    return __call__


def _keeping_whole(upstream: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    from embodix_pi05.prompts import tokenize_whole

    def _tokenize_text(self: Any, text: Any) -> Any:
        return tokenize_whole(upstream, self, text)

    return _tokenize_text
