# SPDX-License-Identifier: Apache-2.0
"""One run spread over its ranks: its policy put in place, read back, gone on from a checkpoint, and saved in parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lerobot.utils.random_utils import deserialize_rng_state, serialize_rng_state

from embodix.contracts import Placement, PolicySupport
from embodix.parallel.choice import ParallelChoice
from embodix.parallel.effective import described, rank_reports, require_effective
from embodix.training.accelerator import ObservedAccelerator
from embodix.training.background_saving import BackgroundSaver, saves_parts
from embodix.training.sharded_resume import own_random_state, placed_state, take_over


class SpreadRun:
    """Puts a parallel strategy into upstream's loop.

    Args:
        choice: the strategy and the arrangement of the ranks.
        checkpoint: the config's node ``checkpoint``.
        resumed_from: the checkpoint that is gone on from.

    Attributes:
        placement: of the policy; None where accelerate has prepared it.
        saver: writes checkpoints of which each rank has a part; None where upstream writes them.
        effective: what every rank holds, for the manifest.
    """

    def __init__(self, choice: ParallelChoice, checkpoint: Mapping[str, Any], resumed_from: Path | None) -> None:
        self.placement: Placement | None = None
        self.saver: BackgroundSaver | None = None
        self.effective: dict[str, Any] = {}
        self._choice, self._checkpoint, self._resumed_from = choice, checkpoint, resumed_from
        self._random_state: dict[str, torch.Tensor] = {}
        self._frozen: list[torch.nn.Parameter] = []

    def place(
        self, outer: Any, policy: Any, optimizer: Any, support: PolicySupport, packed: bool, run: ObservedAccelerator
    ) -> Placement | None:
        """Spread a policy and its optimizer over the ranks; None leaves that to accelerate.

        Args:
            outer: what upstream's loop calls: the policy, or what stands around it.
            policy: the bare one.
            packed: the policy computes on packed batches.
        """
        if self._resumed_from is not None:
            self._random_state = serialize_rng_state()
        if packed and self._choice.layout.num_processes > 1 and support.offers("unread_parameters"):
            self._freeze(policy, support.unread_parameters(policy))
            run.trust_all_used()
        self.placement = self._choice.strategy.place(outer, optimizer, run.device, self._choice.layout, support)
        return self.placement

    def _freeze(self, policy: Any, names: Sequence[str]) -> None:
        """What no packed batch gives a gradient needs none, and copies need not wait for it."""
        parameters = dict(policy.named_parameters())
        self._frozen = [parameters[name] for name in names if parameters[name].requires_grad]
        for parameter in self._frozen:
            parameter.requires_grad_(False)

    def placed(
        self, policy: Any, optimizer: Any, run: ObservedAccelerator, on_finished: Callable[[Path], None]
    ) -> None:
        """Once the policy is in place: read back what every rank holds, and take over the checkpoint's optimizer state.

        Args:
            optimizer: as upstream's loop uses it.
            on_finished: called in the first rank with each checkpoint that the ranks have written.

        Raises:
            embodix.parallel.effective.NotAsRequestedError: what runs is not what the config asks for.
            ValueError: a damaged checkpoint.
        """
        name, layout = self._choice.name, self._choice.layout
        reports = rank_reports(policy, optimizer, self.placement, run)
        require_effective(name, layout, reports)
        self.effective = described(name, layout, reports)
        if len(reports) > 1 and run.is_main_process:
            for report in reports:
                logging.info("%s", report.line)
        if self._resumed_from is not None:
            take_over(self._resumed_from, policy, optimizer, self.placement)
        if saves_parts(self._checkpoint, self._choice.strategy):
            self.saver = BackgroundSaver(run, self._checkpoint["most_failures"], on_finished)

    def read_again(self, policy: Any, optimizer: Any, run: ObservedAccelerator) -> None:
        """What every rank holds after some steps, with the optimizer's state; every rank must call."""
        reports = rank_reports(policy, optimizer, self.placement, run)
        self.effective = described(self._choice.name, self._choice.layout, reports)

    def restore_random_state(self, run: ObservedAccelerator) -> None:
        """That of the checkpoint, of each rank its own where it is there: accelerate draws a seed for the shuffle of
        several processes where it prepares them."""
        if self._resumed_from is not None:
            deserialize_rng_state(own_random_state(self._resumed_from, run) or self._random_state)

    def begin_saving(self, place: Path, policy: Any, optimizer: Any) -> None:
        """Each rank its part; upstream's loop enters its own saving in the first rank alone."""
        if self.saver is not None:
            self.saver.begin(place, placed_state(policy, optimizer, self.placement))

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is being written; every rank must call.

        Raises:
            embodix.training.stopped.RunStoppedError: it could not be written.
        """
        if self.saver is not None:
            self.saver.settle(last=True)

    def release(self) -> None:
        """Give the policy back what was put on it; each rank for itself."""
        if self.saver is not None:
            self.saver.wait()
        if self.placement is not None:
            self.placement.release()
        for parameter in self._frozen:
            parameter.requires_grad_(True)
