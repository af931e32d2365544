# SPDX-License-Identifier: Apache-2.0
"""A process reports its own peak, not that of the process that started it."""

from __future__ import annotations

import subprocess
import sys

from embodix.training.memory import peak_resident_bytes

LARGE = 1 << 30


def test_a_child_does_not_inherit_its_parents_peak() -> None:
    code = """
import subprocess, sys
block = bytearray(1 << 30)
print(sum(block[:: 1 << 12]))
child = "from embodix.training.memory import peak_resident_bytes; print(peak_resident_bytes())"
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout)
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 0 < int(printed.split()[-1]) < LARGE


def test_a_large_block_shows_up() -> None:
    block = bytearray(LARGE // 4)
    assert peak_resident_bytes() >= len(block)
