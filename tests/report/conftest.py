# SPDX-License-Identifier: Apache-2.0
"""What the report tests share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from run_folders import write_run


@pytest.fixture
def comparison(tmp_path) -> Path:
    """A comparison folder of upstream and embodix."""
    folder = tmp_path / "comparison"
    write_run(folder / "variants" / "upstream", "upstream", successes=28)
    write_run(
        folder / "variants" / "embodix",
        "embodix",
        speed=3.3,
        loss_shift=2e-7,
        successes=29,
        created_at="2026-01-01T00:00:01+00:00",
    )
    return folder
