# SPDX-License-Identifier: Apache-2.0
"""Tokens and floating-point operations of π0.5, per variant, before anything is run.

Counts are matrix products only, which is what torch's counter sees and all that matters for a bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embodix.policies.matrix_products import Flops, attention_products, linear
from embodix_pi05.cost_sizes import Pi05Sizes, layer_linears, sizes_of


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


def _vision(sizes: Pi05Sizes) -> Flops:
    """One image through the tower and the projector."""
    vision, patches = sizes.vision, sizes.patches
    trained = not (sizes.freeze_vision or sizes.expert_only)
    both = {"input_gradient": trained, "weight_gradient": trained}
    layer = vision.width * (4 * vision.width + 2 * vision.mlp_dim)
    flops = linear(
        3 * vision.patch_size**2 * vision.width, patches, input_gradient=False, weight_gradient=trained
    ) + linear(vision.depth * layer, patches, **both)
    flops += attention_products(vision.width, vision.depth * patches**2, gradient=trained)
    projector = vision.width * sizes.language.width
    return flops + linear(projector, patches, input_gradient=trained, weight_gradient=not sizes.expert_only)


def _language(sizes: Pi05Sizes, rows: int, computation: Computation) -> Flops:
    """The language model's linear maps; of the last layer, only keys and values are needed."""
    language = sizes.language
    trained = not sizes.expert_only
    both = {"input_gradient": trained, "weight_gradient": trained}
    keys_values = 2 * language.width * language.key_width
    queries = language.width * language.query_width
    flops = linear((language.depth - 1) * layer_linears(language) + keys_values, rows, **both)
    if not computation.is_upstream:
        return flops
    rest = layer_linears(language) - keys_values - queries
    flops += linear(queries, rows, **both) + linear(rest, rows, input_gradient=False, weight_gradient=False)
    if sizes.expert_only:
        # Frozen as it is, the prefix shares one attention with the trained expert, so autograd goes through it.
        flops += Flops(0.0, 2.0 * (language.depth - 1) * layer_linears(language) * rows)
    return flops


def _attention(sizes: Pi05Sizes, padded: int, valid: int, computation: Computation) -> Flops:
    """Scores and weighted sums of the joint attention (Q K^T and P V: two products of queries x keys x width)."""
    depth, width, actions = sizes.language.depth, sizes.language.query_width, sizes.chunk_size
    suffix = actions * computation.flow_samples
    if computation.is_upstream:
        return attention_products(width, depth * (padded + actions) ** 2)
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
        linear(expert.depth * layer_linears(expert), actions)
        + linear(expert.width * sizes.action_dim, actions, input_gradient=False)
        + linear(expert.width * sizes.action_dim, actions)
        + linear(condition, 1)
        + linear(expert.width**2, 1, input_gradient=False)
    )
