# SPDX-License-Identifier: Apache-2.0
"""Memory estimates against what autograd keeps, and remedies that say their price."""

from __future__ import annotations

import pytest
import torch
from embodix_pi05.cost import EMBODIX, UPSTREAM, Computation, Sample
from embodix_pi05.cost_memory import activation_bytes, estimate_memory, remedies
from embodix_pi05.cost_sizes import num_parameters, sizes_of

from embodix.attention.cpu import SegmentGemm, SegmentSdpa
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
SAMPLE = Sample(2, 1, 40)
CONFIGS = [{}, {"dtype": "bfloat16"}, {"freeze_vision_encoder": True}, {"train_expert_only": True}]
REAL = sizes_of({})


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
    batch = random_batch(policy, prompt_lengths=[SAMPLE.prompt] * 2, padded_length=200)
    sizes = sizes_of({**fields, "image_resolution": (112, 112), "max_action_dim": 8}, ARCHITECTURE)
    return policy, batch, sizes, config.get("dtype", "float32")


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_upstream_activations_are_what_autograd_keeps(config):
    policy, batch, sizes, dtype = case(config)
    assert activation_bytes(sizes, SAMPLE, UPSTREAM, dtype) == pytest.approx(kept_bytes(policy, batch), rel=0.12)


@pytest.mark.parametrize("backend", [None, SegmentSdpa(), SegmentGemm()], ids=["dense", "sdpa", "gemm"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_fast_path_activations_are_what_autograd_keeps(config, backend):
    policy, batch, sizes, dtype = case(config)
    installation = Pi05Wrapper().install(policy, FastPathSettings(PaddingFreePacker(), backend, "valid"))
    kept = kept_bytes(policy, batch)
    installation.uninstall()
    computation = Computation("padding_free", "upstream" if backend is None else backend.name, "valid")
    assert activation_bytes(sizes, SAMPLE, computation, dtype) == pytest.approx(kept, rel=0.12)


def test_weights_gradients_and_optimizer_state_at_real_size():
    estimate = estimate_memory(REAL, [])
    assert estimate.parameters == 4 * num_parameters(REAL)
    # Output heads and the end of the last prefix layer get no gradient, so AdamW keeps nothing for them.
    untrained = (526_647_296 + 263_323_648) + (104_857_600 + 2 * 2048)
    assert estimate.gradients == 4 * (num_parameters(REAL) - untrained)
    assert estimate.optimizer == 2 * estimate.gradients
    half = estimate_memory(REAL, [], dtype="bfloat16")
    assert 0.5 < half.parameters / estimate.parameters < 0.6  # vision, norms and projections stay in float32
    assert estimate_memory(sizes_of({"train_expert_only": True}), []).gradients < 0.2 * estimate.gradients


def test_every_remedy_saves_and_exact_ones_come_first():
    batch = [Sample(2, 1, 55)] * 8
    before = estimate_memory(REAL, batch).total
    found = remedies(REAL, batch, UPSTREAM, dtype="float32", checkpointing=False)
    assert {remedy.setting for remedy in found} == {
        "+plugin=embodix",
        "train.batch_size=4",
        "policy.gradient_checkpointing=true",
        "policy.dtype=bfloat16",
        "policy.train_expert_only=true",
    }
    assert all(remedy.total < before for remedy in found)
    assert [remedy.setting for remedy in found[:2]] == ["+plugin=embodix", "policy.gradient_checkpointing=true"]
    assert [remedy.exact for remedy in found] == [True, True, False, False, False]
    totals = [remedy.total for remedy in found if not remedy.exact]
    assert totals == sorted(totals)


def test_remedies_in_use_are_not_proposed_again():
    found = remedies(REAL, [Sample(2, 1, 55)], EMBODIX, dtype="bfloat16", checkpointing=True)
    assert [remedy.setting for remedy in found] == ["policy.train_expert_only=true"]


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="float32 or bfloat16; got 'float16'"):
        estimate_memory(REAL, [], dtype="float16")
