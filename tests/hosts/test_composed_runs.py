# SPDX-License-Identifier: Apache-2.0
"""Runs whose packer composes the batches: exact sizes, resume to the bit, workers without effect, honest counts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from embodix.report.manifest import load_manifest
from embodix.report.steps import StepRecord, read_steps
from embodix.testing.host_runs import train_here
from embodix.training.composition import require_composable
from embodix.training.session import TrainingSession, current_session
from embodix_pi05.testing import small_run

NUM_STEPS = 6
COMPOSED = ["+plugin=embodix", "packing=token_budget", "train.batch_size=8", "train.save_freq=3"]
TWO_BINS = "packing.options.bins_per_step=2"


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of one episode, one of two cameras absent in some episodes; a prompt holds the state."""
    from embodix_metaworld.demonstrations import RecordSettings
    from embodix_metaworld.recorder import record_metaworld

    root = tmp_path_factory.mktemp("recording") / "dataset"
    settings = RecordSettings(
        root=str(root),
        tasks=("reach-v3", "button-press-topdown-v3"),
        episodes_per_task=2,
        image_size=28,
        drift_fraction=0.0,
        missing_camera_fraction=0.5,
        num_workers=1,
        progress=False,
    )
    return record_metaworld(settings).root


@pytest.fixture(scope="module")
def run_of(recording: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, TrainingSession]]:
    """A run with the given overrides: its folder and its session."""

    def train(*overrides: str, num_steps: int = NUM_STEPS) -> tuple[Path, TrainingSession]:
        folder = tmp_path_factory.mktemp("composed") / "run"
        options = [*COMPOSED, f"train.steps={num_steps}", f"train.output_dir={folder}", *overrides]
        train_here(small_run(recording, *options))
        return folder, current_session()

    return train


@pytest.fixture(scope="module")
def whole(run_of: Callable[..., tuple[Path, TrainingSession]]) -> tuple[Path, TrainingSession]:
    return run_of(TWO_BINS, "action_pad=mask")


def _what_was_trained(records: list[StepRecord]) -> list[tuple[Any, ...]]:
    return [(r.step, r.loss, r.grad_norm, r.lr, r.num_samples, r.tokens, r.action_valid) for r in records]


def test_measured_sizes_are_the_trained_ones(whole: tuple[Path, TrainingSession]) -> None:
    folder, session = whole
    assert session.composition is not None
    stream, sizes = session.composition.stream, session.composition.sizes
    assert set(np.unique(sizes.images_N)) == {1, 2}
    assert np.unique(sizes.prefix_N - 4 * sizes.images_N).size > 2, "prompts must differ in length"
    stream.load_state_dict({**stream.state_dict(), "position": dict.fromkeys(stream.state_dict()["position"], 0)})
    records = read_steps(folder / "steps.jsonl")
    assert len(records) == NUM_STEPS
    for record in records:
        samples = np.concatenate([samples for bins in next(stream).ranks for samples in bins])
        assert record.tokens is not None
        assert record.num_samples == samples.size
        assert record.tokens.valid == record.tokens.computed == sizes.tokens[samples].sum()
        assert record.tokens.images_computed == sizes.images_N[samples].sum()


def test_steps_hold_the_batch_size_on_average_and_differ(run_of: Callable[..., tuple[Path, TrainingSession]]) -> None:
    _, session = run_of("packing.options.algorithm=first_fit_decreasing", num_steps=25)
    counts = [record.num_samples for record in session.records]
    assert np.mean(counts) == pytest.approx(8, rel=0.1)
    assert len(set(counts)) > 1


def test_resuming_equals_not_stopping(
    whole: tuple[Path, TrainingSession], tmp_path: Path, weights_of: Callable[[Path], dict[str, torch.Tensor]]
) -> None:
    run = shutil.copytree(whole[0], tmp_path / "run", symlinks=True)
    shutil.rmtree(run / "checkpoints" / "000006")
    (run / "checkpoints" / "last").unlink()
    lines = (run / "steps.jsonl").read_text().splitlines(keepends=True)
    (run / "steps.jsonl").write_text("".join(lines[:3]))
    result = train_here([f"resume={run}/checkpoints/000003"])
    assert [record.step for record in result.records] == [4, 5, 6]
    ours, theirs = read_steps(run / "steps.jsonl"), read_steps(whole[0] / "steps.jsonl")
    assert _what_was_trained(ours) == _what_was_trained(theirs)
    resumed, uninterrupted = weights_of(run), weights_of(whole[0])
    assert [name for name in uninterrupted if not torch.equal(resumed[name], uninterrupted[name])] == []
    state = Path("checkpoints/last/training_state")
    for name in ("optimizer_state.safetensors", "rng_state.safetensors", "embodix_stream.json", "scheduler_state.json"):
        assert (run / state / name).read_bytes() == (whole[0] / state / name).read_bytes(), name


def test_without_its_position_a_resumed_run_differs(whole: tuple[Path, TrainingSession], tmp_path: Path) -> None:
    run = shutil.copytree(whole[0], tmp_path / "run", symlinks=True)
    (run / "checkpoints/000003/training_state/embodix_stream.json").unlink()
    resume = f"resume={run}/checkpoints/000003"
    with pytest.raises(ValueError, match=r"no position in these batches \(its file is gone\)"):
        train_here([resume])
    train_here([resume, "accept_changes=[position]"])
    ours, theirs = read_steps(run / "steps.jsonl"), read_steps(whole[0] / "steps.jsonl")
    assert [record.loss for record in ours[3:]] != [record.loss for record in theirs[3:]]


def test_workers_change_nothing(
    whole: tuple[Path, TrainingSession], run_of: Callable[..., tuple[Path, TrainingSession]]
) -> None:
    folder, _ = run_of(TWO_BINS, "action_pad=mask", "train.num_workers=2")
    ours, theirs = read_steps(folder / "steps.jsonl"), read_steps(whole[0] / "steps.jsonl")
    assert _what_was_trained(ours) == _what_was_trained(theirs)
    state = Path("checkpoints/last/training_state/embodix_stream.json")
    assert (folder / state).read_bytes() == (whole[0] / state).read_bytes(), "read-ahead is no progress"


def test_the_learning_rate_advances_by_samples(run_of: Callable[..., tuple[Path, TrainingSession]]) -> None:
    """Steps of five samples against a batch size of eight: the schedule advances in three of five steps."""
    _, session = run_of("packing.options.max_samples=5", num_steps=8)
    rates = [record.lr for record in session.records]
    samples = np.cumsum([0, *(record.num_samples for record in session.records)])
    for earlier in range(len(rates) - 1):
        advanced = samples[earlier + 1] // 8 > samples[earlier] // 8
        assert (rates[earlier + 1] != rates[earlier]) == advanced, (rates, samples)
    assert len(set(rates)) < len(rates)


def test_a_cost_model_is_fitted_and_recorded(run_of: Callable[..., tuple[Path, TrainingSession]]) -> None:
    overrides = ["packing.options.cost=fit", "packing.options.fit_steps=6", "packing.options.bins_per_step=3"]
    folder, session = run_of(*overrides, num_steps=12)
    assert session.composition is not None
    first, fitted = session.composition.stream.cost_models
    assert (first.model.tokens, first.first_bin) == (1.0, 0)
    assert fitted.model.tokens > 0 and fitted.first_bin == 8 * 3 and fitted.first_epoch == 1
    composition = load_manifest(folder / "manifest.json").settings["composition"]
    assert composition["samples_a_bin"] == pytest.approx(8 / 3, rel=0.1)
    assert composition["tokens_a_bin"] <= composition["tokens_of_the_largest_bin"]
    described = composition["cost_models"]
    saved = json.loads((folder / "checkpoints/last/training_state/embodix_stream.json").read_text())["stream"]
    assert described == saved["cost_models"] and len(described) == 2


def test_the_policy_has_its_own_methods_back(whole: tuple[Path, TrainingSession]) -> None:
    assert "forward" not in whole[1].policy.__dict__


def test_a_budget_that_is_too_small_stops_before_training(run_of: Callable[..., tuple[Path, TrainingSession]]) -> None:
    with pytest.raises(ValueError, match=r"Sample \d+ alone costs \d+, more than a bin's budget of 20"):
        run_of("packing.options.budget=20")


@pytest.mark.parametrize(("field", "value"), [("use_rabc", True), ("dataset", SimpleNamespace(streaming=True))])
def test_what_composed_batches_cannot_do_is_refused(field: str, value: Any) -> None:
    host_cfg = SimpleNamespace(use_rabc=False, dataset=SimpleNamespace(streaming=False))
    require_composable(host_cfg)  # type: ignore[arg-type]  # the two fields that it reads
    setattr(host_cfg, field, value)
    with pytest.raises(ValueError, match=r"choose packing=padding_free|Choose packing=padding_free"):
        require_composable(host_cfg)  # type: ignore[arg-type]
