# SPDX-License-Identifier: Apache-2.0
"""Run several upstream training loops in one process, one step at a time in turn.

Each loop is upstream's own ``train()`` in a thread of its own; a turnstile lets exactly one of them run, and swaps
the process-wide random state when the turn changes, so that each sees the stream it would see alone. Alternating
A B A B makes the drift of the machine fall on all alike.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from lerobot.utils.random_utils import get_rng_state, set_rng_state


class AbandonedError(RuntimeError):
    """Raised in a loop whose neighbour failed, so that it ends too."""


class Turnstile:
    """Lets one of ``num_runners`` threads run at a time, in a fixed cycle.

    The random state of python, numpy and torch belongs to the runner whose turn it is.
    """

    def __init__(self, num_runners: int) -> None:
        self._condition = threading.Condition()
        self._turn = 0
        self._active = [True] * num_runners
        self._random_states: list[dict[str, object] | None] = [None] * num_runners
        self._failed = False

    def enter(self, runner: int) -> None:
        """Wait for the first turn."""
        with self._condition:
            self._wait_for_turn(runner)

    def pass_on(self, runner: int) -> None:
        """Let the next runner go and wait for the turn to come back."""
        with self._condition:
            self._random_states[runner] = get_rng_state()
            self._advance()
            self._wait_for_turn(runner)

    def leave(self, runner: int, failed: bool) -> None:
        """Take this runner out of the cycle; a failure ends the others at their next turn."""
        with self._condition:
            self._active[runner] = False
            self._failed = self._failed or failed
            if self._turn == runner:
                self._advance()
            self._condition.notify_all()

    def _advance(self) -> None:
        """Give the turn to the next active runner, which is the same one when it is the last."""
        num_runners = len(self._active)
        for offset in range(1, num_runners + 1):
            candidate = (self._turn + offset) % num_runners
            if self._active[candidate]:
                self._turn = candidate
                break
        self._condition.notify_all()

    def _wait_for_turn(self, runner: int) -> None:
        self._condition.wait_for(lambda: self._failed or self._turn == runner)
        if self._failed:
            raise AbandonedError("another variant failed; this one was ended with it")
        state = self._random_states[runner]
        if state is not None:
            set_rng_state(state)


def run_in_turns(loops: Sequence[Callable[[Callable[[], None]], None]]) -> None:
    """Run every loop to its end, one step of each in turn.

    Args:
        loops: each is called with a function that it must call between two of its steps.

    Raises:
        Exception: the first failure of any loop, after all have ended.
    """
    turnstile = Turnstile(len(loops))
    failures: list[BaseException] = []

    def run(index: int) -> None:
        failed = True
        try:
            turnstile.enter(index)
            loops[index](lambda: turnstile.pass_on(index))
            failed = False
        except AbandonedError:
            pass  # the failure that caused it is reported
        except BaseException as error:
            failures.append(error)
        finally:
            turnstile.leave(index, failed)

    threads = [threading.Thread(target=run, args=(i,), name=f"variant-{i}", daemon=True) for i in range(len(loops))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
