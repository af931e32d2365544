# SPDX-License-Identifier: Apache-2.0
"""What a fast path is asked to do, and what it tells: counts, a check of its reference, the steps of its sampler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from embodix.contracts import AttentionBackend, Packer

VisionTokens = Literal["upstream", "valid"]
ActionPad = Literal["host", "mask"]


@dataclass(frozen=True)
class FastPathSettings:
    """One choice a feature; each can be put back to what upstream does.

    Attributes:
        packer: which rows of the prefix are computed.
        attention: the variable-length backend, or None for upstream's dense eager attention.
        vision_tokens: ``valid`` sends real images through the vision tower in one call; ``upstream`` sends every
            camera slot, blank ones too, one call a slot.
        action_pad: ``host`` trains padded action steps as upstream does, ``mask`` leaves them out of the loss.
        flow_samples: noise and time draws an observation, sharing its prefix.
        reduce_count: what a batch's count of valid action elements is replaced by when its loss is normalised: the
            mean over ranks of the whole step's, so that ranks and micro-batches together give the global mean.
        uneven_batches: batches of a step may differ in size, so that losses are normalised by ``reduce_count`` even
            where every element of a batch is valid.
    """

    packer: Packer
    attention: AttentionBackend | None
    vision_tokens: VisionTokens = "valid"
    action_pad: ActionPad = "host"
    flow_samples: int = 1
    reduce_count: Callable[[Tensor], Tensor] | None = None
    uneven_batches: bool = False

    def __post_init__(self) -> None:
        _require_choice("vision_tokens", self.vision_tokens, ("upstream", "valid"))
        _require_choice("action_pad", self.action_pad, ("host", "mask"))
        if not isinstance(self.flow_samples, int) or self.flow_samples < 1:
            raise ValueError(f"flow_samples counts draws an observation, 1 at least; got {self.flow_samples!r}.")

    def describe(self) -> dict[str, Any]:
        """The choices by name, for reports."""
        return {
            "packing": self.packer.name,
            "attention": "upstream" if self.attention is None else self.attention.name,
            "vision_tokens": self.vision_tokens,
            "action_pad": self.action_pad,
            "flow_samples": self.flow_samples,
        }


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is one of {', '.join(choices)}; got {value!r}.")


@dataclass(frozen=True)
class TokenCounts:
    """Tokens and images of the last training step.

    Attributes:
        valid: prefix tokens that exist plus action tokens.
        computed: prefix rows and action tokens that went through the layers.
        upstream: what upstream computes for the same batch.
        images_computed: images that went through the vision tower.
        images_upstream: what upstream sends through it.
        action_valid: action steps that exist (all of them where the batch has no ``action_is_pad``).
        action_total: action steps of the batch, padding included.
    """

    valid: int
    computed: int
    upstream: int
    images_computed: int
    images_upstream: int
    action_valid: int
    action_total: int

    @property
    def utilisation(self) -> float:
        """Share of computed tokens that exist."""
        return self.valid / self.computed


@dataclass(frozen=True)
class ReferenceCheck:
    """Relative loss differences where upstream's own batch is not the reference, on one batch of the run.

    Attributes:
        reference: the reference in words.
        cause: why upstream's own batch differs from it, one clause.
        fast_difference: of the fast path from the reference.
        host_batch_difference: of upstream's own batch from it.
    """

    reference: str
    cause: str
    fast_difference: float
    host_batch_difference: float


class DenoisingObserver(Protocol):
    """Called by an action sampler after every denoising step; it must not change the state."""

    def __call__(self, step: int, state_BTA: Tensor) -> None:
        """``step`` counts from 0; ``state_BTA`` is the state after it, the last one the chunk (padded dimensions
        included)."""
        ...
