# SPDX-License-Identifier: Apache-2.0
"""What a resumed run takes from its checkpoint beside upstream's state, and what it needs to be the same run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from lerobot.configs.train import TrainPipelineConfig

from embodix.launched_rank import is_first_rank
from embodix.training.features import FeatureSelection, composes_batches
from embodix.training.identity import (
    ENDS_POSITION,
    POSITION,
    RunIdentity,
    data_identity,
    require_same_run,
    run_identity,
)
from embodix.training.loader import LoaderState, StreamState


@dataclass(frozen=True)
class Resumption:
    """A checkpoint to go on from.

    Attributes:
        folder: of the checkpoint.
        step: the last step behind it.
        loader: position in the data, None where the packer composed the batches.
        stream: position of composed batches, None for others.
        identity: of the run that wrote it, None where that was not recorded.
        accepted: changes that are accepted, see ``embodix.training.identity``.
        of_upstream: plain upstream LeRobot wrote it, which records neither position nor identity.
    """

    folder: Path
    step: int
    loader: LoaderState | None
    stream: StreamState | None
    identity: RunIdentity | None
    accepted: tuple[str, ...]
    of_upstream: bool

    def continued(self, found: RunIdentity) -> tuple[RunIdentity, Resumption]:
        """The identity that goes on, and this without its position where an accepted change has ended it.

        Raises:
            ValueError: a change that is not accepted.
        """
        if self.identity is None:
            logging.warning("%s does not record what its run was: nothing can be compared with it.", self.folder)
            return found, self
        identity = require_same_run(self.folder, self.identity, found, self.accepted, self.step)
        if not any(change.aspect in ENDS_POSITION for change in self.identity.changes(found)):
            return identity, self
        logging.warning("Data or batches are others than in %s: the epoch begins again.", self.folder)
        return identity, replace(self, loader=None, stream=None, accepted=(*self.accepted, POSITION))

    def require_position(self, composed: bool) -> None:
        """Check that the place in the data is known.

        Args:
            composed: the packer composes the batches.

        Raises:
            ValueError: it is not, and a new epoch is not accepted.
        """
        if (self.stream if composed else self.loader) is not None:
            return
        if self.of_upstream or POSITION in self.accepted:
            logging.warning("%s has no position in these batches: the data begins again with an epoch.", self.folder)
            return
        other = self.loader if composed else self.stream
        why = "it was trained with another packing" if other is not None else "its file is gone"
        raise ValueError(
            f"{self.folder} has no position in these batches ({why}), so the epoch would begin again and some samples "
            f"be trained twice. Resume another checkpoint, or accept it: 'accept_changes=[{POSITION}]'."
        )


class Continuity:
    """Keeps a run one run: compares it with the checkpoint that it goes on from, and says what it is in its own.

    Args:
        config: the resolved Hydra config.
        resumption: None for a run from its beginning.
        num_ranks: that have samples of their own.
    """

    def __init__(
        self,
        host_cfg: TrainPipelineConfig,
        config: Mapping[str, Any],
        selection: FeatureSelection,
        resumption: Resumption | None,
        num_ranks: int,
    ) -> None:
        self._host_cfg, self._config, self._selection = host_cfg, config, selection
        self._resumption, self._num_ranks = resumption, num_ranks
        self._data: dict[str, Any] = {}
        self._accepted: list[dict[str, Any]] = []

    def dataset_built(self, dataset: Any) -> None:
        """Compare, before anything is built for the data set.

        On resume every rank compares: each drops a position that an accepted change has ended.

        Raises:
            ValueError: this is not the run that wrote the checkpoint.
        """
        if self._resumption is not None or (is_first_rank() and self._host_cfg.save_checkpoint):
            self._data = data_identity(dataset)
        if self._resumption is not None:
            identity, self._resumption = self._resumption.continued(self.identity())
            self._accepted = identity.accepted

    def identity(self) -> RunIdentity:
        """What this run is."""
        found = run_identity(
            self._config,
            self._host_cfg.to_dict(),
            self._data,
            self._num_ranks,
            AcceleratorState().mixed_precision,
            composes_batches(self._selection),
        )
        return replace(found, accepted=self._accepted)

    def loader_position(self) -> LoaderState | None:
        """Where upstream's loader goes on.

        Raises:
            ValueError: that is not known, and a new epoch is not accepted.
        """
        resumption = self._with_position(composed=False)
        return None if resumption is None else resumption.loader

    def stream_position(self) -> StreamState | None:
        """Where composed batches go on.

        Raises:
            ValueError: that is not known, and a new epoch is not accepted.
        """
        resumption = self._with_position(composed=True)
        return None if resumption is None else resumption.stream

    def _with_position(self, composed: bool) -> Resumption | None:
        if self._resumption is not None:
            self._resumption.require_position(composed=composed)
        return self._resumption
