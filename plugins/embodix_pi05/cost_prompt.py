# SPDX-License-Identifier: Apache-2.0
"""How many tokens π0.5's prompts have, from task strings and the range of the state alone.

The prompt holds the task and the state as numbers from 0 to 255 (lerobot/policies/pi05/processor_pi05.py); the state
is drawn here at five of its quantiles, all dimensions at the same one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TokenCounter = Callable[[str], int]

_NUM_BINS = 256
# Shares of the data that the five quantiles of LeRobot's statistics stand for.
_QUANTILES = {"q01": 0.05, "q10": 0.2, "q50": 0.5, "q90": 0.2, "q99": 0.05}
_HUB_ID = "google/paligemma-3b-pt-224"


def token_counter(tokenizer_directory: str | None) -> tuple[TokenCounter, str]:
    """A function that counts tokens, and a sentence on how it does.

    Takes the tokenizer from ``tokenizer_directory`` (laid out as a hub cache), else from the hub's cache on this
    machine, else estimates: one token a word, digit and punctuation mark, and one to begin with.
    """
    path = _tokenizer_file(tokenizer_directory)
    if path is None:
        return _estimate, (
            f"Prompt lengths are estimates: the tokenizer of {_HUB_ID} is not on this machine, so each word, digit and "
            "punctuation mark counts as one token."
        )
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return (lambda text: len(tokenizer.encode(text).ids)), f"Prompt lengths are counted with the tokenizer {path}."


def prompt_lengths(
    task: str, state_stats: Mapping[str, list[float]], normalization: str, count: TokenCounter, longest: int
) -> dict[int, float]:
    """Prompt length -> share of a task's samples; upstream cuts at ``longest`` tokens.

    Args:
        normalization: the policy's mode for the state (``QUANTILES``, ``MEAN_STD``, ``MIN_MAX``, ``IDENTITY``, ...).
    """
    text = task.strip().replace("_", " ").replace("\n", " ")
    shares: dict[int, float] = {}
    for quantile, share in _QUANTILES.items():
        bins = " ".join(str(number) for number in _state_bins(state_stats, quantile, normalization))
        length = min(longest, count(f"Task: {text}, State: {bins};\nAction: "))
        shares[length] = shares.get(length, 0.0) + share
    return shares


def _state_bins(stats: Mapping[str, list[float]], quantile: str, normalization: str) -> list[int]:
    values = stats.get(quantile) or stats.get("mean", [])
    return [_bin(_normalized(value, stats, index, normalization)) for index, value in enumerate(values)]


def _normalized(value: float, stats: Mapping[str, list[float]], index: int, mode: str) -> float:
    """LeRobot's normalisation of one state value (lerobot/processor/normalize_processor.py)."""
    if mode == "MEAN_STD":
        return (value - stats["mean"][index]) / (stats["std"][index] + 1e-8)
    low, high = {"QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90"), "MIN_MAX": ("min", "max")}.get(
        mode, (None, None)
    )
    if low is None or high is None or low not in stats:
        return value
    return 2 * (value - stats[low][index]) / ((stats[high][index] - stats[low][index]) or 1e-8) - 1


def _bin(value: float) -> int:
    """The index that ``np.digitize`` gives against 256 left edges over [-1, 1]; -1 below them."""
    return max(-1, min(_NUM_BINS - 1, math.floor((value + 1) / 2 * _NUM_BINS)))


def _estimate(text: str) -> int:
    return 1 + len(re.findall(r"[^\W\d_]+|\d|[^\w ]|_", text))


def _tokenizer_file(directory: str | None) -> Path | None:
    name = f"models--{_HUB_ID.replace('/', '--')}"
    if directory is not None:
        found = sorted((Path(directory) / "hub" / name / "snapshots").glob("*/tokenizer.json"))
        return found[-1] if found else None
    from huggingface_hub import try_to_load_from_cache

    cached: Any = try_to_load_from_cache(_HUB_ID, "tokenizer.json")
    return Path(cached) if isinstance(cached, str) else None
