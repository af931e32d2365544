# SPDX-License-Identifier: Apache-2.0
"""Savers that are killed (SIGKILL) in the middle of a checkpoint: ``killed_savers.py FOLDER TIMES``.

Each is a process of its own, forked once everything is imported, that writes checkpoint after checkpoint; it is killed
at another moment of its second one. What it has left is looked at after each.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from embodix.parallel.sharded_state import FOLDER, holds_sharded_state
from embodix.training.background_saving import BackgroundSaver
from embodix.training.finished_checkpoint import unfinished_folder

NUM_TENSORS, ELEMENTS = 24, 400_000  # 38 MB, twice


def state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    tensors = {f"layer{index}.weight": torch.full((ELEMENTS,), float(step)) for index in range(NUM_TENSORS)}
    return {"model": tensors, "optimizer": {f"{name}::exp_avg": value + 0.5 for name, value in tensors.items()}}


def save_for_ever(checkpoints: Path) -> None:
    torch.set_num_threads(1)
    saver = BackgroundSaver(Accelerator(cpu=True), most_failures=0, on_finished=lambda place: None)
    for step in range(1, 1000):
        saver.begin(checkpoints / f"{step:06d}", state(step))
        saver.add_hosts_files(lambda folder: (folder / "pretrained_model").mkdir())


def kill_in_the_middle(checkpoints: Path, delay_s: float) -> None:
    pid = os.fork()
    if pid == 0:
        save_for_ever(checkpoints)
        os._exit(0)
    second = unfinished_folder(checkpoints / "000002")
    while not second.exists():
        time.sleep(0.001)
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def require_whole(checkpoints: Path) -> int:
    """Step of the last checkpoint, which must be whole and hold that step's values."""
    last = (checkpoints / "last").resolve()
    assert last.is_dir(), "no checkpoint is left"
    step = int(last.name)
    weights = load_file(last / "pretrained_model" / "model.safetensors")
    assert len(weights) == NUM_TENSORS and all(bool((value == step).all()) for value in weights.values())
    assert holds_sharded_state(last / "training_state"), FOLDER
    newer = [path.name for path in checkpoints.iterdir() if path.name.isdigit() and int(path.name) > step]
    assert not newer, f"{newer} have their names and are not the last"
    return step


def main(folder: Path, times: int) -> None:
    delays = random.Random(0)
    found_unfinished = 0
    for number in range(times):
        checkpoints = folder / str(number)
        checkpoints.mkdir()
        kill_in_the_middle(checkpoints, delays.uniform(0, 0.4))
        step = require_whole(checkpoints)
        found_unfinished += any(path.name.endswith(".unfinished") for path in checkpoints.iterdir())
        print("KILLED", number, "last whole checkpoint", step, flush=True)
    print("UNFINISHED", found_unfinished)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
