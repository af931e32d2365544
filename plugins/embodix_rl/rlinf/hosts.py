# SPDX-License-Identifier: Apache-2.0
"""RLinf and Ray as a run needs them: their versions, and how they fail; importing it imports neither."""

from __future__ import annotations

from embodix.patching import version_problem


class RayStartError(RuntimeError):
    """Ray did not start, or a cluster could not be joined."""


class WorkersDifferError(RuntimeError):
    """A worker process does not run this embodix."""


class WorkerFailedError(RuntimeError):
    """A worker process failed; RLinf has printed why."""


HOST_VERSIONS = {"rlinf": ">=0.3.0,<0.3.1", "ray": ">=2.50,<3"}


def missing() -> list[str]:
    """One sentence for each host that is absent or of another version."""
    problems = (version_problem(distribution, wanted) for distribution, wanted in HOST_VERSIONS.items())
    return [problem for problem in problems if problem is not None]


def require_hosts() -> None:
    """Refuse a run that can't start.

    Raises:
        ValueError: RLinf or Ray is missing or of another version; the message says how to install them.
    """
    problems = missing()
    if problems:
        raise ValueError(
            f"`lerobot rl` runs in RLinf: {'; '.join(problems)}. In a checkout `make rl` installs both; elsewhere "
            "pip install 'embodix[rl]'."
        )
