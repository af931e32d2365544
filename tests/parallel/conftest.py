# SPDX-License-Identifier: Apache-2.0
"""Small runs, and a place for the modules that ranks import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from embodix_pi05.testing import small_run

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def run_of(tmp_path: Path) -> Callable[..., list[str]]:
    """Overrides of a small run on a data set, in the folder ``run`` of the test."""
    return lambda root, *more: small_run(root, f"train.output_dir={tmp_path}/run", *more)
