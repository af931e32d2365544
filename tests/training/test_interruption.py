# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C lets the step end, saves it and says how to go on; again, it ends at once."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embodix.report.steps import read_steps
from embodix.testing.host_runs import train_here
from embodix.training import interruption
from embodix.training.accelerator import ObservedAccelerator
from embodix.training.interruption import Interruption, SaveNow
from embodix.training.stopped import RunInterrupted

Overrides = Callable[..., list[str]]


@pytest.fixture
def press_in_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Press Ctrl-C in the middle of a step."""

    def press(step: int) -> None:
        backward, calls = ObservedAccelerator.backward, [0]

        def pressing(self: Any, loss: Any, **kwargs: Any) -> None:
            calls[0] += 1
            if calls[0] == step:
                os.kill(os.getpid(), signal.SIGINT)
            backward(self, loss, **kwargs)

        monkeypatch.setattr(ObservedAccelerator, "backward", pressing)

    return press


@pytest.mark.parametrize("options", [[], ["+plugin=embodix", "packing=token_budget", "train.num_workers=1"]])
def test_an_interrupted_run_goes_on_to_the_bit(
    blobs: Path, run_of: Overrides, tmp_path: Path, press_in_step: Callable[[int], None], options: list[str]
) -> None:
    overrides = run_of(blobs, "train.steps=5", *options)
    whole = train_here([*overrides, f"train.output_dir={tmp_path}/whole"]).records
    handler = signal.getsignal(signal.SIGINT)
    press_in_step(3)
    with pytest.raises(RunInterrupted, match=re.escape("after step 3 of 5, which is saved. Go on with: lerobot train")):
        train_here(overrides)
    assert signal.getsignal(signal.SIGINT) is handler
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["000003", "last"]
    assert '"save_freq": 20000' in (checkpoints / "last/pretrained_model/train_config.json").read_text()
    train_here([f"resume={tmp_path}/run"])
    assert [record.loss for record in read_steps(tmp_path / "run/steps.jsonl")] == [record.loss for record in whole]


def test_a_run_that_saves_nothing_says_so(
    blobs: Path, run_of: Overrides, press_in_step: Callable[[int], None], tmp_path: Path
) -> None:
    press_in_step(1)
    with pytest.raises(RunInterrupted, match=r"after step 1 of 3; nothing is saved"):
        train_here(run_of(blobs, "train.save_checkpoint=false"))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_second_press_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Interruption()
    watched.watch()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same press, handed on by a launcher
        assert watched.requested
        now = time.monotonic()
        monkeypatch.setattr(interruption.time, "monotonic", lambda: now + 2)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        watched.release()


def test_every_step_is_one_to_save() -> None:
    frequency = SaveNow(20_000)
    assert [step % frequency for step in (1, 7, 20_001)] == [0, 0, 0]
    assert frequency == 20_000
