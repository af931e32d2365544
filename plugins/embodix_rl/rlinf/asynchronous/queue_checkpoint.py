# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint keeps besides RLinf's: the gate, what is finished and not yet trained, where episodes are.

A checkpoint is written beside its place and renamed when it is whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from embodix_rl.scheduling.staleness import FinishedSample, Ticket

QUEUE_FOLDER, GATE_FILE, TRAJECTORIES_FILE = "queue", "gate.json", "trajectories.pt"
TICKET_FIELDS = [field.name for field in fields(Ticket)]  # checkpoints of earlier versions name more


@dataclass(frozen=True)
class SavedGate:
    """The driver's part.

    Attributes:
        state: of the gate (`StalenessGate.state`); what a finished sample holds is the shard that made it.
        sizes: of the run.
        episodes: for each environment worker, the progress of its environments.
    """

    state: dict[str, Any]
    sizes: dict[str, int]
    episodes: list[Any]

    @property
    def shards(self) -> list[str]:
        """That finished something, in its order."""
        return [one.payload for one in self.state["finished"]]


@contextmanager
def whole_checkpoint(folder: Path) -> Iterator[Path]:
    """A place to write a checkpoint to; it becomes `folder`, in place of what was there, when the block is done."""
    partial = folder.with_name(f"saving_{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def write_gate(folder: Path, saved: SavedGate) -> None:
    """Into a checkpoint's folder."""
    finished = [
        {"ticket": asdict(one.ticket), "payload": one.payload, "valid": one.valid} for one in saved.state["finished"]
    ]
    record = {"state": {**saved.state, "finished": finished}, "sizes": saved.sizes, "episodes": saved.episodes}
    path = folder / QUEUE_FOLDER / GATE_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1))


def read_gate(folder: Path) -> SavedGate | None:
    """Of a checkpoint's folder; None where it has none: the checkpoint of another runner or of a failure."""
    path = folder / QUEUE_FOLDER / GATE_FILE
    if not path.is_file():
        return None
    record = json.loads(path.read_text())
    finished = []
    for one in record["state"].pop("finished"):
        ticket = Ticket(**{name: one["ticket"][name] for name in TICKET_FIELDS})
        finished.append(FinishedSample(ticket, one["payload"], one["valid"]))
    return SavedGate({**record["state"], "finished": finished}, record["sizes"], record["episodes"])


def require_resumable(folder: Path, sizes: Mapping[str, int]) -> None:
    """Check that a run of `sizes` can go on from a checkpoint's queue.

    Raises:
        ValueError: its trajectories are of other sizes, or older than this run allows.
    """
    saved = read_gate(folder)
    if saved is None:
        return
    other = [
        f"{name}={value} (the checkpoint's run had {saved.sizes.get(name)})"
        for name, value in sizes.items()
        if name != "max_staleness" and saved.sizes.get(name) != value
    ]
    if other:
        raise ValueError(
            f"{folder} holds trajectories that wait for training, of other sizes than this run's: {', '.join(other)}. "
            f"Set the checkpoint's sizes, or delete {folder / QUEUE_FOLDER} to lose what waits."
        )
    oldest = min((one.ticket.version for one in saved.state["finished"]), default=saved.state["version"])
    if saved.state["finished"] and saved.sizes["max_staleness"] > sizes["max_staleness"]:
        raise ValueError(
            f"{folder} holds trajectories of policy version {oldest} that may wait for {saved.sizes['max_staleness']} "
            f"versions; runner.options.max_staleness={sizes['max_staleness']} is less. Set at least that, or delete "
            f"{folder / QUEUE_FOLDER} to lose what waits."
        )


def save_trajectories(folder: Path, finished: Sequence[tuple[str, Any]], streamer: Mapping[str, Any]) -> None:
    """The trainer's part: trajectories by shard, None for masked ones, and the state of the streamer."""
    import torch

    path = folder / QUEUE_FOLDER / TRAJECTORIES_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = [(shard, None if trajectory is None else vars(trajectory)) for shard, trajectory in finished]
    torch.save({"finished": plain, "streamer": dict(streamer)}, path)


def load_trajectories(folder: Path, trajectory: Any) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """What `save_trajectories` wrote, made with the class `trajectory`."""
    import torch

    record = torch.load(folder / QUEUE_FOLDER / TRAJECTORIES_FILE, map_location="cpu", weights_only=True)
    finished = [(shard, None if values is None else trajectory(**values)) for shard, values in record["finished"]]
    return finished, record["streamer"]
