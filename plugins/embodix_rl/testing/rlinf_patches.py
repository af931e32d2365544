# SPDX-License-Identifier: Apache-2.0
"""Pytest plugin (``-p embodix_rl.testing.rlinf_patches``): patches of RLinf in force while RLinf's tests run."""

from __future__ import annotations

from typing import Any

from embodix.patching import is_applied
from embodix_rl.rlinf.extension import ROLE_PATCHES, activate, all_patches


def pytest_configure(config: Any) -> None:
    """Apply what driver and workers apply, before any test is imported."""
    for role in ROLE_PATCHES:
        activate(role)


def pytest_report_header(config: Any) -> str:
    """Name the patches."""
    return f"embodix patches in force: {', '.join(name for name in all_patches() if is_applied(name))}"
