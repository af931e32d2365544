# SPDX-License-Identifier: Apache-2.0
"""Figures in words, the same in pages, tables and logs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embodix.report.evaluation import SuccessRate

PHASE_NAMES = {
    "data_wait": "data wait",
    "preprocess": "preprocess",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
}


def success_words(success: SuccessRate) -> str:
    return (
        f"{success.num_success}/{success.num_episodes} = {percent(success.rate)} "
        f"[{percent(success.low)} to {percent(success.high)}]"
    )


def ratio(value: float | None) -> str:
    return "not measured" if value is None or math.isnan(value) else f"{value:.2f}×"


def percent(value: float | None, digits: int = 0) -> str:
    return "not counted" if value is None or math.isnan(value) else f"{100 * value:.{digits}f} %"


def difference(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    return "0 (bit-equal)" if value == 0 else f"{value:.1e}"


def quantity(value: float | None, unit: str = "") -> str:
    """A number with three digits and an SI prefix: 4.14 G, 617, 12.2 T."""
    if value is None or math.isnan(value):
        return "not measured"
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def memory(num_bytes: float | None) -> str:
    """Bytes in binary units: 3.2 GiB."""
    if num_bytes is None:
        return "not measured"
    for power, unit in ((3, "GiB"), (2, "MiB")):
        if num_bytes >= 1000 * 1024 ** (power - 1):  # never 1e+03 of the smaller unit
            return f"{num_bytes / 1024**power:.3g} {unit}"
    return f"{num_bytes / 1024:.3g} KiB"


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
