# SPDX-License-Identifier: Apache-2.0
"""``train.batch_size=auto``: what it finds, what it leaves alone, what it refuses."""

from __future__ import annotations

import re

import pytest
import torch

from embodix.config.compose import compose
from embodix.costs.batch_size import bytes_of, confirmed, find_batch_size, most_that_fit, settle_batch_size
from embodix.costs.trial_step import Trial
from embodix.data.tokenizer import build_tokenizer
from embodix.testing.host_runs import VOCAB_SIZE, train_here
from embodix.training.checkpoint import find_checkpoint
from embodix.training.host_config import decode_host_config
from embodix.training.run import run_training
from embodix_pi05.testing import small_run

AUTO = "train.batch_size=auto"


@pytest.fixture
def run_of(arm_dataset, tmp_path):
    """Overrides of a small run, in a folder of the test."""
    tokenizer = tmp_path / "tokenizer"
    build_tokenizer(["Pick the cube"], tokenizer, vocab_size=VOCAB_SIZE)

    def overrides(*more: str, folder: str = "run") -> list[str]:
        own = (f"tokenizer.directory={tokenizer}", f"train.output_dir={tmp_path / folder}")
        return small_run(arm_dataset, *own, *more)

    return overrides


@pytest.mark.parametrize(
    ("memory", "most", "wanted"),
    [(99, 50, 0), (100 + 7, 50, 1), (100 + 7 * 20 + 6, 50, 20), (10**6, 50, 50), (10**6, 1, 1)],
)
def test_the_most_that_fits_a_need_in_proportion(memory, most, wanted):
    assert most_that_fit(lambda n: 100 + 7 * n, memory, most) == wanted


@pytest.mark.parametrize("memory", range(100, 20000, 317))
def test_the_most_that_fits_a_need_out_of_proportion(memory):
    def need(n: int) -> float:
        return max(90 + 3 * n, 20 + 40 * n) if n < 100 else 500 + 90 * n

    asked = []
    found = most_that_fit(lambda n: asked.append(n) or need(n), memory, 300)
    assert found == max((n for n in range(1, 301) if need(n) <= memory), default=0)
    assert len(asked) < 25


def test_a_step_that_needs_more_than_was_counted_is_made_smaller_by_that():
    tried = []

    def attempt(samples: int) -> Trial:
        tried.append(samples)
        return Trial(1000 + 20 * samples, "a scale")

    found, trial = confirmed(attempt, 100, 2000, 10.0)
    assert (found, trial.peak, tried) == (1, 1020, [100, 1])
    tried.clear()
    found, trial = confirmed(attempt, 100, 2800, 25.0)
    assert (found, trial.peak, tried) == (90, 2800, [100, 92, 90])


def test_memory_that_ran_out_halves_and_nothing_that_fits_is_none():
    found, _ = confirmed(lambda n: Trial(None if n > 20 else n, "a scale"), 100, 50, 1.0)
    assert found == 13
    found, trial = confirmed(lambda n: Trial(None, "a scale"), 100, 50, 1.0)
    assert (found, trial.peak) == (0, None)


def test_memory_in_words():
    assert [bytes_of(words) for words in (5, "5", "24GB", "1.5 GiB", "512MiB")] == [5, 5, 24e9, 1.5 * 2**30, 2**29]
    for words in ("", "much", "24 GBit", "0", "-3"):
        with pytest.raises(ValueError, match="number of bytes"):
            bytes_of(words)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), r"policy\.device=cpu has none.*train\.memory=16GB"),
        (("train.memory=1MB",), r"holds not one sample.*counted, and train\.memory is 977 KiB"),
        (("train.memory=8GB", "+plugin=embodix", "packing=token_budget"), r"packing=token_budget.*packing\.options"),
        (("train.memory=8GB", "resume=somewhere"), r"checkpoint records.*resume=somewhere"),
    ],
)
def test_what_can_not_be_found_is_refused(run_of, overrides, message):
    with pytest.raises(ValueError, match=message):
        find_batch_size(compose("train", run_of(AUTO, *overrides)))


def test_several_processes_are_sent_to_the_plan(run_of, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 were started.*plan\.processes=2"):
        find_batch_size(compose("train", run_of(AUTO, "train.memory=8GB")))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [((AUTO,), "where a number is needed"), (("train.memory=8GB",), "Leave one of them out")],
)
def test_other_commands_are_told_the_rule(run_of, overrides, message):
    with pytest.raises(ValueError, match=message):
        decode_host_config(compose("train", run_of(*overrides)))


@pytest.mark.slow
def test_a_run_is_that_of_the_number_which_was_found(run_of, caplog):
    """A real step is taken, and the run equals one with the number in every loss and in what a checkpoint records."""
    own = ("+plugin=embodix", "train.steps=3", "train.save_freq=3")
    auto = run_of(*own, AUTO, "train.memory=6GB", folder="auto")
    caplog.set_level("INFO")
    random_state = torch.get_rng_state()
    cfg, overrides = settle_batch_size(compose("train", auto), auto)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert cfg.train.batch_size == 24  # all frames of the data set, of which a step can hold no more
    assert cfg.train.memory is None
    assert re.search(r"24 samples.* measured [\d.]+ [MG]iB \(resident set", caplog.text)
    ours = run_training(cfg, overrides)
    theirs = train_here(run_of(*own, "train.batch_size=24", folder="number"))
    assert len(ours.records) == 3
    assert [record.loss for record in ours.records] == [record.loss for record in theirs.records]
    recorded = find_checkpoint(str(ours.output_dir)).overrides()
    assert "train.batch_size=24" in recorded
    assert not any("batch_size=auto" in override or "memory" in override for override in recorded)
