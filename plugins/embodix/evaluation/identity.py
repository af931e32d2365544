# SPDX-License-Identifier: Apache-2.0
"""What an evaluation's episodes were made by, kept beside them, so that no others are ever counted with them."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import embodix
from embodix.checkpoints.model_folder import ModelFolder
from embodix.data.content import files_content
from embodix.report.manifest import write_text_atomically

IDENTITY_FILE = "embodix_evaluation.json"


@dataclass(frozen=True)
class EvaluationIdentity:
    """What decides the episodes of an evaluation.

    Attributes:
        overrides: of the command that began it.
        checkpoints: name -> ``model`` (its folder without links, or its name on the hub), ``weights`` and ``files``
            (hashes of all bytes of the weights, and of the configs and processors; None for a model on the hub).
        versions: of embodix and LeRobot.
    """

    overrides: list[str]
    checkpoints: dict[str, dict[str, str | None]]
    versions: dict[str, str]

    @classmethod
    def of(cls, overrides: Sequence[str], sources: Mapping[str, ModelFolder]) -> EvaluationIdentity:
        """That of an evaluation that begins now."""
        checkpoints = {name: _content(source.model) for name, source in sources.items()}
        versions = {"embodix": embodix.__version__, "lerobot": importlib.metadata.version("lerobot")}
        return cls(list(overrides), checkpoints, versions)

    def save(self, folder: Path) -> None:
        write_text_atomically(folder / IDENTITY_FILE, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> EvaluationIdentity:
        """That of the evaluation in a folder.

        Raises:
            ValueError: it is not recorded, or the record is damaged.
        """
        path = folder / IDENTITY_FILE
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            raise ValueError(
                f"{path} is missing: which checkpoint made the episodes in {folder} is not known, and those of two "
                "would become one score. Begin another evaluation."
            ) from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}). Begin another evaluation.") from error

    def require_same(self, folder: Path, found: EvaluationIdentity) -> None:
        """
        Raises:
            ValueError: the checkpoints or versions are others than those that made the episodes.
        """
        recorded, now = self._named_values(), found._named_values()
        changes = [
            f"\n  {name} was {recorded.get(name)}, is {now.get(name)}"
            for name in dict.fromkeys((*recorded, *now))
            if recorded.get(name) != now.get(name)
        ]
        if changes:
            raise ValueError(
                f"The episodes in {folder} were made by something else than what would go on:{''.join(changes)}\n"
                "Put it back, or begin another evaluation in another folder."
            )

    def _named_values(self) -> dict[str, Any]:
        of_checkpoints = {
            f"checkpoint {name}, {key}": value
            for name, content in self.checkpoints.items()
            for key, value in content.items()
        }
        return {**of_checkpoints, **self.versions, "overrides": self.overrides}


def _content(model: str) -> dict[str, Any]:
    folder = Path(model)
    if not folder.is_dir():
        return {"model": model, "weights": None, "files": None}
    weights = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            weights.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return {"model": model, "weights": weights.hexdigest()[:16], "files": files_content(folder, ["*.json"])}
