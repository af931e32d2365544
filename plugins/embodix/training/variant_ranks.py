# SPDX-License-Identifier: Apache-2.0
"""The ranks that the variants of a comparison share: one group of processes, a step of each variant in turn."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from embodix.launched_rank import RANK_VARIABLES, SIZE_VARIABLES, launched_processes
from embodix.parallel.communication import CommunicationCounter
from embodix.parallel.effective import require_one_run
from embodix.training.accelerator import ObservedAccelerator
from embodix.training.session import TrainingSession

LAUNCHER_VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_PREFIXES = ("ROLE_", "TORCHELASTIC_", "PMI_", "PMIX_", "OMPI_", "MV2_")


class VariantAccelerator(ObservedAccelerator):
    """Of one variant: leaves the group of processes to the others, and counts what its first step exchanges.

    Raises:
        embodix.parallel.effective.NotAsRequestedError: the processes that were started are not in one group.
    """

    def __init__(self, session: TrainingSession) -> None:
        force_cpu = session.host_cfg.policy is not None and session.host_cfg.policy.device == "cpu"
        super().__init__(session, force_cpu, session.parallel.layout)
        require_one_run(self.state.num_processes, launched_processes())
        self._session = session
        self._counter = CommunicationCounter()
        self._counts_now = False
        self._awaits_step = self.state.num_processes > 1

    @contextmanager
    def autocast(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        if self._awaits_step:
            self._awaits_step, self._counts_now = False, True
            self._counter.__enter__()
        with super().autocast(*args, **kwargs):
            yield

    def unwrap_model(self, *args: Any, **kwargs: Any) -> Any:
        if self._counts_now:  # what the session does at the end of a step is not part of it
            self._counts_now = False
            self._counter.__exit__(None, None, None)
        return super().unwrap_model(*args, **kwargs)

    def end_training(self) -> None:
        """Read back what every rank holds after the last step; the group ends with the last variant."""
        session = self._session
        session.training_ends()
        session.spread.read_again(session.policy, session.optimizer, self)
        traffic = {kind: dataclasses.asdict(calls) for kind, calls in self._counter.traffic.items()}
        session.spread.effective["communication"] = traffic


def rank_launcher(num_processes: int) -> list[str]:
    """The beginning of a command that starts this Python in so many processes of this machine."""
    if num_processes == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """What a process that is no rank of the running command is started with."""
    names = (*RANK_VARIABLES, *SIZE_VARIABLES, *LAUNCHER_VARIABLES)
    return {
        name: value
        for name, value in environment.items()
        if name not in names and not name.startswith(LAUNCHER_PREFIXES)
    }


def on_several_machines() -> bool:
    """Whether not all processes of this command run on this machine, as far as its launcher says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", launched_processes())) != launched_processes()


def require_same_samples(sessions: Sequence[TrainingSession]) -> None:
    """
    Raises:
        ValueError: variants whose ranks would draw other samples and noise.
    """
    reference = sessions[0]
    wanted = reference.parallel.layout.num_batches
    for session in sessions[1:]:
        found = session.parallel.layout.num_batches
        if found != wanted:
            raise ValueError(
                "Variants are compared step by step on the same samples and noise, which each rank draws for itself, "
                f"so as many ranks must have samples of their own in all; in {reference.name!r} "
                f"(parallel={reference.parallel.name}) {wanted} have, in {session.name!r} "
                f"(parallel={session.parallel.name}) {found}. Compare strategies that share samples alike, or train "
                "each by itself with `lerobot train`."
            )
