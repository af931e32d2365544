# SPDX-License-Identifier: Apache-2.0
"""A loader continued from a saved position hands out what an uninterrupted one would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from lerobot.datasets.utils import cycle
from lerobot.utils.random_utils import load_rng_state, save_rng_state, set_seed
from torch.utils.data import DataLoader, Dataset

from embodix.training.loader import LoaderState, ResumableLoader


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, size: int) -> None:
        self.size = size
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.loaded.append(index)
        return {"number": torch.tensor(index)}


def loader_of(dataset: Numbers, batch_size: int, num_workers: int, state: LoaderState | None = None) -> ResumableLoader:
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=num_workers)
    prepared: Any = Accelerator(cpu=True).prepare(loader)
    return ResumableLoader(prepared, state, before_batch=lambda: None, after_batch=lambda batch: None)


def train(loader: ResumableLoader, num_steps: int) -> list[tuple[list[int], float]]:
    """What a training loop sees: the batch, then a draw of its own from the same random stream."""
    batches = cycle(loader)
    return [(next(batches)["number"].tolist(), float(torch.rand(()))) for _ in range(num_steps)]


def interrupted(folder: Path, size: int, batch_size: int, before: int, after: int, num_workers: int) -> list[Any]:
    set_seed(7)
    loader = loader_of(Numbers(size), batch_size, num_workers)
    seen = train(loader, before)
    assert loader.position is not None
    loader.position.save(folder)
    save_rng_state(folder)
    set_seed(99)  # whatever another process happens to start with
    load_rng_state(folder)
    resumed = loader_of(Numbers(size), batch_size, num_workers, LoaderState.load(folder))
    return seen + train(resumed, after)


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(3, 40),
    batch_size=st.integers(1, 9),
    before=st.integers(1, 12),
    after=st.integers(1, 12),
)
def test_resumed_equals_uninterrupted(
    tmp_path_factory: pytest.TempPathFactory, size: int, batch_size: int, before: int, after: int
) -> None:
    set_seed(7)
    whole = train(loader_of(Numbers(size), batch_size, 0), before + after)
    assert interrupted(tmp_path_factory.mktemp("state"), size, batch_size, before, after, 0) == whole


def test_resumed_equals_uninterrupted_with_workers_over_an_epoch_boundary(tmp_path: Path) -> None:
    set_seed(7)
    whole = train(loader_of(Numbers(10), 3, 2), 9)
    assert interrupted(tmp_path, 10, 3, 5, 4, 2) == whole
    assert [batch for batch, _ in whole][:4] != [batch for batch, _ in whole][4:8], "epochs must differ in order"


def test_skipped_samples_are_not_loaded(tmp_path: Path) -> None:
    set_seed(7)
    first = loader_of(Numbers(40), 4, 0)
    train(first, 6)
    assert first.position is not None
    first.position.save(tmp_path)
    dataset = Numbers(40)
    train(loader_of(dataset, 4, 0, LoaderState.load(tmp_path)), 1)
    assert len(dataset.loaded) <= 8  # one batch and accelerate's look-ahead


def test_without_the_position_the_order_differs(tmp_path: Path) -> None:
    """What upstream does on its own: the same random state, but the epoch starts over."""
    set_seed(7)
    whole = train(loader_of(Numbers(40), 4, 0), 6)
    set_seed(7)
    train(loader_of(Numbers(40), 4, 0), 3)
    save_rng_state(tmp_path)
    load_rng_state(tmp_path)
    assert train(loader_of(Numbers(40), 4, 0), 3) != whole[3:]


def test_a_checkpoint_without_position_has_none(tmp_path: Path) -> None:
    assert LoaderState.load(tmp_path) is None
