# SPDX-License-Identifier: Apache-2.0
"""Loops in turns: strict alternation, separate random streams, failures that end everyone."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from lerobot.utils.random_utils import set_seed

from embodix.training.lockstep import run_in_turns

Loop = Callable[[Callable[[], None]], None]


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def drawing_loop(seed: int, num_steps: int, seen: list[tuple[float, float, float]]) -> Loop:
    def loop(pass_on: Callable[[], None]) -> None:
        set_seed(seed)
        for _ in range(num_steps):
            pass_on()
            seen.append(draw())

    return loop


def test_loops_alternate_step_by_step() -> None:
    order: list[str] = []

    def loop(name: str, num_steps: int) -> Loop:
        def steps(pass_on: Callable[[], None]) -> None:
            for _ in range(num_steps):
                pass_on()
                order.append(name)

        return steps

    run_in_turns([loop("a", 4), loop("b", 4), loop("c", 2)])
    assert "".join(order) == "abcabcabab"


def test_each_loop_sees_the_random_stream_it_would_see_alone() -> None:
    together: list[list[tuple[float, float, float]]] = [[], []]
    run_in_turns([drawing_loop(1, 5, together[0]), drawing_loop(2, 7, together[1])])
    for seed, num_steps, seen in ((1, 5, together[0]), (2, 7, together[1])):
        set_seed(seed)
        alone = [draw() for _ in range(num_steps)]
        assert seen == alone
    assert together[0][0] != together[1][0], "two seeds must differ, or the test proves nothing"


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_ends_every_loop_and_is_raised(failing: int) -> None:
    steps = [0, 0]

    def loop(index: int) -> Loop:
        def run(pass_on: Callable[[], None]) -> None:
            while True:
                pass_on()
                steps[index] += 1
                if index == failing and steps[index] == 3:
                    raise OSError("disk full")

        return run

    with pytest.raises(OSError, match="disk full"):
        run_in_turns([loop(0), loop(1)])
    assert steps[failing] == 3
    assert steps[1 - failing] <= 3


def test_a_loop_that_ends_early_leaves_the_others_running() -> None:
    seen: list[list[tuple[float, float, float]]] = [[], []]
    run_in_turns([drawing_loop(3, 1, seen[0]), drawing_loop(3, 6, seen[1])])
    assert len(seen[0]) == 1
    assert len(seen[1]) == 6
    assert seen[0][0] == seen[1][0]
