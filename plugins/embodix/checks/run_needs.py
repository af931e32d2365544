# SPDX-License-Identifier: Apache-2.0
"""What a run wants of its data: names, widths, normalisation, chunk length, cameras and prompt length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lerobot.configs.policies import PreTrainedConfig
from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_PREFIX, OBS_STATE

from embodix.policies.support import support_of

STATE_WIDTH, ACTION_WIDTH = "max_state_dim", "max_action_dim"
RELATIVE_ACTIONS = "use_relative_actions"


@dataclass(frozen=True)
class RunNeeds:
    """What the policy reads of a data set.

    Attributes:
        policy: its type.
        normalisation: kind of feature (``STATE``, ``ACTION``, ``ENV``, ``VISUAL``) -> how its processor scales it, as
            LeRobot's ``NormalizationMode`` names it; kinds that it leaves as they are are absent.
        bounded: whether its processor keeps a dimension of zero range bounded.
        chunk: actions of a sample.
        cameras: slots that its config declares; none where they come from the data.
        widths: key -> widest vector that it takes.
        rename_map: from keys of the data set to keys of the policy.
        language: whether it reads instructions.
        statistics: ``recorded``, or ``exact`` for those that embodix computes.
        prompt_length: tokens of an instruction's longest prompt, None where the tokenizer is not known.
        max_prompt: tokens that the policy reads, None for any number.
        imagenet: whether images are normalised by ImageNet's statistics.
        unread: cameras of the data set that nobody reads.
        relative: keys whose values the policy makes relative before it normalises them, so that their statistics are
            not those of the column.
    """

    policy: str
    normalisation: Mapping[str, str]
    bounded: bool = False
    chunk: int = 1
    cameras: tuple[str, ...] = ()
    widths: Mapping[str, int] = field(default_factory=dict)
    rename_map: Mapping[str, str] = field(default_factory=dict)
    language: bool = False
    statistics: str = "recorded"
    prompt_length: Callable[[str], int] | None = None
    max_prompt: int | None = None
    imagenet: bool = True
    unread: frozenset[str] = frozenset()
    relative: frozenset[str] = frozenset()

    def mode_of(self, key: str) -> str:
        """How the values of a key are scaled, "" for not at all.

        LeRobot takes every key that begins like an observation for a state (datasets/feature_utils.py).
        """
        if key == ACTION:
            kind = "ACTION"
        elif key == OBS_ENV_STATE:
            kind = "ENV"
        elif key.startswith(OBS_PREFIX):
            kind = "STATE"
        else:
            return ""
        return self.normalisation.get(kind, "")


def needs_of(
    policy: PreTrainedConfig, rename_map: Mapping[str, str], statistics: str = "recorded", imagenet: bool = True
) -> RunNeeds:
    """What a policy's config asks for.

    Args:
        policy: upstream's config.
        rename_map: upstream's.
        statistics: which the run normalises by.
        imagenet: whether images are normalised by ImageNet's.
    """
    support = support_of(policy.type)
    inputs: Mapping[str, Any] = policy.input_features or {}
    declared = [key for key, feature in inputs.items() if feature.type.value == "VISUAL"]
    widths = {OBS_STATE: getattr(policy, STATE_WIDTH, None), ACTION: getattr(policy, ACTION_WIDTH, None)}
    modes, bounded = support.normalisation(policy)
    return RunNeeds(
        policy=policy.type,
        normalisation=modes,
        bounded=bounded,
        chunk=len(policy.action_delta_indices or [0]),
        cameras=tuple(declared),
        widths={key: int(width) for key, width in widths.items() if width is not None},
        rename_map=dict(rename_map),
        language=support.offers("prompt_texts"),
        statistics=statistics,
        imagenet=imagenet,
        relative=frozenset({ACTION} if getattr(policy, RELATIVE_ACTIONS, False) else ()),
    )
