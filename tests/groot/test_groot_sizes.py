# SPDX-License-Identifier: Apache-2.0
"""GR00T-N1.5 in other sizes: upstream's modules, its own forward on a CPU without flash-attn, and refused sizes."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from lerobot.policies.groot import groot_n1, modeling_groot, processor_groot
from lerobot.policies.groot.action_head import flow_matching_action_head

from embodix.config.compose import compose
from embodix.patching import patched
from embodix_groot.architecture import (
    MAX_EMBODIMENT_ID,
    PUBLIC_ARCHITECTURE,
    tokens_per_image,
    validate_architecture,
)
from embodix_groot.testing import SMALL_ARCHITECTURE, groot_policy_config, meta_groot, random_batch, small_groot


def changed(part: str, **fields: Any) -> dict[str, Any]:
    architecture = copy.deepcopy(SMALL_ARCHITECTURE)
    architecture[part].update(fields)
    return architecture


def test_sizes_reach_every_module_and_upstream_is_put_back():
    replaced = {
        groot_n1: ("AutoConfig", "AutoModel", "ensure_eagle_cache_ready"),
        groot_n1.GR00TN15: ("__init__", "from_pretrained"),
        modeling_groot.GrootPolicy: ("_create_groot_model",),
        flow_matching_action_head: ("Beta",),
        processor_groot: ("AutoProcessor",),
    }
    before = {owner: [vars(owner)[name] for name in names] for owner, names in replaced.items()}
    policy = small_groot()
    assert {owner: [vars(owner)[name] for name in names] for owner, names in replaced.items()} == before
    assert policy.config.type == "groot"
    assert type(policy) is modeling_groot.GrootPolicy
    eagle, head = policy._groot_model.backbone.eagle_model, policy._groot_model.action_head
    assert len(eagle.vision_model.vision_model.encoder.layers) == 2
    assert eagle.vision_model.config._attn_implementation == "sdpa"
    assert eagle.num_image_token == tokens_per_image(SMALL_ARCHITECTURE) == 4
    assert len(eagle.language_model.model.layers) == policy._groot_model.backbone.select_layer == 3
    assert eagle.mlp1[0].weight.shape == (32, 32)
    assert len(head.vl_self_attention.transformer_blocks) == 2
    assert len(head.model.transformer_blocks) == 4
    assert (head.model.inner_dim, head.hidden_size, head.future_tokens.num_embeddings) == (32, 24, 5)
    assert (head.action_dim, head.action_horizon, head.config.max_state_dim) == (8, 16, 12)


def test_upstreams_own_forward_and_sampling_run_without_flash_attention():
    assert importlib.util.find_spec("flash_attn") is None
    policy = small_groot(tune_llm=True, tune_visual=True)
    batch = random_batch(policy, [4, 9, 2], [2, 1, 0])
    loss, _ = policy(batch)
    loss.backward()
    assert torch.isfinite(loss)
    without = [name for name, p in policy.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert without == ["_groot_model.backbone.eagle_model.language_model.lm_head.weight"], "its logits are dropped"
    actions = policy.predict_action_chunk(batch)
    assert actions.shape == (3, 16, 4)
    assert actions.isfinite().all()


def test_without_the_patch_flash_attention_is_demanded():
    """Twin: upstream's own vision tower refuses to be built here."""
    from lerobot.policies.groot.eagle2_hg_model.configuration_eagle2_5_vl import Eagle25VLConfig
    from lerobot.policies.groot.eagle2_hg_model.modeling_eagle2_5_vl import Eagle25VLForConditionalGeneration

    from embodix_groot.architecture import eagle_config

    with pytest.raises(ImportError, match=r"(?i)flash"):
        Eagle25VLForConditionalGeneration(Eagle25VLConfig(**eagle_config(SMALL_ARCHITECTURE)))
    with patched({"lerobot_groot_runs": {}}):
        Eagle25VLForConditionalGeneration(Eagle25VLConfig(**eagle_config(SMALL_ARCHITECTURE)))


def test_a_seed_makes_the_same_weights_again():
    one, same, other = (small_groot(seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_linear_layers_start_where_asked():
    for gain in (None, 0.5):
        model = small_groot({**SMALL_ARCHITECTURE, "linear_gain": gain})._groot_model
        linears = {
            "connector": (model.backbone.eagle_model.mlp1[0].weight, 32),
            "language": (model.backbone.eagle_model.language_model.model.layers[1].mlp.down_proj.weight, 64),
            "vl_self_attention": (model.action_head.vl_self_attention.transformer_blocks[0].attn1.to_q.weight, 32),
            "dit": (model.action_head.model.transformer_blocks[2].ff.net[2].weight, 128),
            "embodiments": (model.action_head.action_encoder.W2.W, 64),
        }
        for name, (weight, inputs) in linears.items():
            wanted = 0.02 if gain is None else gain / inputs**0.5
            assert weight.std().item() == pytest.approx(wanted, rel=0.1), name


def test_the_horizon_is_the_processors():
    assert small_groot(chunk_size=6, n_action_steps=3)._groot_model.action_horizon == 6
    assert small_groot(chunk_size=50)._groot_model.action_horizon == 16


def test_the_benchmark_size_can_be_asked_for():
    """Four language, nine vision and six DiT layers on 224-pixel images."""
    sizes = copy.deepcopy(PUBLIC_ARCHITECTURE)
    sizes["language"]["num_hidden_layers"] = 4
    sizes["vision"]["num_hidden_layers"] = 9
    sizes["action_head"]["num_layers"] = 6
    model = meta_groot(sizes)._groot_model
    assert len(model.backbone.eagle_model.language_model.model.layers) == 4
    assert len(model.backbone.eagle_model.vision_model.vision_model.encoder.layers) == 9
    assert len(model.action_head.model.transformer_blocks) == 6
    assert model.backbone.eagle_model.num_image_token == 256


def test_the_real_size_has_the_public_checkpoints_tensors():
    policy = meta_groot(PUBLIC_ARCHITECTURE)
    shapes = {name: tuple(p.shape) for name, p in policy.named_parameters()}
    unused = shapes["_groot_model.backbone.eagle_model.language_model.lm_head.weight"]
    assert unused == (151680, 2048)
    assert sum(p.numel() for p in policy.parameters()) == 2_413_522_880 + 151680 * 2048
    model = "_groot_model."
    language, vision = (
        f"{model}backbone.eagle_model.language_model.model.",
        f"{model}backbone.eagle_model.vision_model.",
    )
    assert shapes[f"{language}embed_tokens.weight"] == (151680, 2048)
    assert shapes[f"{language}layers.11.mlp.gate_proj.weight"] == (6144, 2048)
    assert f"{language}layers.12.mlp.gate_proj.weight" not in shapes
    assert shapes[f"{vision}vision_model.encoder.layers.26.mlp.fc1.weight"] == (4304, 1152)
    assert shapes[f"{vision}vision_model.embeddings.patch_embedding.weight"] == (1152, 3, 14, 14)
    assert shapes[f"{model}backbone.eagle_model.mlp1.0.weight"] == (2048, 1152)
    head = f"{model}action_head."
    assert shapes[f"{head}vl_self_attention.transformer_blocks.3.attn1.to_q.weight"] == (2048, 2048)
    assert shapes[f"{head}model.transformer_blocks.14.attn1.to_k.weight"] == (1536, 2048)
    assert shapes[f"{head}model.transformer_blocks.15.attn1.to_k.weight"] == (1536, 1536)
    assert shapes[f"{head}model.proj_out_2.weight"] == (1024, 1536)
    assert shapes[f"{head}action_encoder.W1.W"] == (32, 32, 1536)
    assert shapes[f"{head}state_encoder.layer1.W"] == (32, 64, 1024)
    assert shapes[f"{head}action_decoder.layer2.W"] == (32, 1024, 32)
    assert shapes[f"{head}position_embedding.weight"] == (1024, 1536)
    assert shapes[f"{head}future_tokens.weight"] == (32, 1536)
    assert all(p.is_meta for p in policy.parameters())


def test_the_shipped_small_size_is_valid_and_small():
    architecture: Any = compose("train", ["policy=groot_n15_small"]).architecture
    validate_architecture(architecture)
    assert tokens_per_image(architecture) == 16
    assert sum(p.numel() for p in meta_groot(architecture).parameters()) < 3_000_000


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (changed("vision", hidden_size=33), r"vision\.hidden_size must be a multiple .* 33 and 4"),
        (changed("vision", image_size=30), r"vision\.image_size must be a multiple .* 30 and 14"),
        (changed("language", num_key_value_heads=3), "multiple of language.num_key_value_heads; got 4 and 3"),
        (changed("language", head_dim=15), "split in halves by RoPE; got 15"),
        (changed("language", hidden_size=40), r"must be language\.hidden_size; got 4 x 8 and 40"),
        (changed("language", vocab_size=6), r"6 special tokens and more; got 6"),
        (changed("vl_self_attention", attention_head_dim=9), "got 4 x 9 and 32"),
        (changed("action_head", num_attention_heads=1, attention_head_dim=9), "time encoding; got 1 x 9"),
        (changed("action_head", num_embodiments=31), f"must exceed {MAX_EMBODIMENT_ID}"),
        (changed("action_head", num_layers=0), "1 at least; got 0"),
        (changed("language", hidden_size="32"), "got '32'"),
        (changed("language", heads=8), "unknown: heads"),
        ({"language": {}}, "missing: vision, vl_self_attention, action_head, dropout"),
        ({**SMALL_ARCHITECTURE, "vision": 3}, "mapping"),
        ({**SMALL_ARCHITECTURE, "dropout": 1.0}, "from 0 to below 1; got 1.0"),
        ({**SMALL_ARCHITECTURE, "expert_gate": 1.0}, "unknown: expert_gate"),
        ({**SMALL_ARCHITECTURE, "linear_gain": 0}, "a number above 0, or null .* got 0"),
    ],
)
def test_sizes_that_upstream_cannot_compute_with_are_refused(architecture, message):
    with pytest.raises(ValueError, match=message):
        validate_architecture(architecture)


def test_flash_attention_is_taken_only_where_it_runs(monkeypatch):
    """It knows neither a CPU nor float32; asked for there, the first forward would fail."""
    from embodix_groot.patches import lerobot_groot_runs as runs

    monkeypatch.setattr(runs.importlib.util, "find_spec", lambda name: object())
    for device, use_bf16, wanted in (("cuda", True, True), ("cuda", False, False), ("cpu", True, False)):
        config = groot_policy_config(28, use_bf16=use_bf16)
        config.device = device
        chosen = []
        policy = type("Policy", (), {"config": config})()
        runs.naming_the_policy(lambda _, chosen=chosen: chosen.append(runs.flash_attention_runs()))(policy)
        assert chosen == [wanted], (device, use_bf16)
    assert not runs.flash_attention_runs()
