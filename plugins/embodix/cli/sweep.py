# SPDX-License-Identifier: Apache-2.0
"""The table at the end of a Hydra multirun."""

from __future__ import annotations

from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class SweepTable(Callback):
    """Compares the runs of a sweep, whatever the launcher, once all have ended."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from embodix.report.sweep import print_sweep

        print_sweep(config.hydra.sweep.dir)
