# SPDX-License-Identifier: Apache-2.0
"""Command lines with words that have no name: the checkpoint that is read and the folder that is written."""

from __future__ import annotations

from pathlib import Path

POSITIONS = ("checkpoint", "output")
# Hydra's own options that are followed by a word of theirs.
TAKE_A_WORD = (
    *("-c", "--cfg", "-p", "--package", "-i", "--info", "-cp", "--config-path", "-cn", "--config-name"),
    *("-cd", "--config-dir", "--experimental-rerun", "-sc", "--shell-completion"),
)


def named_arguments(verb: str, argv: list[str]) -> list[str]:
    """The command line as Hydra takes it.

    In a multirun, every job writes a folder of its number below the one that is named.

    Raises:
        ValueError: more than two words without a name.
    """
    options: list[str] = []
    overrides: list[str] = []
    words: list[str] = []
    for before, word in zip(["", *argv], argv, strict=False):
        if word.startswith("-") or before in TAKE_A_WORD:
            options.append(word)
        elif "=" in word and not Path(word).exists():
            overrides.append(word)
        else:
            words.append(word)
    if len(words) > len(POSITIONS):
        raise ValueError(f"lerobot {verb} takes {' and '.join(POSITIONS)}; got {', '.join(words)}.")
    if len(words) == len(POSITIONS) and {"-m", "--multirun"} & set(argv):
        words[1] += "/${hydra:job.num}"
    named = [f"{name}={_quoted(word)}" for name, word in zip(POSITIONS, words, strict=False)]
    return [*options, *named, *overrides]  # Hydra takes no option between overrides


def _quoted(word: str) -> str:
    """A value in Hydra's grammar, whatever characters it has."""
    escaped = word.replace("'", "\\'")
    return f"'{escaped}'"
