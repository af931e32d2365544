# SPDX-License-Identifier: Apache-2.0
"""One LIBERO task: upstream's `LiberoEnv` against the simulator of the evaluation engine, same images to the bit.

Both replay the same random actions from the same initial states at upstream's rendering, as a policy would that looks
after every `--chunk` actions; upstream renders in each step. CPU time of this process; the episodes of both alternate.

    python benchmarks/libero_simulator.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from embodix.report.benchmark import require_quotable, write_benchmark
from embodix_libero.environment import EmbodixLiberoConfig

SUITE, NUMBER = "libero_spatial", 0


def cpu_s(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = action()
    return time.process_time() - start, result


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    return left.dtype == right.dtype and np.array_equal(left, right)


def run_upstream(env: Any, state: int, actions: np.ndarray, chunk: int) -> tuple[float, float, list[Any]]:
    """CPU seconds of the reset and of the steps, and the observations that a policy looks at."""
    env.init_state_id = state
    # robosuite renders in the OpenGL context that was made current last, which may be the other simulator's.
    env._env.sim._render_context_offscreen.gl_ctx.make_current()
    reset_s, (observation, _) = cpu_s(lambda: env.reset(seed=state))
    steps_s, observations = cpu_s(lambda: [env.step(action)[0] for action in actions])
    return reset_s, steps_s, [observation, *observations[chunk - 1 :: chunk]]


def run_simulator(simulator: Any, state: int, actions: np.ndarray, chunk: int) -> tuple[float, float, list[Any]]:
    def steps() -> list[Any]:
        looked = []
        for index, action in enumerate(actions, start=1):
            simulator.step(action)
            if index % chunk == 0:
                looked.append(simulator.observe())
        return looked

    def reset() -> Any:
        simulator.reset(state)
        return simulator.observe()

    reset_s, observation = cpu_s(reset)
    steps_s, observations = cpu_s(steps)
    return reset_s, steps_s, [observation, *observations]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    size = {"observation_height": options.image_size, "observation_width": options.image_size}
    simulators = EmbodixLiberoConfig(task=SUITE, task_ids=[NUMBER], **size).simulators()
    from lerobot.envs.libero import LiberoEnv, _get_suite

    upstream = LiberoEnv(_get_suite(SUITE), NUMBER, SUITE, obs_type="pixels_agent_pos", **size)
    simulator = simulators.build(simulators.tasks[0])
    actions = np.random.default_rng(0).uniform(-1, 1, (options.steps, 7)).astype(np.float32)
    theirs, ours, num_equal, num_looked = [], [], 0, 0
    for state in range(options.episodes):
        *seconds, expected = run_upstream(upstream, state, actions, options.chunk)
        theirs.append(seconds)
        *seconds, looked = run_simulator(simulator, state, actions, options.chunk)
        ours.append(seconds)
        num_equal += sum(map(equal, looked, expected))
        num_looked += len(expected)
    simulator.close()
    upstream.close()
    return summary(options, theirs, ours, num_equal, num_looked)


def summary(
    options: argparse.Namespace, theirs: list[list[float]], ours: list[list[float]], num_equal: int, num_looked: int
) -> dict[str, Any]:
    rows = []
    for index, part in enumerate(("reset", f"{options.steps} steps")):
        upstream, simulator = (statistics.median(run[index] for run in runs) for runs in (theirs, ours))
        rows.append(
            {
                "part": part,
                "upstream, CPU s": round(upstream, 3),
                "simulator, CPU s": round(simulator, 3),
                "ratio": round(upstream / simulator, 2),
            }
        )
    whole = sum(map(sum, theirs)) / sum(map(sum, ours))
    rows.append({"part": "all episodes", "upstream, CPU s": round(sum(map(sum, theirs)), 2)})
    rows[-1] |= {"simulator, CPU s": round(sum(map(sum, ours)), 2), "ratio": round(whole, 2)}
    return {
        "title": "LIBERO without a GPU: upstream's environment and the engine's simulator",
        "setting": f"{SUITE}/{NUMBER}, {options.episodes} episodes of {options.steps} steps, two cameras of "
        f"{options.image_size} pixels, looking after every {options.chunk} actions; medians, the last row sums.",
        "times": rows,
        "observations equal to the bit": f"{num_equal} of {num_looked}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--chunk", type=int, default=10)
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "libero_simulator")
    parser.add_argument("--allow-dirty", action="store_true")
    options = parser.parse_args()
    require_quotable(options.allow_dirty)
    write_benchmark(options.output, measure(options), options.allow_dirty)
    print(options.output.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
