# SPDX-License-Identifier: Apache-2.0
"""What the front trains is what upstream's own ``train(cfg)`` trains on the same config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from embodix.testing.host_runs import train_here, train_upstream
from embodix_pi05.testing import small_run

NUM_STEPS = 10
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def upstream_run(demonstrations: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Upstream's run folder and losses."""
    folder = tmp_path_factory.mktemp("upstream") / "run"
    return folder, train_upstream(_overrides(demonstrations, folder))


def _overrides(root: Path, folder: Path, *more: str) -> list[str]:
    return small_run(root, f"train.steps={NUM_STEPS}", f"train.output_dir={folder}", *more)


def test_without_plugin_the_weights_are_upstreams_to_the_bit(
    demonstrations: Path,
    tmp_path: Path,
    upstream_run: tuple[Path, list[float]],
    weights_of: Callable[[Path], Weights],
) -> None:
    folder, losses = upstream_run
    result = train_here(_overrides(demonstrations, tmp_path / "run", "+plugin=none"))
    assert [record.loss for record in result.records] == losses
    ours, upstreams = weights_of(result.output_dir), weights_of(folder)
    assert ours.keys() == upstreams.keys()
    assert [name for name in ours if not torch.equal(ours[name], upstreams[name])] == []


def test_with_plugin_losses_follow_upstreams_and_the_checkpoint_is_upstreams(
    demonstrations: Path,
    tmp_path: Path,
    upstream_run: tuple[Path, list[float]],
    weights_of: Callable[[Path], Weights],
) -> None:
    folder, losses = upstream_run
    result = train_here(_overrides(demonstrations, tmp_path / "run", "+plugin=embodix"))
    fast = [record.loss for record in result.records]
    assert len(fast) == NUM_STEPS
    assert fast[0] == pytest.approx(losses[0], rel=1e-6)
    # AdamW divides by the root of the second moment: rounding in a tiny gradient becomes a visible step.
    assert fast == pytest.approx(losses, rel=1e-4)
    assert len(set(losses)) == NUM_STEPS

    ours, upstreams = weights_of(result.output_dir), weights_of(folder)
    assert {name: tensor.shape for name, tensor in ours.items()} == {
        name: tensor.shape for name, tensor in upstreams.items()
    }
    config = Path("checkpoints/last/pretrained_model/config.json")
    assert json.loads((result.output_dir / config).read_text())["type"] == "pi05"
    assert (result.output_dir / config).read_text() == (folder / config).read_text()


def test_the_run_computes_fewer_tokens_than_upstream(demonstrations: Path, tmp_path: Path) -> None:
    """The equality above is not that of upstream with itself."""
    result = train_here(
        small_run(demonstrations, "train.steps=1", f"train.output_dir={tmp_path}/run", "+plugin=embodix")
    )
    tokens = result.records[0].tokens
    assert tokens is not None
    assert tokens.computed == tokens.valid < tokens.upstream
    assert tokens.images_computed < tokens.images_upstream
