# SPDX-License-Identifier: Apache-2.0
"""Tokens and floating-point operations of π0.5, per variant, before anything is run.

Counts are matrix products only (a multiply-add is two operations), which is what torch's counter sees and all that
matters for a bound. A step's backward pass multiplies twice for each forward product: once for the gradient of the
input, once for that of the weight; whatever is frozen, or has nothing trainable before it, saves its share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embodix.policies.pi05.cost_sizes import Pi05Sizes, layer_linears, sizes_of


@dataclass(frozen=True)
class Sample:
    """What one sample brings: real images, camera slots without image, and valid tokens of its prompt."""

    images: int
    blank_images: int
    prompt: int


Workload = Mapping[Sample, float]  # how often each kind of sample is drawn; any positive scale


@dataclass(frozen=True)
class Computation:
    """What a variant computes; the defaults are upstream's.

    Attributes:
        packing: ``none`` computes all prefix rows, ``padding_free`` the valid ones.
        attention: ``upstream`` for dense attention over the padded batch, anything else for segments.
        vision_tokens: ``upstream`` sends blank images through the vision tower, ``valid`` real ones only.
        flow_samples: noise and time draws an observation.
    """

    packing: str = "none"
    attention: str = "upstream"
    vision_tokens: str = "upstream"
    flow_samples: int = 1

    @property
    def is_upstream(self) -> bool:
        """Whether upstream's own forward pass runs, which finishes the last layer's prefix for nobody."""
        return self == Computation()


UPSTREAM = Computation()
EMBODIX = Computation("padding_free", "auto", "valid")


@dataclass(frozen=True)
class TokenShares:
    """Tokens of one sample as upstream lays them out."""

    images: int
    blank_images: int
    prompt: int
    prompt_padding: int
    actions: int

    @property
    def upstream(self) -> int:
        return self.images + self.blank_images + self.prompt + self.prompt_padding + self.actions

    @property
    def valid(self) -> int:
        return self.images + self.prompt + self.actions

    @property
    def waste(self) -> float:
        """Share of upstream's tokens that carry no input."""
        return 1 - self.valid / self.upstream


@dataclass(frozen=True)
class Flops:
    """Operations of one sample's forward and backward pass."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.forward + other.forward, self.backward + other.backward)

    def times(self, factor: float) -> Flops:
        return Flops(factor * self.forward, factor * self.backward)


@dataclass(frozen=True)
class StepFlops:
    """Operations of one sample by the part of the model that does them."""

    vision: Flops
    language: Flops
    attention: Flops
    expert: Flops

    @property
    def total(self) -> Flops:
        return self.vision + self.language + self.attention + self.expert

    def shares(self) -> dict[str, float]:
        """Share of each part in the whole step."""
        parts = {name: getattr(self, name).total for name in ("vision", "language", "attention", "expert")}
        return {name: value / self.total.total for name, value in parts.items()}


def token_shares(sizes: Pi05Sizes, sample: Sample) -> TokenShares:
    """Split one sample's tokens by what they carry.

    Raises:
        ValueError: a prompt longer than the policy's ``tokenizer_max_length``.
    """
    if not 0 <= sample.prompt <= sizes.prompt_length:
        raise ValueError(
            f"A prompt has at most tokenizer_max_length={sizes.prompt_length} tokens; got {sample.prompt}. "
            "Upstream cuts longer ones; count the tokens after the cut."
        )
    return TokenShares(
        images=sample.images * sizes.patches,
        blank_images=sample.blank_images * sizes.patches,
        prompt=sample.prompt,
        prompt_padding=sizes.prompt_length - sample.prompt,
        actions=sizes.chunk_size,
    )


def step_flops(sizes: Pi05Sizes, sample: Sample, computation: Computation = UPSTREAM) -> StepFlops:
    """Operations of one sample's training step, without activation checkpointing."""
    shares = token_shares(sizes, sample)
    padded = shares.upstream - shares.actions
    valid = shares.valid - shares.actions
    rows = padded if computation.packing == "none" else valid
    images = sample.images + (sample.blank_images if computation.vision_tokens == "upstream" else 0)
    return StepFlops(
        vision=_vision(sizes).times(images),
        language=_language(sizes, rows, computation),
        attention=_attention(sizes, padded, valid, computation),
        expert=_expert(sizes).times(computation.flow_samples),
    )


def mean_flops(sizes: Pi05Sizes, workload: Workload, computation: Computation = UPSTREAM) -> Flops:
    """Mean operations of a sample's training step over a data set.

    Raises:
        ValueError: no samples.
    """
    weight = sum(workload.values())
    if weight <= 0:
        raise ValueError("A mean needs at least one sample with a positive weight; got none.")
    parts = (step_flops(sizes, sample, computation).total.times(share) for sample, share in workload.items())
    return sum(parts, Flops()).times(1 / weight)


def flop_bound(
    sizes: Pi05Sizes, workload: Workload, computation: Computation = EMBODIX, baseline: Computation = UPSTREAM
) -> float:
    """How many times fewer operations ``computation`` needs than ``baseline`` for the same loss samples."""
    mine = mean_flops(sizes, workload, computation).total / computation.flow_samples
    return mean_flops(sizes, workload, baseline).total / baseline.flow_samples / mine


def computation_of(config: Mapping[str, Any]) -> Computation:
    """What a composed train config computes."""
    return Computation(
        packing=config["packing"]["name"],
        attention=config["attention"]["name"],
        vision_tokens=config["vision_tokens"]["name"],
        flow_samples=int(config.get("flow_samples", 1)),
    )


def real_sizes(policy: Mapping[str, Any]) -> Pi05Sizes:
    """The full-size π0.5 that a small one stands in for: 224 px images, prompts of 200, chunks of 50."""
    kept = ("freeze_vision_encoder", "train_expert_only")
    return sizes_of({name: policy[name] for name in kept if name in policy})


def _linear(weights: int, rows: float, *, input_gradient: bool = True, weight_gradient: bool = True) -> Flops:
    product = 2.0 * weights * rows
    return Flops(product, product * (input_gradient + weight_gradient))


def _vision(sizes: Pi05Sizes) -> Flops:
    """One image through the tower and the projector."""
    vision, patches = sizes.vision, sizes.patches
    trained = not (sizes.freeze_vision or sizes.expert_only)
    both = {"input_gradient": trained, "weight_gradient": trained}
    layer = vision.width * (4 * vision.width + 2 * vision.mlp_dim)
    flops = _linear(
        3 * vision.patch_size**2 * vision.width, patches, input_gradient=False, weight_gradient=trained
    ) + _linear(vision.depth * layer, patches, **both)
    scores = 4.0 * vision.depth * patches**2 * vision.width
    flops += Flops(scores, 2 * scores * trained)
    projector = vision.width * sizes.language.width
    return flops + _linear(projector, patches, input_gradient=trained, weight_gradient=not sizes.expert_only)


def _language(sizes: Pi05Sizes, rows: int, computation: Computation) -> Flops:
    """The language model's linear maps; of the last layer, only keys and values are needed."""
    language = sizes.language
    trained = not sizes.expert_only
    both = {"input_gradient": trained, "weight_gradient": trained}
    keys_values = 2 * language.width * language.key_width
    queries = language.width * language.query_width
    flops = _linear((language.depth - 1) * layer_linears(language) + keys_values, rows, **both)
    if not computation.is_upstream:
        return flops
    rest = layer_linears(language) - keys_values - queries
    flops += _linear(queries, rows, **both) + _linear(rest, rows, input_gradient=False, weight_gradient=False)
    if sizes.expert_only:
        # Frozen as it is, the prefix shares one attention with the trained expert, so autograd goes through it.
        flops += Flops(0.0, 2.0 * (language.depth - 1) * layer_linears(language) * rows)
    return flops


def _attention(sizes: Pi05Sizes, padded: int, valid: int, computation: Computation) -> Flops:
    """Scores and weighted sums of the joint attention (Q K^T and P V: two products of queries x keys x width)."""
    depth, width, actions = sizes.language.depth, sizes.language.query_width, sizes.chunk_size
    suffix = actions * computation.flow_samples
    if computation.is_upstream:
        scores = 4.0 * width * depth * (padded + actions) ** 2
        return Flops(scores, 2 * scores)
    if computation.attention == "upstream":
        prefix_pairs, suffix_pairs = padded**2, suffix * (padded + suffix)
    else:
        prefix_pairs, suffix_pairs = valid**2, suffix * (valid + actions)
    prefix, own = 4.0 * width * (depth - 1) * prefix_pairs, 4.0 * width * depth * suffix_pairs
    return Flops(prefix + own, 2 * (prefix * (not sizes.expert_only) + own))


def _expert(sizes: Pi05Sizes) -> Flops:
    """The action expert on one chunk: its layers, the projections, and the time condition of one row."""
    expert, actions = sizes.expert, sizes.chunk_size
    condition = (2 * expert.depth + 1) * 3 * expert.width**2 + expert.width**2
    return (
        _linear(expert.depth * layer_linears(expert), actions)
        + _linear(expert.width * sizes.action_dim, actions, input_gradient=False)
        + _linear(expert.width * sizes.action_dim, actions)
        + _linear(condition, 1)
        + _linear(expert.width**2, 1, input_gradient=False)
    )
