# SPDX-License-Identifier: Apache-2.0
"""The offline tokenizer: Gemma's manners, and found by pi0.5's hub id without network."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import huggingface_hub.constants as hub_constants
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from embodix.data.tokenizer import build_tokenizer, offline_tokenizer
from embodix.policies.support import support_of
from embodix_metaworld.tasks import INSTRUCTIONS

HUB_ID = support_of("pi05").tokenizer_hub_id
CORPUS = sorted(INSTRUCTIONS.values())
PROMPT = "Task: Press the button from the top, State: 12 200 -1 45;\nAction: "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(CORPUS, folder, vocab_size=1024)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    with offline_tokenizer(folder):
        return AutoTokenizer.from_pretrained(HUB_ID)


def test_digits_are_tokens_of_their_own(tokenizer):
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(PROMPT).input_ids)
    assert tokens[0] == "<bos>"
    assert "".join(token.replace("\u2581", " ") for token in tokens[1:]) == PROMPT
    assert all(len(token) == 1 for token in tokens if any(character.isdigit() for character in token))


def test_words_of_the_corpus_are_tokens(tokenizer):
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("Press the button from the top").input_ids)
    assert tokens[-5:] == ["\u2581the", "\u2581button", "\u2581from", "\u2581the", "\u2581top"]


def test_special_tokens_have_gemmas_ids(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)


@given(text=st.text(min_size=1))
def test_any_text_survives_and_stays_inside_the_vocabulary(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert max(ids) < 1024
    if not any(special in text for special in tokenizer.all_special_tokens):
        decoded = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert decoded == text.replace("\u2581", " ")


def test_building_is_deterministic(folder, tmp_path):
    (again,) = build_tokenizer(CORPUS, tmp_path, vocab_size=1024)
    first = next(folder.glob("hub/*/snapshots/*"))
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (again / name).read_bytes() == (first / name).read_bytes()


def test_a_vocabulary_without_room_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="`vocab_size` must be at least"):
        build_tokenizer(CORPUS, tmp_path, vocab_size=300)


def test_plain_processes_find_it_through_the_environment(folder, tokenizer):
    load = f"AutoTokenizer.from_pretrained({HUB_ID!r})"
    script = f"from transformers import AutoTokenizer; print({load}({PROMPT!r}).input_ids)"
    environment = {**os.environ, "HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    output = subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True)
    assert output.stdout.strip() == str(tokenizer(PROMPT).input_ids)


def test_child_processes_find_it(folder, tokenizer):
    with offline_tokenizer(folder), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        loaded = pool.submit(AutoTokenizer.from_pretrained, HUB_ID).result()
    assert loaded(PROMPT).input_ids == tokenizer(PROMPT).input_ids


def test_upstreams_processor_uses_it(folder, tokenizer):
    from lerobot.policies.pi05.configuration_pi05 import PI05Config
    from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors

    with offline_tokenizer(folder):
        preprocess, _ = make_pi05_pre_post_processors(PI05Config(device="cpu", tokenizer_max_length=48))
    batch = preprocess({"observation.state": torch.zeros(1, 2), "task": ["Reach"], "action": torch.zeros(1, 4)})
    valid = batch["observation.language.attention_mask"][0].bool()
    expected = tokenizer("Task: Reach, State: 128 128;\nAction: ").input_ids
    assert batch["observation.language.tokens"][0][valid].tolist() == expected


def test_everything_is_as_before_on_exit(folder):
    before = (hub_constants.HF_HUB_CACHE, hub_constants.HF_HUB_OFFLINE, os.environ.get("HF_HUB_CACHE"))
    with pytest.raises(RuntimeError), offline_tokenizer(folder):
        raise RuntimeError
    assert (hub_constants.HF_HUB_CACHE, hub_constants.HF_HUB_OFFLINE, os.environ.get("HF_HUB_CACHE")) == before


def test_a_folder_without_tokenizer_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no tokenizer"), offline_tokenizer(tmp_path):
        pass
