# SPDX-License-Identifier: Apache-2.0
"""What it costs that simulators of ``runner=rl_vla3`` are a process of their own: a message there and back, which does
nothing but carry observations, against a call in the same process, which carries none.

    python benchmarks/rl_simulator_messages.py
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch import Tensor

from embodix_rl.rlinf.simulator_process import RemoteSimulators, SimulatorDeadlines
from embodix_rl.testing.failing_environment import FailingEnvironment

SHAPES = {  # environments, cameras, pixels a side
    "state only": (8, 0, 0),
    "one camera": (8, 1, 96),
    "one camera, 224": (8, 1, 224),
    "two cameras, 224": (8, 2, 224),
}


def observation(num_envs: int, num_cameras: int, pixels: int) -> dict[str, Tensor]:
    """As RLinf's environments give it."""
    cameras = {f"camera_{number}": torch.zeros(num_envs, pixels, pixels, 3).byte() for number in range(num_cameras)}
    return {**cameras, "states": torch.zeros(num_envs, 39)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    rounds: int = parser.parse_args().rounds
    remote = RemoteSimulators("env 0", SimulatorDeadlines(60.0, 60.0))
    environment = remote.build(FailingEnvironment, first=0)
    for name, shape in SHAPES.items():
        carried = observation(*shape)
        seconds = []
        for _ in range(rounds):
            begun = time.perf_counter()
            environment.chunk_step(carried)  # comes back as it went
            seconds.append((time.perf_counter() - begun) / 2)
        size_mb = sum(value.nbytes for value in carried.values()) / 1e6
        least, median = np.min(seconds) * 1e3, np.median(seconds) * 1e3
        print(f"{shape[0]} environments, {name}: {size_mb:.2f} MB, {median:.2f} ms a message (least {least:.2f})")
    remote.close()


if __name__ == "__main__":
    main()
