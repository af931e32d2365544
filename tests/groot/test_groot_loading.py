# SPDX-License-Identifier: Apache-2.0
"""A loaded GR00T-N1.5 equals its file, tensor by tensor, or the load is an error that names them."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from lerobot.policies import pretrained
from lerobot.policies.groot.eagle2_hg_model.modeling_eagle2_5_vl import Eagle25VLPreTrainedModel
from lerobot.policies.groot.groot_n1 import GR00TN15
from lerobot.policies.groot.modeling_groot import GrootPolicy
from safetensors.torch import load_file, save_file

from embodix.checkpoints.skeleton import WeightLoadError
from embodix.patching import patched
from embodix_groot.assets import BASE_MODEL
from embodix_groot.patches import lerobot_groot_runs
from embodix_groot.patches.lerobot_groot_strict_load import weight_files
from embodix_groot.testing import small_groot

from .groot_files import ARCHITECTURE, assets, no_network, policy_config, processed

RUNS = {"lerobot_groot_runs": {}}
STRICT = {**RUNS, "lerobot_groot_strict_load": {}}
CONNECTOR = "backbone.eagle_model.mlp1.0.weight"
LM_HEAD = "backbone.eagle_model.language_model.lm_head.weight"
BIAS = "action_head.vlln.bias"


@pytest.fixture
def base(tmp_path):
    """A copy of a base model that may be changed."""
    return shutil.copytree(assets() / BASE_MODEL, tmp_path / "base")


def rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def load_base(folder, patches):
    with patched(patches), no_network():
        return GrootPolicy(policy_config(base_model_path=str(folder)))


def test_a_base_model_is_the_file(base):
    policy = load_base(base, STRICT)
    stored, loaded = load_file(base / "model.safetensors"), policy._groot_model.state_dict()
    assert loaded.keys() == stored.keys()
    assert len(stored) > 50
    assert [name for name in stored if not torch.equal(stored[name], loaded[name])] == []
    assert not any(buffer.is_meta for buffer in policy.buffers())


def test_a_bfloat16_file_gives_float32_parameters(base):
    """Upstream means bfloat16 compute on float32 parameters; transformers 5 would take the file's dtype."""
    rewrite(base, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    policy = load_base(base, STRICT)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    stored = load_file(base / "model.safetensors")
    loaded = policy._groot_model.state_dict()
    assert all(torch.equal(stored[name].float(), loaded[name]) for name in stored)


def test_the_policys_assets_are_the_backbones(base):
    """The public base model names no folder; upstream's backbone would ask the hub for its default."""
    config = json.loads((base / "config.json").read_text())
    del config["backbone_cfg"]["tokenizer_assets_repo"]
    (base / "config.json").write_text(json.dumps(config))
    policy = load_base(base, STRICT)
    assert policy._groot_model.backbone.eagle_model.config.text_config.vocab_size == 400


def test_a_model_in_shards_is_checked_too(base):
    tensors = load_file(base / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, base / shard, metadata={"format": "pt"})
    (base / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {name: shard for shard, members in shards.items() for name in members}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in weight_files(base)] == sorted(shards)
    load_base(base, STRICT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(BIAS), rf"missing in the file \(1\):\n    {BIAS}"),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), r"unexpected in the file \(1\):\n    extra"),
    ],
    ids=["missing", "unexpected"],
)
def test_a_base_model_that_does_not_fit_names_its_tensors(base, change, message):
    rewrite(base, change)
    with pytest.raises(WeightLoadError, match=message):
        load_base(base, STRICT)
    load_base(base, RUNS)  # twin: upstream goes on


def test_upstreams_connector_is_drawn_anew_and_found(base, monkeypatch):
    """The fault itself: without the guard the connector is not the file's; the check names it, upstream does not."""
    unguarded = Eagle25VLPreTrainedModel._init_weights
    monkeypatch.setattr(lerobot_groot_runs, "keeping_loaded_weights", lambda _: unguarded)
    with pytest.raises(WeightLoadError, match=rf"(?s)different from the file \(\d\):.*{CONNECTOR}"):
        load_base(base, STRICT)
    policy = load_base(base, RUNS)
    stored = load_file(base / "model.safetensors")
    differ = [n for n, t in policy._groot_model.state_dict().items() if n in stored and not torch.equal(t, stored[n])]
    assert CONNECTOR in differ
    assert all("mlp1" in name for name in differ)


def test_one_changed_number_is_found(base, monkeypatch):
    load = GR00TN15.from_pretrained.__func__

    def altering(cls, *args, **kwargs):
        model = load(cls, *args, **kwargs)
        with torch.no_grad():
            model.action_head.vlln.bias[3] += 1e-6
        return model

    monkeypatch.setattr(GR00TN15, "from_pretrained", classmethod(altering))
    with pytest.raises(WeightLoadError, match=rf"different from the file \(1\):\n    {BIAS}"):
        load_base(base, STRICT)


def test_the_unused_vocabulary_projection_may_be_absent(base):
    """Files of tied models leave it out; upstream drops what is computed with it."""
    rewrite(base, lambda tensors: tensors.pop(LM_HEAD))
    load_base(base, STRICT)


@pytest.fixture
def checkpoint(tmp_path):
    policy = small_groot(ARCHITECTURE, base_model_path=str(assets() / BASE_MODEL), seed=1)
    policy.save_pretrained(tmp_path / "checkpoint")
    return policy, tmp_path / "checkpoint"


def load_checkpoint(folder, patches, **options):
    with patched(patches), no_network():
        return GrootPolicy.from_pretrained(folder, **options)


def test_a_fine_tuned_checkpoint_is_the_file(checkpoint):
    policy, folder = checkpoint
    assert json.loads((folder / "config.json").read_text())["type"] == "groot"
    loaded = load_checkpoint(folder, STRICT).state_dict()
    assert len(policy.state_dict()) > 50
    assert [name for name, tensor in policy.state_dict().items() if not torch.equal(tensor, loaded[name])] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"_groot_model.{BIAS}"), rf"missing in the file \(1\):\n    _groot_model.{BIAS}"),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), r"unexpected in the file \(1\):\n    extra"),
    ],
    ids=["missing", "unexpected"],
)
def test_a_checkpoint_that_does_not_fit_names_its_tensors(checkpoint, change, message):
    _, folder = checkpoint
    rewrite(folder, change)
    with pytest.raises(WeightLoadError, match=message):
        load_checkpoint(folder, STRICT, strict=False)
    load_checkpoint(folder, RUNS, strict=False)  # twin: upstream goes on


def test_a_checkpoint_that_is_not_loaded_is_found(checkpoint, monkeypatch):
    _, folder = checkpoint
    monkeypatch.setattr(pretrained, "load_model_as_safetensor", lambda *_, **__: ([], []))
    with pytest.raises(WeightLoadError, match=r"and \d+ more"):
        load_checkpoint(folder, STRICT)


def test_sizes_and_checkpoint_need_no_base_model(checkpoint):
    """With its architecture, a checkpoint loads although the base model it names is gone."""
    policy, folder = checkpoint
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "base_model_path": "/nowhere"}))
    loaded = load_checkpoint(folder, {**STRICT, "lerobot_groot_sizes": {"architecture": ARCHITECTURE}})
    assert torch.equal(
        loaded.state_dict()[f"_groot_model.{CONNECTOR}"], policy.state_dict()[f"_groot_model.{CONNECTOR}"]
    )


def test_saved_processors_know_their_assets(tmp_path):
    """Upstream saves no setting of the Eagle steps; a loaded pipeline would ask the hub for its default assets."""
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.policies.groot.processor_groot import make_groot_pre_post_processors

    from .groot_files import INSTRUCTIONS, STATISTICS, raw_batch

    config = policy_config()
    patches = {**RUNS, "lerobot_groot_samples": {}}
    with patched(patches), no_network():
        for processors in make_groot_pre_post_processors(config, STATISTICS):
            processors.save_pretrained(tmp_path)
        preprocess, _ = make_pre_post_processors(config, pretrained_path=str(tmp_path))
        loaded = preprocess(raw_batch(list(INSTRUCTIONS)))
    fresh = processed(config, list(INSTRUCTIONS), language="per_sample")
    for key in ("eagle_input_ids", "eagle_pixel_values", "state", "action"):
        assert torch.equal(loaded[key], fresh[key]), key
    with patched({}), no_network():
        upstream_saved = tmp_path / "upstream"
        make_groot_pre_post_processors(config, STATISTICS)[0].save_pretrained(upstream_saved)
    assert "tokenizer_assets_repo" not in (upstream_saved / "policy_preprocessor.json").read_text()
