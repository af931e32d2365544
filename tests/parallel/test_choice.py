# SPDX-License-Identifier: Apache-2.0
"""Wrong combinations are refused with the rule, what was got, and the nearest that works, before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parallel_cases import SOUND_RUN

from embodix.arguments import ArgumentError
from embodix.contracts import RankLayout
from embodix.parallel.choice import OUTSIDE_CHOICES, choose_parallel
from embodix.plugins import PluginError
from embodix.policies.support import support_of
from embodix.testing.host_runs import train_here

SOUND = dataclasses.replace(SOUND_RUN, checkpoint_format="auto", patches=("lerobot_atomic_checkpoint",))


def _refusal(name: str, num_processes: int, options: dict[str, Any] | None = None, **traits: Any) -> str:
    with pytest.raises(ValueError) as refused:
        choose_parallel(name, options or {}, dataclasses.replace(SOUND, **traits), num_processes)
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "num_processes", "options", "traits", "parts"),
    [
        ("single", 2, {}, {}, ("one process", "2 were started", "parallel=ddp")),
        ("ddp", 1, {}, {}, ("2 processes at least", "1 was started", "parallel=single")),
        ("fsdp2", 1, {}, {}, ("2 ranks at least", "got 1", "parallel=ddp")),
        ("fsdp2", 4, {"shard": 3}, {}, ("divides the number of processes", "got 3 for 4", "one of 1, 2, 4")),
        ("fsdp2", 4, {"shard": 1}, {}, ("2 ranks at least", "got 1", "parallel=ddp")),
        ("fsdp2", 4, {"shard": 0}, {}, ("divides the number of processes", "got 0 for 4")),
        ("fsdp2", 2, {}, {"packed": False}, ("packed computation", "packing=none", "+plugin=embodix")),
        ("fsdp2", 2, {}, {"support": support_of("act")}, ("units that a policy's record names", "parallel=ddp")),
        ("fsdp2", 2, {}, {"adapters": True}, ("cuts what is trained", "peft=lora", "parallel=ddp")),
        ("fsdp2", 2, {}, {"evaluates_in_loop": True}, ("no rank with the whole policy", "evaluation=background")),
        ("fsdp2", 2, {}, {"clips_nothing": True}, ("a norm to clip gradients at", "grad_clip_norm of 0", "1e9")),
        ("fsdp2", 2, {}, {"publishes": "policy.push_to_hub=true"}, ("policy.push_to_hub=true uploads", "upload")),
        ("fsdp2", 2, {}, {"checkpoint_format": "upstream"}, ("checkpoint.format=upstream", "checkpoint.format=auto")),
        ("fsdp2", 2, {}, {"patches": ()}, ("lerobot_atomic_checkpoint", "got patches=none", "patches=host_guards")),
        ("ddp", 2, {}, {"patches": (), "checkpoint_format": "sharded"}, ("lerobot_atomic_checkpoint", "got patches")),
        ("ddp", 2, {}, {"adapters": True, "checkpoint_format": "sharded"}, ("peft=lora", "checkpoint.format=upstream")),
    ],
)
def test_a_wrong_combination_says_rule_found_and_nearest(
    name: str, num_processes: int, options: dict[str, Any], traits: dict[str, Any], parts: tuple[str, ...]
) -> None:
    message = _refusal(name, num_processes, options, **traits)
    assert [part for part in parts if part not in message] == []


def test_all_faults_are_said_at_once() -> None:
    lines = _refusal("fsdp2", 2, packed=False, clips_nothing=True, adapters=True).splitlines()
    assert len(lines) == 3 and all(line.startswith("parallel=fsdp2 ") for line in lines)


@pytest.mark.parametrize("variable", OUTSIDE_CHOICES)
def test_a_choice_made_outside_of_the_config_is_refused_with_both(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "4" if variable.endswith("STEPS") else "true")
    message = _refusal("ddp", 2)
    assert "parallel=ddp" in message and f"{variable}=" in message and "torchrun" in message


@pytest.mark.parametrize("value", ["", "no", "False", "0", "NONE"])
def test_a_neutral_value_of_the_launcher_is_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, choice in OUTSIDE_CHOICES.items():
        monkeypatch.setenv(variable, "1" if "1" in choice.neutral else value)
    assert choose_parallel("ddp", {}, SOUND, 2).layout == RankLayout(data=2)


def test_unknown_names_and_options_are_named() -> None:
    with pytest.raises(PluginError, match="fsdp2"):
        choose_parallel("fsdp", {}, SOUND, 2)
    with pytest.raises(ArgumentError, match="shard"):
        choose_parallel("fsdp2", {"shards": 2}, SOUND, 2)


def test_arrangements_of_processes() -> None:
    assert choose_parallel("auto", {}, SOUND, 1).layout == RankLayout()
    assert choose_parallel("auto", {}, SOUND, 3).layout == RankLayout(data=3)
    assert choose_parallel("fsdp2", {}, SOUND, 4).layout == RankLayout(shard=4)
    assert choose_parallel("fsdp2", {"shard": 2}, SOUND, 4).layout == RankLayout(data=2, shard=2)


@pytest.mark.parametrize(
    ("layout", "indices"),
    [
        (RankLayout(data=2, shard=2), [0, 1, 2, 3]),
        (RankLayout(data=2, tensor=2), [0, 0, 1, 1]),
        (RankLayout(pipeline=2, tensor=2), [0, 0, 0, 0]),
        (RankLayout(shard=2, pipeline=2), [0, 0, 1, 1]),
    ],
)
def test_ranks_that_share_samples_have_one_index(layout: RankLayout, indices: list[int]) -> None:
    assert [layout.batch_index(rank) for rank in range(layout.num_processes)] == indices
    assert layout.num_batches == len(set(indices))


def test_a_run_is_refused_before_its_data_are_read(run_of: Callable[..., list[str]], tmp_path: Path) -> None:
    absent = tmp_path / "no data here"
    with pytest.raises(ValueError, match="parallel=fsdp2 cuts parameters across 2 ranks at least"):
        train_here(run_of(absent, "parallel=fsdp2", "+plugin=embodix"))
    with pytest.raises(ValueError, match=r"checkpoint.format is one of .*; got 'safetensors'"):
        train_here(run_of(absent, "checkpoint.format=safetensors"))
    assert not (tmp_path / "run").exists()


def test_a_strategy_of_the_launchers_is_refused_before_anything_is_read(
    run_of: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate would train plain DDP on CPUs and say nothing of it."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"it has parallel=auto, and ACCELERATE_USE_FSDP=true.*parallel=fsdp2"):
        train_here(run_of(tmp_path / "no data here"))
    assert not (tmp_path / "run").exists()
