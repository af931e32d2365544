# SPDX-License-Identifier: Apache-2.0
"""Small runs, a place for the modules that ranks import, and which tests need four of them."""

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What reads the results of four ranks is marked before ``-m`` chooses."""
    for item in items:
        if "four_ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.four_ranks)
