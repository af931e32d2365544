# SPDX-License-Identifier: Apache-2.0
"""What can't be trained is refused before data or policy are loaded, by train, compare and plan alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embodix.config.compose import compose
from embodix.training.config_checks import notes_of, sound_host_config

REFUSED = [
    ("train.save_freq=0", "train.save_freq must be at least 1; got 0."),
    ("train.log_freq=-1", "train.log_freq must be at least 0; got -1."),
    ("train.eval_freq=-1", "train.eval_freq must be at least 0; got -1."),
    ("train.steps=0", "train.steps must be at least 1; got 0."),
    ("train.batch_size=0", "train.batch_size must be at least 1; got 0."),
    ("train.num_workers=-1", "train.num_workers must be at least 0; got -1."),
    ("train.seed=-1", "train.seed lies between 0 and 4294967295, or is null; got -1."),
    ("policy.n_action_steps=0", "policy.n_action_steps must be at least 1; got 0."),
    ("policy.n_action_steps=60", r"n_action_steps \(60\) cannot be greater than chunk_size \(10\)"),
    ("policy.chunk_size=0", r"n_action_steps \(5\) cannot be greater than chunk_size \(0\)"),
    ("policy.num_inference_steps=0", "policy.num_inference_steps must be at least 1; got 0."),
    ("policy.image_resolution=[60,60]", r"must be a multiple of the patch of 14 pixels; got \[60, 60\]"),
    ("policy.image_resolution=[0,0]", r"is a square of 1 pixel at least; got \[0, 0\]"),
    ("policy.image_resolution=[56,70]", r"is a square of 1 pixel at least; got \[56, 70\]"),
    ("+optimizer.lr=3", r"optimizer.lr belongs to no optimizer: choose one with optimizer=\.\.\. \(adam, adamw, sgd\)"),
    ("+scheduler.peak_lr=3", r"scheduler.peak_lr belongs to no scheduler"),
    ("+env.task=x", r"env.task belongs to no env"),
    ("patches.lerobot_decoder_cache.max_decoders=many", "option 'max_decoders', is a whole number; got 'many'"),
    ("+patches.lerobot_decoder_cache.max_decoder=3", "no option 'max_decoder'. Did you mean 'max_decoders'"),
    ("+sampling.options.windo=3", "sampling=upstream has no option 'windo'. Did you mean window?"),
    ("+reads.options.fast=true", "reads=upstream has no option 'fast'. Options: none."),
    ("+logging.options.dir=x", "logging=none has no option 'dir'. Options: none."),
    ("+evaluation.options.keep=all", "evaluation=upstream has no option 'keep'"),
    ("language.name=per_smple", "language must be one of per_sample, upstream; got 'per_smple'."),
    ("step_clock.count_flops_at=0", "step_clock.count_flops_at must be at least 1; got 0."),
    ("+dataset.episode=[0]", "The fields `episode` are not valid for DatasetConfig Did you mean episodes?"),
]


def small(*overrides: str) -> Any:
    return compose("train", ["policy=pi05_small", "train.output_dir=nowhere", *overrides])


@pytest.mark.parametrize(("override", "message"), REFUSED)
def test_what_can_not_be_trained_is_refused(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sound_host_config(small(override))


@pytest.mark.parametrize(
    "override", ["train.log_freq=0", "train.eval_freq=0", "train.seed=null", "train.num_workers=0", "train.save_freq=1"]
)
def test_upstreams_own_zeros_stay(override: str) -> None:
    assert sound_host_config(small(override)).steps == 100_000


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="at least") as caught:
        sound_host_config(small("train.steps=0", "train.batch_size=0", "policy.num_inference_steps=0"))
    assert len(str(caught.value).splitlines()) == 3


RELATIVE, EXACT = "policy.use_relative_actions=true", "dataset.statistics=exact"
MIXED = (
    "dataset=mixture",
    "dataset.members={arm: {repo_id: a/b}, hand: {repo_id: c/d}}",
    "tokenizer.directory=anywhere",
)


@pytest.mark.parametrize("data", [(), MIXED], ids=["one", "mixture"])
def test_relative_actions_are_not_normalised_by_statistics_of_absolute_ones(data: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"of the data set's absolute actions.*relative_action true"):
        sound_host_config(small(*data, RELATIVE, EXACT))
    sound_host_config(small(*data, RELATIVE))
    sound_host_config(small(*data, EXACT))


def test_a_policy_without_a_record_is_asked_for_relative_actions_too() -> None:
    chosen = [
        "policy.type=pi0",
        RELATIVE,
        "++policy.push_to_hub=false",
        "dataset.repo_id=a/b",
        "train.output_dir=nowhere",
    ]
    assert sound_host_config(compose("train", chosen)).policy is not None
    with pytest.raises(ValueError, match="of the data set's absolute actions"):
        sound_host_config(compose("train", [*chosen, EXACT]))


def test_options_of_an_evaluation_are_typed() -> None:
    chosen = ["evaluation=background", "env=metaworld"]
    with pytest.raises(ValueError, match=r"no option 'keeep'. Did you mean 'keep'"):
        sound_host_config(small(*chosen, "+evaluation.options.keeep=all"))
    with pytest.raises(ValueError, match="option 'num_workers', is a whole number; got 'few'"):
        sound_host_config(small(*chosen, "evaluation.options.num_workers=few"))


def test_a_policy_says_what_it_makes_of_its_fields() -> None:
    chosen = ("policy=groot_n15_small", "policy.chunk_size=50")
    (note,) = notes_of(sound_host_config(compose("train", [*chosen, "train.output_dir=nowhere"])))
    assert note.startswith("policy.chunk_size=50 trains 16 steps of actions")
    assert notes_of(sound_host_config(small())) == []


def mixture(tmp_path: Path, *overrides: str) -> Any:
    members = f"dataset.members={{one:{{root:{tmp_path}/one,repo_id:a/b}},two:{{root:{tmp_path}/two,repo_id:a/c}}}}"
    return small("dataset=mixture", members, *overrides)


def test_a_small_policy_without_its_tokenizer_is_told_the_line_to_add(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embodix.training.config_checks.try_to_load_from_cache", lambda hub_id, name: None)
    with pytest.raises(ValueError, match=r"Add tokenizer.directory=<data set>/tokenizer"):
        sound_host_config(mixture(tmp_path))
    (tmp_path / "two" / "tokenizer").mkdir(parents=True)
    with pytest.raises(ValueError, match=rf"Add tokenizer.directory={tmp_path}/two/tokenizer"):
        sound_host_config(mixture(tmp_path))
    assert sound_host_config(mixture(tmp_path, f"tokenizer.directory={tmp_path}/two/tokenizer"))
    with pytest.raises(ValueError, match="would be fetched from the hub"):
        sound_host_config(small("dataset=lerobot", "dataset.repo_id=a/b"))
    assert sound_host_config(compose("train", ["dataset=lerobot", "dataset.repo_id=a/b", "train.output_dir=x"]))


def test_a_tokenizer_that_is_cached_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodix.training.config_checks.try_to_load_from_cache", lambda hub_id, name: "a/path")
    assert sound_host_config(mixture(tmp_path))
