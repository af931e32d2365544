# SPDX-License-Identifier: Apache-2.0
"""RLinf's environment worker of asynchronous runs."""

from __future__ import annotations

from embodix_rl.rlinf.extension import activate

activate("env")  # before RLinf's modules are imported, hence the order below

from rlinf.workers.env.async_env_worker import AsyncEnvWorker  # noqa: E402

from embodix_rl.rlinf.workers.env import TimedEnvironments  # noqa: E402


class EmbodixAsyncEnvWorker(TimedEnvironments, AsyncEnvWorker):
    """``AsyncEnvWorker`` with report and timeline."""
