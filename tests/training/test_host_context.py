# SPDX-License-Identifier: Apache-2.0
"""Which patches a config asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embodix.config.compose import compose
from embodix.patching import patched
from embodix.testing.datasets import write_dataset
from embodix.training.host_context import joins_of, required_patches

GROOT = {
    "lerobot_groot_runs",
    "lerobot_groot_strict_load",
    "lerobot_groot_action_queue",
    "lerobot_groot_samples",
}


def _patches(*overrides: str) -> dict[str, dict[str, object]]:
    return required_patches(compose("train", list(overrides)))


@pytest.mark.parametrize("policy", ["pi05", "pi05_small"])
def test_pi05_asks_for_nothing_of_groot(policy: str) -> None:
    patches = _patches(f"policy={policy}")
    assert not any("groot" in name for name in patches)
    assert ("lerobot_pi05_sizes" in patches) == (policy == "pi05_small")
    assert _patches(f"policy={policy}", "language=upstream").keys() == patches.keys()


@pytest.mark.parametrize("policy", ["groot_n15", "groot_n15_small"])
def test_groot_asks_for_its_own(policy: str) -> None:
    patches = _patches(f"policy={policy}")
    assert patches.keys() >= GROOT
    assert "lerobot_pi05_sizes" not in patches
    assert ("lerobot_groot_sizes" in patches) == (policy == "groot_n15_small")
    assert patches["lerobot_groot_samples"] == {"language": "per_sample"}
    assert _patches(f"policy={policy}", "language=upstream")["lerobot_groot_samples"] == {"language": "upstream"}
    assert _patches(f"policy={policy}", "patches=none").keys() >= GROOT, "without them it does not run"


def test_sizes_of_another_policy_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gives sizes to groot and pi05; got policy\.type=act"):
        _patches("policy=pi05_small", "policy.type=act")


def _mixture(**members: str) -> Any:
    nodes = ", ".join(f"{name}: {{repo_id: local, {fields}}}" for name, fields in members.items())
    return compose("train", ["dataset=mixture", f"dataset.members={{{nodes}}}"]).dataset


def test_members_of_one_name_in_two_folders_are_joined_each_its_own_way(tmp_path: Path) -> None:
    from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata

    for name in ("arm", "hand"):
        write_dataset(tmp_path / name, cameras=("front",))
    arm, hand = f"root: {tmp_path}/arm", f"root: {tmp_path}/./hand/, join: {{action: [action]}}"
    joins = joins_of(_mixture(arm=arm, hand=hand, other="join: {action: [a, b]}"))
    assert joins[("local", None)] == {"action": ["a", "b"]}
    with patched({"lerobot_dataset_metadata": {"joins": joins}}):
        found = {name: LeRobotDatasetMetadata("local", root=tmp_path / name) for name in ("arm", "hand")}
    assert {name: metadata.embodix_join for name, metadata in found.items()} == {
        "arm": {},
        "hand": {"action": ["action"]},
    }


def test_one_data_set_with_two_joins_is_refused(tmp_path: Path) -> None:
    members = {"arm": f"root: {tmp_path}, join: {{action: [a]}}", "hand": f"root: {tmp_path}/"}
    with pytest.raises(
        ValueError, match=r"dataset.members.hand.join is \{\}, and another member joins local at .*copy"
    ):
        joins_of(_mixture(**members))
