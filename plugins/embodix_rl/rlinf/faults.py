# SPDX-License-Identifier: Apache-2.0
"""What ends a run besides a config that can't run; importing it imports nothing else."""

from __future__ import annotations


class RayStartError(RuntimeError):
    """Ray did not start, or a cluster could not be joined."""


class WorkersDifferError(RuntimeError):
    """A worker process does not run this embodix."""


class WorkerFailedError(RuntimeError):
    """A worker process failed; RLinf has printed why."""
