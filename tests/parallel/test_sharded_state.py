# SPDX-License-Identifier: Apache-2.0
"""What ranks save, each its part: upstream's file made of it, optimizer and random state read back, damage named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.utils.random_utils import serialize_rng_state
from parallel_cases import CASES, optimizer_of, packed_policy, rank_batch
from safetensors.torch import load_file

from embodix.parallel.optimizer_state import named_optimizer_state, set_named_optimizer_state, state_like_parameters
from embodix.parallel.sharded_state import (
    METADATA_FILE,
    begin_saving,
    export_model,
    load_optimizer_state,
    load_random_state,
)


@pytest.fixture(scope="module", params=list(CASES))
def trained(request: pytest.FixtureRequest) -> tuple[Any, torch.optim.Optimizer]:
    case = CASES[request.param]
    policy = packed_policy(case)
    optimizer = optimizer_of(policy)
    loss, _ = policy.forward(rank_batch(case, policy, 0, 0))
    loss.backward()
    optimizer.step()
    return policy, optimizer


def _saved(policy: Any, optimizer: torch.optim.Optimizer, folder: Path) -> Path:
    folder.mkdir()
    state = {"model": policy.state_dict(), "optimizer": named_optimizer_state(policy, optimizer)}
    begin_saving(state, serialize_rng_state(), 0, folder, None).result()
    return folder


def test_weights_become_upstreams_own_file(trained: tuple[Any, torch.optim.Optimizer], tmp_path: Path) -> None:
    policy, optimizer = trained
    export_model(_saved(policy, optimizer, tmp_path / "sharded"), tmp_path / "model.safetensors")
    policy.save_pretrained(tmp_path / "upstream")
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "upstream" / "model.safetensors")
    assert sorted(ours) == sorted(theirs)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_optimizer_and_random_state_come_back(trained: tuple[Any, torch.optim.Optimizer], tmp_path: Path) -> None:
    policy, optimizer = trained
    torch.manual_seed(7)
    folder = _saved(policy, optimizer, tmp_path / "sharded")
    expected, drawn = named_optimizer_state(policy, optimizer), torch.rand(3)

    fresh = optimizer_of(policy)
    set_named_optimizer_state(policy, fresh, load_optimizer_state(folder, state_like_parameters(policy)))
    found = named_optimizer_state(policy, fresh)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []

    state = load_random_state(folder, 0, 1)
    assert state is not None
    torch.set_rng_state(state["torch_rng_state"])
    assert torch.equal(torch.rand(3), drawn)
    assert load_random_state(folder, 1, 2) is None, "of another number of ranks"


def test_state_of_another_policy_is_refused(trained: tuple[Any, torch.optim.Optimizer], tmp_path: Path) -> None:
    policy, optimizer = trained
    folder = _saved(policy, optimizer, tmp_path / "sharded")
    with pytest.raises(ValueError, match="no parameter of this policy"):
        load_optimizer_state(folder, state_like_parameters(torch.nn.Linear(2, 2)))


@pytest.mark.parametrize("damage", [b"", b"not a pickle"])
def test_damaged_metadata_are_named(trained: tuple[Any, torch.optim.Optimizer], tmp_path: Path, damage: bytes) -> None:
    folder = _saved(*trained, tmp_path / "sharded")
    (folder / METADATA_FILE).write_bytes(damage)
    with pytest.raises(ValueError, match=r"\.metadata is damaged"):
        export_model(folder, tmp_path / "model.safetensors")


def test_a_part_that_is_cut_off_is_named(trained: tuple[Any, torch.optim.Optimizer], tmp_path: Path) -> None:
    folder = _saved(*trained, tmp_path / "sharded")
    part = next(folder.glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:1000])
    with pytest.raises(ValueError, match="can't be read"):
        export_model(folder, tmp_path / "model.safetensors")
