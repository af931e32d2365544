# SPDX-License-Identifier: Apache-2.0
"""Prompts that are too long: the state and the closing word stay, what is cut is counted, and NaN is no number."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors

from embodix.data.sample_sizes import SizedDataset
from embodix.data.tokenizer import build_tokenizer, offline_tokenizer
from embodix.patching import patched
from embodix.policies.support import support_of
from embodix.testing.datasets import write_dataset

SHORT = "push it"
LONG = "open the drawer slowly and wait until it is open, then take the red block out of it and close it"
PATCH = {"lerobot_pi05_prompts": {}}
TOKENS, MASK = "observation.language.tokens", "observation.language.attention_mask"
NUM_STATES = 4


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts") / "tokenizer"
    build_tokenizer([SHORT], folder, 1024)
    with offline_tokenizer(folder):
        yield folder


@pytest.fixture
def preprocessor(hub):
    def make(max_length):
        config = PI05Config(tokenizer_max_length=max_length, device="cpu")
        return make_pi05_pre_post_processors(config)[0]

    return make


def batch(*tasks, state=0.25, **changes):
    states_BD = torch.linspace(-0.9, 0.9, NUM_STATES).repeat(len(tasks), 1) * state
    return {"observation.state": states_BD, "task": list(tasks), **changes}


def text_of(preprocessor, ids_L, mask_L):
    (step,) = [step for step in preprocessor.steps if hasattr(step, "input_tokenizer")]
    return step.input_tokenizer.decode(ids_L[mask_L], skip_special_tokens=True)


def test_state_and_closing_word_stay(preprocessor):
    whole, short = preprocessor(400), preprocessor(64)
    given = batch(SHORT, LONG, LONG + " and again")
    upstream = [text_of(whole, *row) for row in zip(whole(given)[TOKENS], whole(given)[MASK], strict=True)]
    with patched(PATCH):
        made = short(given)
    texts = [text_of(short, *row) for row in zip(made[TOKENS], made[MASK], strict=True)]
    assert made[TOKENS].shape == (3, 64)
    assert texts[0] == upstream[0]
    for text, wanted in zip(texts[1:], upstream[1:], strict=True):
        head, _, state = text.partition(", State: ")
        assert state == wanted.partition(", State: ")[2]
        assert state.endswith(";\nAction: ")
        assert wanted.startswith(head)
        assert len(head) > 30  # as much of the task as there is room for
    without = short(given)
    assert "Action" not in text_of(short, without[TOKENS][1], without[MASK][1])  # upstream alone loses it


def test_what_fits_is_upstreams_to_the_bit(preprocessor):
    short, given = preprocessor(64), batch(SHORT, SHORT + " now", state=1.0)
    upstream = short(given)
    with patched(PATCH):
        made = short(given)
    assert torch.equal(made[TOKENS], upstream[TOKENS])
    assert torch.equal(made[MASK], upstream[MASK])
    assert list(support_of("pi05").shortened_so_far(short)) == []


def test_what_is_shortened_is_counted_by_task_and_said_once(preprocessor, caplog):
    short = preprocessor(64)
    with patched(PATCH), caplog.at_level(logging.WARNING):
        for _ in range(3):
            short(batch(SHORT, LONG + " please"))
    (found,) = support_of("pi05").shortened_so_far(short)
    assert (found.task, found.num_prompts, found.num_looked_at, found.longest) == (LONG + " please", 3, 6, 64)
    assert found.excess > 20
    assert "3 of 6 prompts (50.0 %)" in found.sentence
    assert sum("please" in record.message for record in caplog.records) == 1


def test_a_state_that_does_not_fit_is_refused(preprocessor):
    short = preprocessor(20)
    message = r"the state, which takes \d+ tokens .*tokenizer_max_length=20 would cut"
    with patched(PATCH), pytest.raises(ValueError, match=message):
        short(batch(SHORT))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_refused(preprocessor, value):
    whole, given = preprocessor(200), batch(SHORT, SHORT)
    given["observation.state"][1, 2] = value
    with patched(PATCH):
        with pytest.raises(ValueError, match=rf"observation.state\[2\] of sample 1 of the batch is {value}"):
            whole(dict(given))
        with pytest.raises(ValueError, match=rf"observation.state\[2\] of frame 17 of the data set is {value}"):
            whole({**given, "index": torch.tensor([4, 17])})


@pytest.fixture(scope="module")
def long_dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("long") / "long"
    return write_dataset(root, cameras=("front",), tasks=(SHORT, LONG, SHORT + " once more"), episode_length=5)


def test_a_data_set_is_counted_before_training(preprocessor, long_dataset):
    short = preprocessor(64)
    part = SizedDataset(LeRobotDataset("embodix/long", root=long_dataset), short)
    assert list(support_of("pi05").shortened_tasks(part)) == []  # without the patch, upstream cuts in its own way
    with patched(PATCH):
        (counted,) = support_of("pi05").shortened_tasks(part)
        for index in range(len(part)):
            part.preprocessed([index])
        (made,) = support_of("pi05").shortened_so_far(short)
    assert (counted.num_prompts, counted.num_looked_at) == (5, 15)
    assert counted == made


def test_prompts_that_fit_cost_no_look_at_the_states(preprocessor, long_dataset, monkeypatch):
    part = SizedDataset(LeRobotDataset("embodix/long", root=long_dataset), preprocessor(200))
    read = []
    column = SizedDataset.column
    monkeypatch.setattr(SizedDataset, "column", lambda self, name: read.append(name) or column(self, name))
    with patched(PATCH):
        assert list(support_of("pi05").shortened_tasks(part)) == []
    assert read == ["task_index"]
    assert np.unique(part.column("task_index")).size == 3
