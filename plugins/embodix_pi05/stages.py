# SPDX-License-Identifier: Apache-2.0
"""The training step of π0.5 in stages: language model and action expert are cut at the same layer.

The first stage has vision tower, token embedding and the embedding of actions and time, the last the final norm and
the projection to actions. From stage to stage go the rows of prefix and suffix, and the time condition, which the
adaptive norms of every layer read: its gradient goes back the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from embodix.parallel.stage_cut import PartCost, balanced_cut
from embodix.policies.installation import installed_fast_path
from embodix.policies.settings import TokenCounts
from embodix_pi05.fast_path import DrawnBatch, Pi05FastPath
from embodix_pi05.layers import (
    computes_in_bfloat16,
    embed,
    expert_layers,
    language_layers,
    last_norm,
    project_velocity,
    run_layers,
    step_context,
)
from embodix_pi05.prefix import patches_per_image

LAYER = re.compile(r"\.(?:language_model|gemma_expert\.model)\.layers\.(\d+)\.")
ENTRY = re.compile(r"\.(?:vision_tower|multi_modal_projector|embed_tokens|action_in_proj|time_mlp_in|time_mlp_out)\.")


class Pi05Stages:
    """See ``embodix.contracts.PipelineStages``.

    Args:
        policy: with the fast path in place.

    Raises:
        ValueError: fewer layers than stages.
    """

    def __init__(self, policy: Any, num_stages: int) -> None:
        self._policy = policy
        self._fast_path: Pi05FastPath = installed_fast_path(policy)
        self._layers = cut_layers(policy, num_stages)
        self._dtype = torch.bfloat16 if computes_in_bfloat16(policy) else torch.float32
        stage_of = {index: stage for stage, layers in enumerate(self._layers) for index in layers}
        held: list[set[str]] = [set() for _ in self._layers]
        for name, _ in policy.named_parameters():
            layer = LAYER.search(name)
            rest = 0 if ENTRY.search(name) else num_stages - 1
            held[rest if layer is None else stage_of[int(layer[1])]].add(name)
        self.parameters = tuple(frozenset(names) for names in held)
        self.cut = "layers " + " | ".join(f"{layers[0]}-{layers[-1]}" for layers in self._layers)

    def prepare(self, batch: Mapping[str, Any]) -> DrawnBatch:
        return self._fast_path.draw(batch)

    def counts(self, prepared: DrawnBatch) -> TokenCounts:
        return prepared.counts

    def sent(self, stage: int, prepared: DrawnBatch) -> tuple[Tensor, ...]:
        config, layout = self._policy.config, prepared.plan.layout
        num_sequences = len(layout.computed_lengths) * prepared.time_BF.shape[1]
        rows, width = config.chunk_size, self._policy.model.action_in_proj.out_features
        if stage == len(self._layers) - 1:
            return (torch.empty(num_sequences, rows, config.max_action_dim, device="meta"),)
        prefix_width = self._policy.model.paligemma_with_expert.paligemma.config.text_config.hidden_size
        return (
            torch.empty(layout.num_computed, prefix_width, dtype=self._dtype, device="meta"),
            torch.empty(num_sequences, rows, width, dtype=self._dtype, device="meta"),
            torch.empty(num_sequences, width, device="meta"),
        )

    def compute(self, stage: int, prepared: DrawnBatch, *received: Tensor) -> tuple[Tensor, ...]:
        policy, plan = self._policy, prepared.plan
        prefix_NW, suffix_RTE, condition_RE = received or self._embedded(prepared)
        step = step_context(policy, plan, suffix_RTE, condition_RE, self._fast_path.settings)
        prefix_NW, suffix_RTE = run_layers(policy, self._layers[stage], prefix_NW, suffix_RTE, step)
        if stage < len(self._layers) - 1:
            condition_RE = condition_RE.view_as(condition_RE).float()
            return prefix_NW.to(self._dtype), suffix_RTE.to(self._dtype), condition_RE
        return (project_velocity(policy, last_norm(policy, suffix_RTE, condition_RE)).float(),)

    def loss(self, prepared: DrawnBatch, *output: Tensor) -> tuple[Tensor, dict[str, Any]]:
        velocity_RTA = output[0][: prepared.time_BF.numel()]
        return self._fast_path.reduce(prepared, prepared.squared_error(velocity_RTA))

    def _embedded(self, prepared: DrawnBatch) -> tuple[Tensor, Tensor, Tensor]:
        return embed(self._policy, prepared.plan, prepared.noisy_actions(), prepared.time_BF.flatten())


def cut_layers(policy: Any, num_stages: int) -> tuple[range, ...]:
    """The joint layers of each stage, for samples with every camera and the longest prompt.

    Raises:
        ValueError: fewer layers than stages.
    """
    config, model = policy.config, policy.model.paligemma_with_expert.paligemma.model
    image_rows = patches_per_image(policy) * len(config.image_features)
    prefix_rows = image_rows + config.tokenizer_max_length
    vision = _size(model.vision_tower) + _size(model.multi_modal_projector)
    layers = list(_layer_costs(policy, prefix_rows))
    first = PartCost(vision + _size(model.language_model.embed_tokens), vision * image_rows)
    rest = _size(policy) - first.parameters - sum(layer.parameters for layer in layers)
    return balanced_cut(first, layers, PartCost(rest, 0), num_stages)


def _layer_costs(policy: Any, prefix_rows: int) -> Iterator[PartCost]:
    pairs = list(zip(language_layers(policy), expert_layers(policy), strict=True))
    for index, (language, expert) in enumerate(pairs):
        computed = _size(language)
        if index == len(pairs) - 1:
            computed = _size(language.self_attn.k_proj) + _size(language.self_attn.v_proj)
        operations = computed * prefix_rows + _size(expert) * policy.config.chunk_size
        yield PartCost(_size(language) + _size(expert), operations)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
