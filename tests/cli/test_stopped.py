# SPDX-License-Identifier: Apache-2.0
"""How a command ends that does not reach its end: one sentence and the exit code."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from embodix.cli.hydra_app import INTERRUPTED, explain
from embodix.training.stopped import RunInterrupted, RunStoppedError

Ends = Callable[[BaseException], tuple[int, str]]


@pytest.fixture
def ends_with(run_verb: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ends:
    """Exit code and stderr of a training command that ends with an exception."""

    def end(error: BaseException) -> tuple[int, str]:
        def fail(*args: object, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr("embodix.training.run.run_training", fail)
        return run_verb("train", "policy=pi05_small", f"dataset.root={tmp_path}", f"hydra.run.dir={tmp_path}/hydra")

    return end


def test_a_run_that_stops_itself_says_why(ends_with: Ends) -> None:
    code, printed = ends_with(RunStoppedError("Step 3 has a loss of nan."))
    assert code == 1
    assert "error: Step 3 has a loss of nan.\n" in printed


def test_an_interrupted_run_has_the_exit_code_of_a_shell(ends_with: Ends) -> None:
    assert ends_with(RunInterrupted("Go on with: lerobot train resume=run")) == (
        INTERRUPTED,
        "Go on with: lerobot train resume=run\n",
    )


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.ENOSPC, "Make room"), (errno.EFBIG, "Make room"), (errno.EROFS, "writable")]
)
def test_a_place_that_takes_nothing_is_one_sentence(ends_with: Ends, number: int, advice: str) -> None:
    code, printed = ends_with(OSError(number, "no", "/the/file"))
    assert code == 1
    assert "error: " in printed and "'/the/file'" in printed and advice in printed


def test_another_fault_of_the_system_is_no_mistake_of_the_user(ends_with: Ends) -> None:
    with pytest.raises(OSError, match="broken"):
        ends_with(OSError(errno.EIO, "broken"))


def test_a_refused_command_leaves_the_folder_as_it_was(
    run_verb: Callable[..., tuple[int, str]], recorded: object, tmp_path: Path
) -> None:
    """Hydra itself would replace ``.hydra`` before the command is looked at."""
    (tmp_path / "run").mkdir()
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- of the run that is here\n")
    root = f"dataset.root={recorded.root}"  # type: ignore[attr-defined]  # RecordedDataset
    code, printed = run_verb("train", "policy=pi05_small", root, f"hydra.run.dir={tmp_path}")
    assert (code, "already exists and resume is False. Continue its run" in printed) == (1, True)
    assert (tmp_path / ".hydra" / "overrides.yaml").read_text() == "- of the run that is here\n"
    assert [path.name for path in (tmp_path / ".hydra").iterdir()] == ["overrides.yaml"]


def test_what_a_loaders_worker_said_stands_alone() -> None:
    message = (
        "Caught IncompleteStreamError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "x.py", line 1, in f\nValueError: inner\n\nThe above exception was the direct cause:\n'
        "embodix.data.streams.IncompleteStreamError: Frame 3 of episode 1 cannot be read: inner\nSecond line."
    )
    assert explain(ValueError(message), "train", []) == ("Frame 3 of episode 1 cannot be read: inner\nSecond line.")
    assert explain(ValueError("Error: as it is"), "train", []) == "Error: as it is"
