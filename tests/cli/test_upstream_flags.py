# SPDX-License-Identifier: Apache-2.0
"""Upstream's flags in the words of this command line: every field is listed, and does what it says."""

from __future__ import annotations

import dataclasses
import json
import shlex
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import draccus
import pytest
from lerobot.configs.eval import EvalPipelineConfig
from lerobot.configs.train import TrainPipelineConfig

from embodix.cli.upstream_flags import EVAL, TRAIN, override_of, translate
from embodix.config.compose import compose
from embodix.training.host_config import decode_host_config

NOT_OF_THE_COMMAND_LINE = {"checkpoint_path"}


def flags_of(config_class: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every flag of a dataclass and of those in it, with its type; one flag ``type`` where a class is chosen."""
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        name = f"{prefix}{field.name}"
        if name in NOT_OF_THE_COMMAND_LINE:
            continue
        members = typing.get_args(hints[field.name]) if isinstance(hints[field.name], types.UnionType) else ()
        classes = [hint for hint in (hints[field.name], *members) if isinstance(hint, type)]
        chosen = [hint for hint in classes if issubclass(hint, draccus.ChoiceRegistry)]
        nested = [hint for hint in classes if dataclasses.is_dataclass(hint)]
        if chosen:
            yield f"{name}.type", chosen[0]
        elif nested:
            yield from flags_of(nested[0], f"{name}.")
        else:
            yield name, hints[field.name]


TRAIN_FLAGS = dict(flags_of(TrainPipelineConfig))


def test_every_flag_of_upstreams_training_is_listed() -> None:
    assert len(TRAIN_FLAGS) >= 45
    assert [flag for flag in TRAIN_FLAGS if override_of(TRAIN, flag) is None] == []
    own = {flag for flag in TRAIN if "*" not in flag} - {"config_path", "policy.path"}
    assert own - set(TRAIN_FLAGS) == set(), "flags that upstream does not have"


def test_every_flag_of_upstreams_evaluation_is_listed() -> None:
    flags = dict(flags_of(EvalPipelineConfig))
    flags.pop("trust_remote_code", None)
    assert [flag for flag in flags if override_of(EVAL, flag) is None] == []


SAMPLES: dict[str, Any] = {
    "dataset.repo_id": "a/b",
    "dataset.episodes": [1],
    "dataset.image_transforms.tfs": {"crop": {"weight": 0.5, "type": "Identity"}},
    "dataset.video_backend": "pyav",
    "rename_map": {"a.b": "c.d"},
    "peft.target_modules": ["q"],
    "peft.full_training_modules": ["q"],
    "seed": 7,
    "eval.n_episodes": 60,
    "eval.batch_size": 20,
}


def sample_of(flag: str, hint: Any) -> Any:
    kinds = (hint, *typing.get_args(hint))
    by_kind = {bool: True, int: 7, float: 0.25}
    return SAMPLES.get(flag, next((value for kind, value in by_kind.items() if kind in kinds), "word"))


def test_translated_flags_set_the_fields_that_they_are_named_after() -> None:
    own = [
        flag
        for flag in TRAIN_FLAGS
        if not flag.endswith(".type") and not (override_of(TRAIN, flag) or "-").startswith("-")
    ]
    samples = {flag: sample_of(flag, TRAIN_FLAGS[flag]) for flag in own}
    overrides, refusals = translate("train", [f"--{flag}={as_flag(value)}" for flag, value in samples.items()])
    assert refusals == []
    host_cfg = decode_host_config(compose("train", ["policy=pi05_small", *overrides]))
    found = {flag: field_at(host_cfg, flag) for flag in own}
    assert found == samples
    assert len(own) >= 40


def field_at(host_cfg: Any, flag: str) -> Any:
    for part in flag.split("."):
        host_cfg = getattr(host_cfg, part)
    if flag == "dataset.image_transforms.tfs":
        return {name: {"weight": each.weight, "type": each.type} for name, each in host_cfg.items() if name == "crop"}
    return str(host_cfg) if isinstance(host_cfg, Path) else host_cfg


def as_flag(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--policy.type=pi05", "--dataset.repo_id=lerobot/pusht", "--steps=100", "--batch_size=8"],
            "policy=pi05 dataset.repo_id=lerobot/pusht train.steps=100 train.batch_size=8",
        ),
        (["--policy.type", "groot", "--steps", "100", "--cudnn_deterministic"], "policy=groot_n15 train.steps=100"),
        (["--policy.type=act", "--policy.chunk_size=20"], "policy=upstream ++policy.type=act ++policy.chunk_size=20"),
        (["--wandb.enable=true", "--wandb.project=mine"], "logging=wandb logging.options.project=mine"),
        (["--wandb.enable=false"], "lerobot train\n"),
        (["--policy.path=a/b"], "'policy=<its option>' policy.pretrained_path=a/b"),
        (
            ["--resume=true", "--config_path=run/checkpoints/last/pretrained_model/train_config.json"],
            "resume=run/check",
        ),
        (["--optimizer.type=adam", "--optimizer.lr=1e-4"], "optimizer=adam optimizer.lr=1e-4"),
        (["--env.type=aloha", "--env.task=X"], "+env.type=aloha ++env.task=X"),
        (["--steps=3", "train.seed=1"], "train.seed=1 train.steps=3"),
        (["--config_path=x.json"], "--config_path: give resume=<run folder> to go on with a run"),
        (["--stepps=3"], "--stepps is no flag of upstream's command."),
    ],
)
def test_upstreams_command_line_is_answered_by_this_ones(
    run_verb: Callable[..., tuple[int, str]], flags: list[str], words: str
) -> None:
    code, printed = run_verb("train", *flags)
    assert code == 2
    assert words in printed


def test_the_answer_can_be_pasted_into_a_shell(run_verb: Callable[..., tuple[int, str]]) -> None:
    flags = ["--policy.type=act", "--policy.chunk_size=20", "--policy.n_action_steps=20", "--output_dir=a b, c"]
    flags += ["--rename_map={'observation.images.top': 'observation.images.front'}", "--dataset.episodes=[0, 1]"]
    code, printed = run_verb("train", *flags)
    assert code == 2
    program, verb, *overrides = shlex.split(printed.partition("In its words: ")[2])
    assert (program, verb) == ("lerobot", "train")
    host_cfg = decode_host_config(compose("train", overrides))
    assert host_cfg.policy is not None and host_cfg.policy.chunk_size == 20  # type: ignore[attr-defined]
    assert host_cfg.rename_map == {"observation.images.top": "observation.images.front"}
    assert (str(host_cfg.output_dir), host_cfg.dataset.episodes) == ("a b, c", [0, 1])


@pytest.mark.parametrize("verb", ["quantize", "data", "rl"])
def test_flags_of_other_verbs_are_refused_by_name(run_verb: Callable[..., tuple[int, str]], verb: str) -> None:
    code, printed = run_verb(verb, "--seed=3")
    assert code == 2
    assert f"{verb} takes overrides without dashes, key=value; got --seed=3." in printed
