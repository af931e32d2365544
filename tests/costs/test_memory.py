# SPDX-License-Identifier: Apache-2.0
"""Counted memory against what autograd keeps, and remedies that say their price."""

from __future__ import annotations

import pytest
import torch

from embodix.attention.cpu import SegmentGemm, SegmentSdpa
from embodix.contracts import SampleShape
from embodix.costs.policy_costs import UPSTREAM, Computation, PolicyCosts
from embodix.packing.layout import PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix_pi05.testing import random_batch, small_pi05
from embodix_pi05.wrapper import Pi05Wrapper

ARCHITECTURE = {
    "vision": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "patch_size": 14,
    },
    "language": {
        "width": 128,
        "depth": 5,
        "mlp_dim": 512,
        "num_heads": 8,
        "num_kv_heads": 1,
        "head_dim": 32,
        "vocab_size": 128,
    },
    "action_expert": {
        "width": 64,
        "depth": 5,
        "mlp_dim": 128,
        "num_heads": 8,
        "num_kv_heads": 1,
        "head_dim": 32,
    },
}
PROMPT = 40
CONFIGS = [{}, {"dtype": "bfloat16"}, {"freeze_vision_encoder": True}, {"train_expert_only": True}]


def kept_bytes(policy, batch) -> float:
    """Bytes a sample of the distinct storages that autograd keeps after a forward pass, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    kept, storages = [], {}

    def keep(tensor):
        kept.append(tensor)  # a freed address could be given out again
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.forward(batch)
    return sum(storages.values()) / len(batch["action"])


def case(config):
    fields = {"chunk_size": 20, "tokenizer_max_length": 200, **config}
    policy = small_pi05(ARCHITECTURE, image_size=112, empty_cameras=1, **fields)
    batch = random_batch(policy, prompt_lengths=[PROMPT] * 2, padded_length=200)
    features = {key: {"type": f.type.name, "shape": list(f.shape)} for key, f in policy.config.input_features.items()}
    sizes = {"image_resolution": [112, 112], "n_action_steps": 20, "max_action_dim": 8, "max_state_dim": 8}
    action = {"action": {"type": "ACTION", "shape": list(policy.config.output_features["action"].shape)}}
    return policy, batch, PolicyCosts({"type": "pi05", **fields, **sizes}, features, action, ARCHITECTURE)


def counted_bytes(costs, computation=UPSTREAM) -> float:
    count = costs.count(SampleShape(2, PROMPT, costs.layout.padding(2, PROMPT)), computation, 2)
    assert count.kept <= count.activations
    return count.kept / 2


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_upstream_activations_are_what_autograd_keeps(config):
    policy, batch, costs = case(config)
    assert counted_bytes(costs) == pytest.approx(kept_bytes(policy, batch), rel=0.12)


@pytest.mark.parametrize("backend", [None, SegmentSdpa(), SegmentGemm()], ids=["dense", "sdpa", "gemm"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_fast_path_activations_are_what_autograd_keeps(config, backend):
    policy, batch, costs = case(config)
    installation = Pi05Wrapper().install(policy, FastPathSettings(PaddingFreePacker(), backend, "valid"))
    kept = kept_bytes(policy, batch)
    installation.uninstall()
    computation = Computation("padding_free", "upstream" if backend is None else backend.name, "valid")
    assert counted_bytes(costs, computation) == pytest.approx(kept, rel=0.12)
