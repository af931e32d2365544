# SPDX-License-Identifier: Apache-2.0
"""Odd command lines, in every verb: no traceback, a failure's exit code, and the word that is wrong in the message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from embodix.cli.main import dispatch
from embodix.doctor.findings import Diagnosis

# word -> what of it the message must hold
UNREADABLE = {
    "": "'' is an empty word",
    "  ": "'  ' is an empty word",
    "=3": "'=3' has no key",
    "+=3": "'+=3' has no key",
    "~": "'~' has no key",
    "-": "'-'",
    "steps": "'steps' is no override",
    "a.b=[1": "'a.b=[1' has [ and ]",
    "a.b={c": "'a.b={c' has { and }",
    "a.b=choice(1": "'a.b=choice(1' has ( and )",
    'a.b="c': "'a.b=\"c' can't be read",
    "stéps=3": "'stéps=3' can't be read",
    "a=🤖": "'a=🤖' can't be read",
    "a{b=3": "'a{b=3' can't be read",
    "packing=nine": "'nine' is no option of group 'packing'",
    "packing=3": "'packing' is a group",
    "packing=null": "'packing' is a group",
    "packing=[none,nine]": "'nine' is no option of group 'packing'",
    "packing=none,nine": "'nine' is no option of group 'packing'",
    "policy=pi05/small": "'pi05/small' is no option of group 'policy'",
    "--steps=3": "--steps=3",
    "--policy.type": "--policy.type",
    "-z": "-z",
}
UNKNOWN = {
    "nowhere=3": "'nowhere' is neither a group nor a field",
    "+nowhere=3": "'nowhere'",
    "~nowhere": "nowhere",
    "seeed.deep=3": "'seeed.deep' is neither a group nor a field",
    "hydra.run.dirr=3": "hydra.run.dirr",
    "+hydra.run.dirr=3": "'hydra.run.dirr' is no field of Hydra",
}
TRAINING = {
    "packing={a: b}": "'packing' is a group",
    "plugin=embodix": "'plugin' is added with a plus: +plugin=embodix",
    "++plugin=embodix": "'plugin' is added with one plus: +plugin=embodix",
    "~plugin": "no option of 'plugin' is chosen",
    "+packing=padding_free": "'packing' is chosen already (packing=none); leave out the plus: packing=padding_free",
    "++packing=none": "'packing' is chosen already (packing=none); leave out the plus: packing=none",
    "packing@other=none": "packing@other=none: give the group alone, packing=none.",
    "packing=none,padding_free": "packing=none,padding_free",
    "train.steps=": "train.steps",
    "train.steps=3 4": "'3 4'",
    "train.steps=many": "'many'",
    "train.steps=null": "train.steps",
    "train.steps=choice(1,2)": "train.steps=choice(1,2)",
    "train.steps=${nowhere}": "nowhere",
    "train=3": "train",
    "packing.name.deep=3": "packing.name.deep",
    "packing=${nowhere}": "${nowhere}",
    "hydra/launcher=nine": "hydra/launcher/nine",
    "--config-name=nine": "nine",
    "--cfg=nine": "nine",
}
LINES = {
    "train": UNREADABLE | UNKNOWN,
    "plan": TRAINING,
    "compare": {"+compare.variant.a=[]": "'compare.variant'", "compare.variants=3": "compare.variants", "": "''"},
    "eval": {"eval.n_episodes=few": "'few'", "controls=blind": "controls", "nowhere=3": "'nowhere' is neither"},
    "quantize": {
        "a b.c=[": "'a b.c=['",
        "gate.seed=x": "'x'",
        "quantization=nine": "'nine'",
        "+nowhere=3": "'nowhere' is neither",
    },
    "data": {"nine": "'nine' is no option of group 'data'", "": "'' is no option of group 'data'", "seed=": "seed"},
    "rl": {
        "rl.steps=few": "'few'",
        "runner=nine": "'nine'",
        "+runner=sync": "leave out the plus",
        "seeed.deep=3": "'seeed.deep' is",
    },
    "bench": {"rl": "", "nine": "usage"},
    "doctor": {"=3": "'=3' has no key", "packing=nine": "'nine' is no option", "+nowhere=3": "'nowhere'", "-z": "-z"},
}


@pytest.fixture
def outcome(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Callable[..., Any]:
    """The exit code and all that is printed of a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("embodix.cli.doctor.diagnose", lambda registry, config: Diagnosis())

    def run(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        try:
            code = dispatch("lerobot", list(words))
        except SystemExit as left:
            code = int(left.code or 0)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


@pytest.mark.parametrize("verb", LINES)
def test_an_odd_line_is_answered_in_words(outcome: Callable[..., Any], verb: str) -> None:
    for word, named in LINES[verb].items():
        words = [verb, "rl", "bench.only=few"] if (verb, word) == ("bench", "rl") else [verb, word]
        code, printed = outcome(*words)
        assert code in (1, 2), (words, printed)
        assert "Traceback" not in printed, words
        assert (named or "few") in printed, (words, printed)


def test_there_are_many_and_unlike_lines() -> None:
    assert sum(map(len, LINES.values())) >= 60


def test_a_mapping_is_merged_into_the_node_of_a_group() -> None:
    from embodix.cli.command_line import require_readable

    (read,) = require_readable(["+env={type: aloha}"])
    assert read.value() == {"type": "aloha"}


@pytest.mark.parametrize("searched", [["--config-dir"], ["-cd"], None])
def test_an_option_in_a_folder_of_the_users_own_is_taken(
    outcome: Callable[..., Any], tmp_path: Any, searched: list[str] | None
) -> None:
    (tmp_path / "mine" / "packing").mkdir(parents=True)
    (tmp_path / "mine" / "packing" / "own.yaml").write_text("name: padding_free\n")
    folder = str(tmp_path / "mine")
    where = [*searched, folder] if searched else [f"hydra.searchpath=[file://{folder}]"]
    code, printed = outcome("train", "--cfg", "job", "-p", "packing", *where, "packing=own")
    assert code == 0, printed
    assert "name: padding_free" in printed


def test_no_hint_is_given_where_all_words_are_right() -> None:
    from embodix.cli.hints import hints_of

    assert hints_of("train", ["packing=padding_free", "+plugin=embodix", "train.steps=3", "+policy.new=1"]) == []
