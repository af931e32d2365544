# SPDX-License-Identifier: Apache-2.0
"""What embodix adds to upstream's checkpoint, and how a checkpoint is found again.

Upstream's own files are untouched, so plain LeRobot loads the checkpoint. Beside them stand
``pretrained_model/embodix_overrides.json`` (the Hydra overrides), ``pretrained_model/embodix_architecture.json``
(widths and depths of a small policy), ``training_state/embodix_loader.safetensors`` or ``embodix_stream.json``
(position in the data), ``training_state/embodix_schedule.json`` (length of the learning-rate schedule) and
``training_state/embodix_identity.json`` (what the run is).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lerobot.configs.train import TRAIN_CONFIG_NAME
from lerobot.utils.constants import (
    CHECKPOINTS_DIR,
    LAST_CHECKPOINT_LINK,
    PRETRAINED_MODEL_DIR,
    TRAINING_STATE_DIR,
)

from embodix.training.checkpoint_files import require_whole
from embodix.training.identity import RunIdentity, require_known_aspects
from embodix.training.loader import LoaderState, StreamState
from embodix.training.resumption import Resumption
from embodix.training.session import current_session

OVERRIDES_FILE = "embodix_overrides.json"
ARCHITECTURE_FILE = "embodix_architecture.json"


def write_session_state(checkpoint_dir: Path) -> None:
    """Add the running session's own state to a checkpoint that upstream has just written."""
    session = current_session()
    model_dir = checkpoint_dir / PRETRAINED_MODEL_DIR
    (model_dir / OVERRIDES_FILE).write_text(json.dumps(session.overrides, indent=2) + "\n")
    if session.config.get("architecture"):
        (model_dir / ARCHITECTURE_FILE).write_text(json.dumps(session.config["architecture"], indent=2) + "\n")
    session.data.save_embodiments(model_dir)
    session.schedule.save(checkpoint_dir / TRAINING_STATE_DIR)
    if session.position is not None:
        session.position.save(checkpoint_dir / TRAINING_STATE_DIR)
    session.continuity.identity().save(checkpoint_dir / TRAINING_STATE_DIR)


def checkpoint_finished(checkpoint_dir: Path) -> None:
    """Tell the running session of a checkpoint that is complete and in its place."""
    current_session().checkpoint_finished(checkpoint_dir)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder (``checkpoints/000003``) that holds both the model and the training state."""

    folder: Path

    @property
    def config_path(self) -> Path:
        return self.folder / PRETRAINED_MODEL_DIR / TRAIN_CONFIG_NAME

    @property
    def step(self) -> int:
        state = json.loads((self.folder / TRAINING_STATE_DIR / "training_step.json").read_text())
        return int(state["step"])

    def overrides(self) -> list[str] | None:
        """The Hydra overrides of the run that wrote it; None when plain upstream LeRobot wrote it."""
        path = self.folder / PRETRAINED_MODEL_DIR / OVERRIDES_FILE
        return list(json.loads(path.read_text())) if path.is_file() else None

    def policy_type(self) -> str:
        policy: dict[str, Any] = json.loads(self.config_path.read_text())["policy"]
        return str(policy["type"])

    def loader_state(self) -> LoaderState | None:
        return LoaderState.load(self.folder / TRAINING_STATE_DIR)

    def resumption(self, accepted: Sequence[str]) -> Resumption:
        """What a run needs to go on from here.

        Args:
            accepted: changes that the command accepts.

        Raises:
            ValueError: a change that can't be accepted, or a file that is missing or damaged.
        """
        require_known_aspects(accepted)
        require_whole(self.folder)
        state = self.folder / TRAINING_STATE_DIR
        try:
            loader, stream = self.loader_state(), StreamState.load(state)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"The position in the data that {state} holds can't be read ({type(error).__name__}: {error}). Copy "
                "the checkpoint again, or resume another."
            ) from error
        return Resumption(
            folder=self.folder,
            step=self.step,
            loader=loader,
            stream=stream,
            identity=RunIdentity.load(state),
            accepted=tuple(accepted),
            of_upstream=self.overrides() is None,
        )


def find_checkpoint(path: Path | str) -> Checkpoint:
    """Accept a file in a checkpoint, a checkpoint folder, a run folder or its ``last`` link.

    Raises:
        ValueError: nothing there, or what is there is no complete checkpoint; the message lists what was tried.
    """
    path = Path(path)
    start = path.parent if path.is_file() else path
    tried = [
        start,
        start.parent,
        start / LAST_CHECKPOINT_LINK,
        start / CHECKPOINTS_DIR / LAST_CHECKPOINT_LINK,
        start / "run" / CHECKPOINTS_DIR / LAST_CHECKPOINT_LINK,
    ]
    for folder in tried:
        found = Checkpoint(folder.resolve())
        if found.config_path.is_file() and (found.folder / TRAINING_STATE_DIR).is_dir():
            return found
    raise ValueError(
        f"resume={path} holds no complete checkpoint ({PRETRAINED_MODEL_DIR}/{TRAIN_CONFIG_NAME} and "
        f"{TRAINING_STATE_DIR}/). Give a checkpoint file, a checkpoint folder (checkpoints/000100), a run folder or "
        f"its checkpoints/last link. Looked in: {', '.join(str(folder) for folder in tried)}."
    )
