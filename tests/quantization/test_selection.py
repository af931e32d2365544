# SPDX-License-Identifier: Apache-2.0
"""Which modules are quantized: golden lists at the real size, and a selector by name that would go wrong."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from torch import nn

from embodix.quantization.selection import choose_modules
from embodix_groot.architecture import PUBLIC_ARCHITECTURE
from embodix_groot.testing import meta_groot
from embodix_pi05.record import DECODER_LINEAR, Pi05
from embodix_pi05.testing import meta_pi05, small_pi05

PROJECTIONS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
PI05_LANGUAGE = "model.paligemma_with_expert.paligemma.model.language_model"
GROOT_LANGUAGE = "_groot_model.backbone.eagle_model.language_model"


@pytest.fixture(scope="module")
def pi05():
    return meta_pi05()


@pytest.fixture(scope="module")
def groot():
    return meta_groot(PUBLIC_ARCHITECTURE)


def converted(policy, policy_type, **options):
    return [choice.path for choice in choose_modules(policy, policy_type, **options) if choice.convert]


def layers(prefix, count):
    return {f"{prefix}.layers.{index}.{name}" for index in range(count) for name in PROJECTIONS}


def test_pi05_converts_the_decoder_of_its_language_model(pi05):
    paths = converted(pi05, "pi05")
    assert len(paths) == 126
    assert set(paths) == layers(PI05_LANGUAGE, 18)


def test_groot_converts_the_decoder_of_its_language_model(groot):
    paths = converted(groot, "groot")
    assert len(paths) == 84
    assert set(paths) == layers(f"{GROOT_LANGUAGE}.model", 12)


def test_embeddings_and_unused_heads_are_asked_for(pi05, groot):
    added = set(converted(pi05, "pi05", embeddings=True, unused_heads=True)) - layers(PI05_LANGUAGE, 18)
    assert added == {f"{PI05_LANGUAGE}.embed_tokens", "model.paligemma_with_expert.paligemma.lm_head"}
    added = set(converted(groot, "groot", embeddings=True, unused_heads=True)) - layers(f"{GROOT_LANGUAGE}.model", 12)
    assert added == {f"{GROOT_LANGUAGE}.model.embed_tokens", f"{GROOT_LANGUAGE}.lm_head"}


@pytest.mark.parametrize(
    ("policy_type", "kinds"),
    [
        ("pi05", {"language_linear": 126, "embedding": 1, "unused_head": 2, "connector": 1}),
        ("groot", {"language_linear": 84, "embedding": 1, "unused_head": 1}),
    ],
)
def test_every_linear_and_embedding_is_listed_with_its_part_and_a_reason(policy_type, kinds, request):
    policy = request.getfixturevalue(policy_type)
    choices = choose_modules(policy, policy_type)
    modules = [path for path, module in policy.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))]
    assert [choice.path for choice in choices] == modules
    counted = Counter(choice.kind for choice in choices)
    assert kinds.items() <= counted.items()
    assert counted["vision"] > 100
    assert counted["action_head"] > 100
    assert counted["other"] == 0
    assert all(choice.reason for choice in choices)
    assert not any(choice.convert for choice in choices if choice.kind in ("vision", "connector", "action_head"))


def test_a_selector_that_takes_the_action_expert_too_is_noticed(pi05, monkeypatch):
    """The mutation twin: names without their full path match the expert's layers."""
    monkeypatch.setattr(Pi05, "module_kinds", Pi05.module_kinds | {"language_linear": r".*" + DECODER_LINEAR})
    extra = set(converted(pi05, "pi05")) - layers(PI05_LANGUAGE, 18)
    assert len([path for path in extra if ".gemma_expert." in path]) == 126


def test_another_policy_and_a_wrapped_one_are_refused():
    policy = small_pi05()
    with pytest.raises(ValueError, match=re.escape("groot and pi05; got policy.type=act")):
        choose_modules(policy, "act")
    with pytest.raises(ValueError, match=re.escape("got none (policy.model.")):
        choose_modules(nn.ModuleDict({"policy": policy}), "pi05")
    with pytest.raises(ValueError, match="no linear layer at all"):
        choose_modules(nn.Identity(), "pi05")


def test_below_adapters_the_same_layers_are_converted():
    """Adapters stand in the places of layers, which are what they were; their own low ranks are never converted."""
    bare, adapted = small_pi05(), small_pi05()
    adapted.config.pretrained_path = "base"
    adapted.wrap_with_peft(peft_cli_overrides={"r": 2, "target_modules": r".*language_model.*[qv]_proj|.*lm_head"})
    paths = converted(adapted, "pi05", unused_heads=True)
    assert [path.removesuffix(".base_layer") for path in paths] == converted(bare, "pi05", unused_heads=True)
    assert sum(path.endswith(".base_layer") for path in paths) == 2 * 3 + 1
    kept = [choice for choice in choose_modules(adapted, "pi05", unused_heads=True) if not choice.convert]
    assert [choice.path for choice in kept if choice.kind == "unused_head"] == [
        "model.paligemma_with_expert.gemma_expert.lm_head.base_layer"
    ]
