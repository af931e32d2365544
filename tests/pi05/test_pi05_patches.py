# SPDX-License-Identifier: Apache-2.0
"""The patches of π0.5: other sizes, and loads that must not fail silently."""

from __future__ import annotations

import copy

import pytest
import torch
from lerobot.policies.pi05 import modeling_pi05
from lerobot.policies.pi05.modeling_pi05 import PI05Policy
from safetensors.torch import load_file, save_file

from embodix.checkpoints.skeleton import WeightLoadError
from embodix.patching import patched
from embodix_pi05.patches.lerobot_pi05_sizes import validate_architecture
from embodix_pi05.testing import SMALL_ARCHITECTURE, small_pi05

STRICT = {"lerobot_pi05_sizes": {"architecture": SMALL_ARCHITECTURE}, "lerobot_pi05_strict_load": {}}


def changed(part, **fields):
    architecture = copy.deepcopy(SMALL_ARCHITECTURE)
    architecture[part].update(fields)
    return architecture


def test_sizes_reach_every_module_and_upstream_is_put_back():
    before = modeling_pi05.get_gemma_config, modeling_pi05.PiGemmaForCausalLM
    policy = small_pi05()
    assert (modeling_pi05.get_gemma_config, modeling_pi05.PiGemmaForCausalLM) == before
    with_expert = policy.model.paligemma_with_expert
    vlm = with_expert.paligemma.model
    assert len(vlm.vision_tower.vision_model.encoder.layers) == 2
    assert vlm.vision_tower.vision_model.embeddings.patch_embedding.out_channels == 32
    assert vlm.language_model.embed_tokens.num_embeddings == 128
    assert vlm.multi_modal_projector.linear.out_features == 32
    assert with_expert.gemma_expert.lm_head.out_features == 128
    assert with_expert.gemma_expert.model.layers[0].mlp.up_proj.out_features == 40
    assert policy.config.type == "pi05"


FOUR_HEADS = changed("language", num_heads=4)


def test_gates_of_the_expert_start_where_asked():
    config = small_pi05().config
    gated = {**SMALL_ARCHITECTURE, "expert_gate": 0.5}
    with patched({"lerobot_pi05_sizes": {"architecture": gated}}):
        expert = PI05Policy(config).model.paligemma_with_expert.gemma_expert
    norms = [module for module in expert.modules() if getattr(module, "dense", None) is not None]
    assert len(norms) == 2 * gated["action_expert"]["depth"] + 1
    for norm in norms:
        condition = torch.randn(2, norm.cond_dim)
        scale, shift, gate = norm.dense(condition).chunk(3, dim=-1)
        assert (scale == 0).all()
        assert (shift == 0).all()
        assert (gate == 0.5).all()


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (changed("language", num_heads=4), "num_heads must be equal"),
        (
            {
                **changed("language", num_heads=4),
                "action_expert": {**SMALL_ARCHITECTURE["action_expert"], "num_heads": 4},
            },
            "8 heads",
        ),
        (changed("action_expert", depth=2), "language 3 and action_expert 2"),
        (changed("action_expert", head_dim=8), "head_dim must be equal"),
        (changed("vision", hidden_size=33), "multiple of vision.num_attention_heads"),
        (changed("language", width=0), "1 at least; got 0"),
        (changed("language", width="32"), "got '32'"),
        (changed("language", heads=8), "unknown: heads"),
        ({"language": {}}, "missing: vision, action_expert"),
        ({**SMALL_ARCHITECTURE, "vision": 3}, "mapping"),
        (changed("action_expert", width=23), "must be even"),
    ],
)
def test_sizes_that_upstream_cannot_compute_with_are_refused(architecture, message):
    with pytest.raises(ValueError, match=message):
        validate_architecture(architecture)


@pytest.fixture
def checkpoint(tmp_path):
    policy = small_pi05()
    policy.save_pretrained(tmp_path)
    return policy, tmp_path


def rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


BIAS = "model.action_out_proj.bias"


def test_a_complete_checkpoint_loads(checkpoint):
    policy, directory = checkpoint
    with patched(STRICT):
        loaded = PI05Policy.from_pretrained(directory)
    for name, tensor in policy.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(BIAS), r"missing \(1\):\n    model.action_out_proj.bias"),
        (lambda tensors: tensors.update({"model.extra": torch.zeros(1)}), r"unexpected \(1\):\n    model.extra"),
        (lambda tensors: tensors.update({BIAS: torch.zeros(3)}), r"bias: checkpoint \(3,\), policy \(8,\)"),
    ],
    ids=["missing", "unexpected", "other size"],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_that_does_not_fit_names_its_tensors(checkpoint, change, message, strict):
    _, directory = checkpoint
    rewrite(directory, change)
    with patched(STRICT), pytest.raises(WeightLoadError, match=message):
        PI05Policy.from_pretrained(directory, strict=strict)


@pytest.mark.parametrize("harm", ["absent", "cut short"])
def test_weights_that_cannot_be_read_are_an_error(checkpoint, harm):
    _, directory = checkpoint
    weights = directory / "model.safetensors"
    if harm == "absent":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:1000])
    with patched(STRICT), pytest.raises(WeightLoadError, match="absent or unreadable") as error:
        PI05Policy.from_pretrained(directory)
    assert "Could not load state dict from remote files" in str(error.value)


def test_without_the_patch_upstream_goes_on_with_random_weights(checkpoint):
    """Twin: the same checkpoint passes unnoticed when the patch is off."""
    _, directory = checkpoint
    rewrite(directory, lambda tensors: tensors.pop(BIAS))
    with patched({"lerobot_pi05_sizes": {"architecture": SMALL_ARCHITECTURE}}):
        PI05Policy.from_pretrained(directory)
    assert "load_state_dict" not in PI05Policy.__dict__
