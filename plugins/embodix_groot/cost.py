# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of GR00T-N1.5, upstream's and the packed path's, from the tokens that a run counted.

Counts are matrix products only, which is what torch's counter sees. A sample's prompt is taken at the mean length of
the run; only attention, a small share, is not linear in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embodix.policies.matrix_products import Flops, attention_products, linear
from embodix.report.compare import SpeedBound
from embodix.report.steps import StepRecord
from embodix_groot.architecture import MAX_ACTION_HORIZON, PUBLIC_ARCHITECTURE, tokens_per_image

REAL_NAME = "GR00T-N1.5 (2.4 B parameters, 224 px)"
REAL_DIMENSIONS = {"max_state_dim": 64, "max_action_dim": 32, "chunk_size": MAX_ACTION_HORIZON}


@dataclass(frozen=True)
class GrootSizes:
    """Everything that decides what a sample costs.

    Attributes:
        architecture: see ``embodix_groot.architecture``.
        state_dim, action_dim: what states and actions are padded to.
        horizon: action tokens.
        tune_llm, tune_visual: what of the backbone is trained.
    """

    architecture: Mapping[str, Any]
    state_dim: int
    action_dim: int
    horizon: int
    tune_llm: bool
    tune_visual: bool

    @property
    def num_queries(self) -> int:
        """Tokens of the action side: one state, the future tokens and the actions."""
        return 1 + int(self.architecture["action_head"]["num_future_tokens"]) + self.horizon


@dataclass(frozen=True)
class Work:
    """What one sample brings on average: images, and rows of the language model that are computed."""

    images: float
    rows: float


def sizes_of(policy: Mapping[str, Any], architecture: Mapping[str, Any] | None) -> GrootSizes:
    """Read the sizes from upstream's config fields and an ``architecture``; None for the public checkpoint's."""
    return GrootSizes(
        architecture=architecture or PUBLIC_ARCHITECTURE,
        state_dim=int(policy["max_state_dim"]),
        action_dim=int(policy["max_action_dim"]),
        horizon=min(int(policy["chunk_size"]), MAX_ACTION_HORIZON),
        tune_llm=bool(policy["tune_llm"]),
        tune_visual=bool(policy["tune_visual"]),
    )


def sample_flops(sizes: GrootSizes, work: Work, *, upstream: bool) -> Flops:
    """Operations of one sample's training step, one noise and time draw."""
    return (
        _vision(sizes, upstream).times(work.images)
        + _language(sizes, work, upstream)
        + _context(sizes, work)
        + _action_side(sizes, work, upstream)
    )


def speed_bounds(
    configs: Mapping[str, Mapping[str, Any]], records: Mapping[str, Sequence[StepRecord]], baseline: str
) -> dict[str, SpeedBound]:
    """Bounds of a comparison's variants against its baseline, at this size and at the public checkpoint's.

    Args:
        configs: composed train config of each variant; they share data set and policy.
        records: steps of each variant; those of pure upstream, which counts no tokens, are read off another's.

    Returns:
        Nothing for variants that run more than one flow sample, or where no variant counted tokens.
    """
    small = sizes_of(configs[baseline]["policy"], configs[baseline].get("architecture"))
    real = sizes_of({**configs[baseline]["policy"], **REAL_DIMENSIONS}, None)
    works = {name: _mean_work(small, records[name]) for name in configs}
    counted = next((name for name, work in works.items() if work is not None), None)
    if counted is None or any(int(config.get("flow_samples", 1)) != 1 for config in configs.values()):
        return {}
    upstream = _mean_work(small, records[counted], as_upstream=True)
    assert upstream is not None

    def total(name: str, sizes: GrootSizes) -> float:
        work = works[name]
        chosen = _scaled(upstream if work is None else work, small, sizes)
        return sample_flops(sizes, chosen, upstream=work is None).total

    return {
        name: SpeedBound(
            this_size=total(baseline, small) / total(name, small),
            real_size=total(baseline, real) / total(name, real),
            real_name=REAL_NAME,
            basis=f"Matrix products of forward and backward for {upstream.images:.3g} images a sample.",
        )
        for name in configs
        if name != baseline
    }


def _mean_work(sizes: GrootSizes, records: Sequence[StepRecord], as_upstream: bool = False) -> Work | None:
    counted = [record for record in records if record.tokens is not None]
    if not counted:
        return None
    num_samples = sum(record.num_samples for record in counted)
    tokens = [record.tokens for record in counted if record.tokens is not None]
    rows = sum(count.upstream if as_upstream else count.computed for count in tokens)
    images = sum(count.images_upstream if as_upstream else count.images_computed for count in tokens)
    return Work(images / num_samples, rows / num_samples - sizes.num_queries)


def _scaled(work: Work, counted_at: GrootSizes, sizes: GrootSizes) -> Work:
    """The same prompts with images of another size."""
    an_image = tokens_per_image(sizes.architecture) - tokens_per_image(counted_at.architecture)
    return Work(work.images, work.rows + work.images * an_image)


def _vision(sizes: GrootSizes, upstream: bool) -> Flops:
    """One image through the tower and the connector; upstream also through a pooling head that nothing reads."""
    vision, patches, trained = sizes.architecture["vision"], tokens_per_image(sizes.architecture), sizes.tune_visual
    width, mlp = vision["hidden_size"], vision["intermediate_size"]
    both = {"input_gradient": trained, "weight_gradient": trained}
    flops = (
        linear(3 * vision["patch_size"] ** 2 * width, patches, input_gradient=False, weight_gradient=trained)
        + linear(vision["num_hidden_layers"] * width * (4 * width + 2 * mlp), patches, **both)
        + attention_products(width, vision["num_hidden_layers"] * patches**2, gradient=trained)
        + linear(width * sizes.architecture["language"]["hidden_size"], patches, **both)
    )
    if not upstream:
        return flops
    unread = {"input_gradient": False, "weight_gradient": False}
    head = linear(2 * width**2, patches, **unread) + linear(2 * width * (width + mlp), 1, **unread)
    return flops + head + attention_products(width, patches, gradient=False)


def _language(sizes: GrootSizes, work: Work, upstream: bool) -> Flops:
    """The causal language model, its scores counted in full; upstream also computes logits that it discards."""
    language = sizes.architecture["language"]
    width, mlp, depth = language["hidden_size"], language["intermediate_size"], language["num_hidden_layers"]
    query_width = language["num_attention_heads"] * language["head_dim"]
    key_width = language["num_key_value_heads"] * language["head_dim"]
    reached = sizes.tune_llm or sizes.tune_visual
    a_layer = width * (2 * query_width + 2 * key_width + 3 * mlp)
    flops = linear(depth * a_layer, work.rows, input_gradient=reached, weight_gradient=sizes.tune_llm)
    flops += attention_products(query_width, depth * work.rows**2, gradient=reached)
    if not upstream:
        return flops
    return flops + linear(width * language["vocab_size"], work.rows, input_gradient=False, weight_gradient=False)


def _context(sizes: GrootSizes, work: Work) -> Flops:
    """Self-attention of the action head over the language model's features."""
    width, depth = sizes.architecture["language"]["hidden_size"], sizes.architecture["vl_self_attention"]["num_layers"]
    return linear(12 * width**2 * depth, work.rows) + attention_products(width, depth * work.rows**2)


def _action_side(sizes: GrootSizes, work: Work, upstream: bool) -> Flops:
    """State and action encoders, DiT and decoder; only the packed path decodes the action tokens alone."""
    head, context_width = sizes.architecture["action_head"], sizes.architecture["language"]["hidden_size"]
    width, hidden = head["num_attention_heads"] * head["attention_head_dim"], head["hidden_size"]
    queries, steps = sizes.num_queries, sizes.horizon
    num_cross = (head["num_layers"] + 1) // 2
    num_self = head["num_layers"] - num_cross
    decoded = queries if upstream else steps
    condition = 256 * width + width**2 + 2 * width**2 * (head["num_layers"] + 1)
    return (
        linear(sizes.state_dim * hidden, 1, input_gradient=False)
        + linear(hidden * width, 1)
        + linear(sizes.action_dim * width, steps, input_gradient=False)
        + linear(3 * width**2, steps)
        + linear(condition, 1)
        + linear(8 * width**2 * head["num_layers"] + 2 * width**2 * num_cross + 4 * width**2 * num_self, queries)
        + linear(2 * context_width * width * num_cross, work.rows)
        + attention_products(width, num_cross * queries * work.rows + num_self * queries**2)
        + linear(width * hidden + hidden**2 + hidden * sizes.action_dim, decoded)
    )
