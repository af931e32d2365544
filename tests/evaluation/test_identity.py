# SPDX-License-Identifier: Apache-2.0
"""Episodes of two checkpoints never become one score."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embodix.checkpoints.model_folder import find_model
from embodix.evaluation.identity import IDENTITY_FILE, EvaluationIdentity

OVERRIDES = ["checkpoint=run", "eval.n_episodes=2"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two checkpoints and the link to the later."""
    for step in ("000001", "000002"):
        model = tmp_path / "run" / "checkpoints" / step / "pretrained_model"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps({"type": "act"}))
        (model / "model.safetensors").write_bytes(f"weights of {step}".encode())
    _let_last_be(tmp_path / "run", "000001")
    return tmp_path / "run"


def _let_last_be(run: Path, step: str) -> None:
    last = run / "checkpoints" / "last"
    last.unlink(missing_ok=True)
    last.symlink_to(step)


def _identity(run: Path, overrides: list[str] = OVERRIDES) -> EvaluationIdentity:
    return EvaluationIdentity.of(overrides, {"policy": find_model(run)})


def test_it_round_trips_with_the_folder_that_last_names_now(run: Path, tmp_path: Path) -> None:
    begun = _identity(run)
    begun.save(tmp_path)
    assert EvaluationIdentity.load(tmp_path) == begun
    assert begun.checkpoints["policy"]["model"] == str(run / "checkpoints" / "000001" / "pretrained_model")
    begun.require_same(tmp_path, _identity(run))


def test_a_last_that_has_moved_is_named(run: Path, tmp_path: Path) -> None:
    begun = _identity(run)
    _let_last_be(run, "000002")
    message = (
        r"checkpoint policy, model was .*000001/pretrained_model, is .*000002(?s:.*)policy, weights was \w+, is \w+"
    )
    with pytest.raises(ValueError, match=message):
        begun.require_same(tmp_path, _identity(run))


@pytest.mark.parametrize(("name", "part"), [("model.safetensors", "weights"), ("config.json", "files")])
def test_other_bytes_in_the_same_folder_are_named(run: Path, tmp_path: Path, name: str, part: str) -> None:
    begun = _identity(run)
    path = run / "checkpoints" / "000001" / "pretrained_model" / name
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(
        ValueError, match=rf"by something else .*:\n  checkpoint policy, {part} was \w+, is \w+\nPut it"
    ):
        begun.require_same(tmp_path, _identity(run))


def test_other_overrides_and_versions_are_named(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = _identity(run)
    with pytest.raises(ValueError, match=r"\n  overrides was .*n_episodes=2.*, is .*n_episodes=3"):
        begun.require_same(tmp_path, _identity(run, ["checkpoint=run", "eval.n_episodes=3"]))
    monkeypatch.setattr("embodix.__version__", "9.9")
    with pytest.raises(ValueError, match=r"\n  embodix was .*, is 9.9"):
        begun.require_same(tmp_path, _identity(run))


@pytest.mark.parametrize(
    ("text", "message"), [(None, "is missing: which checkpoint"), ("{", "is damaged"), ("{}", "is damaged")]
)
def test_episodes_of_unknown_origin_are_not_continued(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / IDENTITY_FILE).write_text(text)
    with pytest.raises(ValueError, match=rf"{IDENTITY_FILE} {message}.*Begin another evaluation"):
        EvaluationIdentity.load(tmp_path)
