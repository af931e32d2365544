# SPDX-License-Identifier: Apache-2.0
"""Memory of training π0.5, estimated from sizes alone, and what to do when it is too much.

Activations are the tensors that autograd keeps from forward to backward, counted from upstream's layer code and from
the fast path's: inputs of linear maps, norms, the MLP's four intermediate products, attention's inputs and (dense
attention only) its scores. Allocator fragmentation and the host's own memory come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from embodix_pi05.cost import UPSTREAM, Computation, Sample, token_shares
from embodix_pi05.cost_sizes import Pi05Sizes, TransformerSize, parameter_groups

# Bytes a channel of one layer's two norms: upstream keeps two inputs, two normalised copies and the two inputs of the
# linear maps after them, in float32 as far as it normalises there, which comes to 24 in either dtype. The fast path
# computes the copies again.
_UPSTREAM_NORM_BYTES = 24
_FAST_NORM_CHANNELS = 4
_GATE_CHANNELS = 4  # the action expert's gated residuals keep more: the gate's input, and the scaled copies


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by what they hold, for one process."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Remedy:
    """One way to need less memory.

    Attributes:
        setting: the override that does it.
        price: what it costs, in words.
        total: bytes that remain with it alone.
        exact: whether training computes the same function afterwards.
    """

    setting: str
    price: str
    total: float
    exact: bool


def estimate_memory(
    sizes: Pi05Sizes,
    samples: Sequence[Sample],
    computation: Computation = UPSTREAM,
    *,
    dtype: str = "float32",
    checkpointing: bool = False,
) -> MemoryEstimate:
    """Memory of one training step with AdamW.

    Args:
        samples: the batch of one process.
        dtype: the policy's ``dtype``, ``float32`` or ``bfloat16``.
        checkpointing: the policy's ``gradient_checkpointing``.

    Raises:
        ValueError: another dtype.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"policy.dtype is float32 or bfloat16; got {dtype!r}.")
    parameters = gradients = 0
    for group in parameter_groups(sizes):
        num_bytes = group.count * (4 if group.float32 or dtype == "float32" else 2)
        parameters += num_bytes
        gradients += num_bytes * group.trained
    activations = sum(activation_bytes(sizes, sample, computation, dtype, checkpointing) for sample in samples)
    return MemoryEstimate(parameters, gradients, 2 * gradients, activations)


def activation_bytes(
    sizes: Pi05Sizes,
    sample: Sample,
    computation: Computation = UPSTREAM,
    dtype: str = "float32",
    checkpointing: bool = False,
) -> float:
    """Bytes that autograd keeps for one sample, at its highest."""
    width = 4 if dtype == "float32" else 2
    shares = token_shares(sizes, sample)
    padded, valid = shares.upstream - shares.actions, shares.valid - shares.actions
    rows = padded if computation.packing == "none" else valid
    images = sample.images + (sample.blank_images if computation.vision_tokens == "upstream" else 0)
    suffix = shares.actions * computation.flow_samples

    fast = not computation.is_upstream
    prefix = rows * _row_bytes(sizes.language, width, fast) * _prefix_kept(sizes, computation)
    expert = suffix * (_row_bytes(sizes.expert, width, fast) + _GATE_CHANNELS * width * sizes.expert.width)
    prefix_attention, suffix_attention = _attention_bytes(sizes, computation, rows, padded, suffix, width)
    prefix += prefix_attention
    expert += suffix_attention
    vision = images * _image_bytes(sizes)
    # The fast path stops the prefix at the last layer's keys and values.
    depth = sizes.language.depth
    prefix_layers = depth - fast
    if checkpointing:
        inputs = width * (prefix_layers * rows * sizes.language.width + depth * suffix * sizes.expert.width)
        return inputs + 4.0 * images * 3 * sizes.image_size**2 + max(prefix + expert, vision)
    return prefix_layers * prefix + depth * expert + vision


def remedies(
    sizes: Pi05Sizes, samples: Sequence[Sample], computation: Computation, *, dtype: str, checkpointing: bool
) -> list[Remedy]:
    """Ways to need less memory that are not in use yet: exact ones first, the free one before the one that costs time,
    then those that change training, by what each saves alone."""
    now = {"dtype": dtype, "checkpointing": checkpointing}
    fast = Computation("padding_free", "auto", "valid", computation.flow_samples)
    found = []
    if computation.packing == "none" or computation.attention == "upstream" or computation.vision_tokens == "upstream":
        total = estimate_memory(sizes, samples, fast, **now).total
        found.append(Remedy("+plugin=embodix", "none: fewer tokens, no attention scores kept, and faster", total, True))
    if len(samples) > 1:
        half = samples[: len(samples) // 2]
        total = estimate_memory(sizes, half, computation, **now).total
        price = "twice the steps for as many samples, or two processes instead of one"
        found.append(Remedy(f"train.batch_size={len(half)}", price, total, False))
    if not checkpointing:
        total = estimate_memory(sizes, samples, computation, dtype=dtype, checkpointing=True).total
        price = "computes the forward pass again: about a third more time, under upstream's nesting more"
        found.append(Remedy("policy.gradient_checkpointing=true", price, total, True))
    if dtype == "float32":
        total = estimate_memory(sizes, samples, computation, dtype="bfloat16", checkpointing=checkpointing).total
        found.append(
            Remedy("policy.dtype=bfloat16", "rounding of bfloat16, in weights and optimizer too", total, False)
        )
    if not sizes.expert_only:
        total = estimate_memory(_expert_only(sizes), samples, computation, **now).total
        found.append(Remedy("policy.train_expert_only=true", "the vision-language model is not trained", total, False))
    before = estimate_memory(sizes, samples, computation, **now).total
    saving = [remedy for remedy in found if remedy.total < before]
    costly = sorted((remedy for remedy in saving if not remedy.exact), key=lambda remedy: remedy.total)
    return [remedy for remedy in saving if remedy.exact] + costly


def _expert_only(sizes: Pi05Sizes) -> Pi05Sizes:
    return Pi05Sizes(**{**vars(sizes), "expert_only": True})


def _prefix_kept(sizes: Pi05Sizes, computation: Computation) -> float:
    """Share of a prefix layer's activations that is kept: with frozen weights, none or the nonlinear part only."""
    if not sizes.expert_only:
        return 1.0
    return 0.75 if computation.is_upstream else 0.0


def _row_bytes(size: TransformerSize, width: int, fast: bool) -> float:
    """Norms and MLP of one row in one layer: gate, up, their product, and (upstream) the activated gate."""
    if fast:
        return width * (_FAST_NORM_CHANNELS * size.width + 3 * size.mlp_dim)
    return _UPSTREAM_NORM_BYTES * size.width + 4 * width * size.mlp_dim


def _attention_bytes(
    sizes: Pi05Sizes, computation: Computation, rows: int, padded: int, suffix: int, width: int
) -> tuple[float, float]:
    """One layer's queries, keys, values, outputs and dense scores: of the prefix's attention, and of the suffix's."""
    language, heads = sizes.language, sizes.language.num_heads
    queries, keys = language.query_width, language.key_width
    score = heads * (4 if width == 4 else 6)  # bfloat16 keeps the float32 softmax and its copy
    if computation.is_upstream:
        return (padded + suffix) * width * (4 * queries + 2 * keys) + score * (padded + suffix) ** 2, 0.0
    trained = not sizes.expert_only  # a frozen prefix keeps only what the action tokens read of it
    if computation.attention == "upstream":  # keys and values are repeated for every head
        prefix = trained * padded * (width * 4 * queries + score * padded)
        joint = (padded + suffix) * (width * 2 * queries + score * suffix)
        return prefix, joint + suffix * width * 2 * queries
    prefix = trained * rows * width * (3 * queries + 2 * keys)
    return prefix, width * ((rows + suffix) * 2 * keys + suffix * 3 * queries)


def _image_bytes(sizes: Pi05Sizes) -> float:
    """One image in the vision tower, which upstream keeps in float32."""
    if sizes.freeze_vision or sizes.expert_only:
        return 0.0 if sizes.expert_only else 4.0 * sizes.patches * sizes.vision.width
    vision = sizes.vision
    layer = 8 * vision.width + 2 * vision.mlp_dim
    return 4.0 * (sizes.patches * (vision.depth * layer + 2 * vision.width) + 3 * sizes.image_size**2)
