# SPDX-License-Identifier: Apache-2.0
"""The files of a GR00T-N1.5 of any size: made without network, found again, and never half there."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from transformers import Qwen2Tokenizer

from embodix_groot import assets as assets_module
from embodix_groot.architecture import SPECIAL_TOKENS, tokens_per_image
from embodix_groot.assets import RECORD_FILE, prepare_assets

from .groot_files import ARCHITECTURE, INSTRUCTIONS, SETTINGS, assets, no_network

UPSTREAM_WANTS = (  # lerobot/policies/groot/utils.py
    *("vocab.json", "merges.txt", "added_tokens.json", "chat_template.json", "special_tokens_map.json", "config.json"),
    *("generation_config.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.json"),
)


@pytest.fixture
def folder(tmp_path):
    """A copy that may be changed, where `prepare_assets(tmp_path, SETTINGS)` looks for it."""
    return shutil.copytree(assets(), tmp_path / SETTINGS.digest)


def test_upstream_finds_every_file_and_fetches_none(capsys):
    from lerobot.policies.groot.groot_n1 import DEFAULT_VENDOR_EAGLE_PATH
    from lerobot.policies.groot.utils import ensure_eagle_cache_ready

    assert {name for name in UPSTREAM_WANTS if not (assets() / name).is_file()} == set()
    with no_network():
        ensure_eagle_cache_ready(DEFAULT_VENDOR_EAGLE_PATH, assets(), str(assets()))
    assert "Fetching" not in capsys.readouterr().out


def test_made_without_network(tmp_path):
    with no_network():
        made = prepare_assets(tmp_path, SETTINGS)
    assert sorted(path.name for path in tmp_path.iterdir()) == [SETTINGS.digest]
    records = [json.loads((path / RECORD_FILE).read_text()) for path in (made, assets())]
    differ = {name for name, digest in records[0]["files"].items() if records[1]["files"][name] != digest}
    assert differ <= {"base_model/config.json"}, "the same settings make the same files, but for the folder's own name"


def test_used_again_when_equal(folder, monkeypatch):
    monkeypatch.setattr(assets_module, "write_files", lambda *_: pytest.fail("written again"))
    assert prepare_assets(folder.parent, SETTINGS) == folder


@pytest.mark.parametrize("name", ["tokenizer.json", "base_model/model.safetensors"])
def test_changed_files_are_named(folder, name):
    (folder / name).write_bytes((folder / name).read_bytes() + b" ")
    with pytest.raises(ValueError, match=rf"(?s){name} missing or changed.*Delete the folder"):
        prepare_assets(folder.parent, SETTINGS)


@pytest.mark.parametrize("name", ["config.json", RECORD_FILE])
def test_missing_files_are_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{name} missing or changed"):
        prepare_assets(folder.parent, SETTINGS)


def test_an_interrupted_writer_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(assets_module, "write_base_model", fail)
    with pytest.raises(KeyboardInterrupt):
        prepare_assets(tmp_path, SETTINGS)
    assert list(tmp_path.iterdir()) == []


def test_a_faster_process_wins(tmp_path, monkeypatch):
    write = assets_module.write_files

    def overtaken(unfinished, final, settings):
        write(unfinished, final, settings)
        shutil.copytree(assets(), final)

    monkeypatch.setattr(assets_module, "write_files", overtaken)
    made = prepare_assets(tmp_path, SETTINGS)
    assert (made / RECORD_FILE).read_bytes() == (assets() / RECORD_FILE).read_bytes()
    assert list(tmp_path.iterdir()) == [made]


def test_other_settings_have_another_folder():
    others = [
        dataclasses.replace(SETTINGS, instructions=("wait",)),
        dataclasses.replace(SETTINGS, chunk_size=10),
        dataclasses.replace(SETTINGS, max_state_dim=5),
        dataclasses.replace(SETTINGS, architecture={**ARCHITECTURE, "dropout": 0.1}),
    ]
    assert len({SETTINGS.digest, *(settings.digest for settings in others)}) == 5
    same = dataclasses.replace(SETTINGS, instructions=(*reversed(INSTRUCTIONS), INSTRUCTIONS[0]))
    assert same.digest == SETTINGS.digest


@pytest.mark.parametrize("source", ["tokenizer.json", "vocab.json and merges.txt"])
def test_the_tokenizer_keeps_special_tokens_whole_and_covers_any_text(folder, source):
    if source != "tokenizer.json":  # what upstream's public folder has
        (folder / "tokenizer.json").unlink()
    tokenizer = Qwen2Tokenizer.from_pretrained(folder)
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    ids = tokenizer("<|im_start|>user\n<img><IMG_CONTEXT></img>press it<|im_end|>").input_ids
    assert [ids[0], ids[-1], ids.count(3), ids.count(4), ids.count(5)] == [1, 2, 1, 1, 1]
    for text in ("reach the goal", "Öffne die Tür, 開けて! 🙂\n\t9 < 10"):
        encoded = tokenizer(text).input_ids
        assert tokenizer.decode(encoded) == text
        assert max(encoded) < ARCHITECTURE["language"]["vocab_size"]
    words = len(tokenizer("reach the goal").input_ids)
    assert words < len("reach the goal") / 2, "the corpus is merged into words"


def test_the_processor_makes_as_many_tokens_as_the_model_has_patches():
    from lerobot.policies.groot.processor_groot import _build_eagle_processor

    from embodix.patching import patched

    with patched({"lerobot_groot_runs": {}}):
        processor = _build_eagle_processor(str(assets()))
    assert processor.tokens_per_tile == tokens_per_image(ARCHITECTURE)
    assert processor.tokenizer.padding_side == "left"
    images = processor.image_processor(images=[torch.rand(3, 50, 31)], min_dynamic_tiles=1, max_dynamic_tiles=1)
    assert images["pixel_values"].shape == (1, 3, 28, 28)


def test_a_vocabulary_without_room_for_bytes_is_refused(tmp_path):
    architecture = {**ARCHITECTURE, "language": {**ARCHITECTURE["language"], "vocab_size": 261}}
    with pytest.raises(ValueError, match="vocab_size must be at least 262"):
        prepare_assets(tmp_path, dataclasses.replace(SETTINGS, architecture=architecture))
    assert list(tmp_path.iterdir()) == []
