# SPDX-License-Identifier: Apache-2.0
"""A worker's environments in a process of their own, which may crash or hang without taking the worker along.

RLinf's environment worker stands in groups and channels that only its own process can be part of, so it can't be
started again alone; its simulators can. `RemoteSimulators` looks to the worker like their environment class.

One request is under way at a time.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from embodix.simulation.process import SimulatorProcess


class SimulatorLostError(RuntimeError):
    """The process of simulators crashed, hung, or a simulator raised; the message says which and doing what."""


@dataclass(frozen=True)
class SimulatorDeadlines:
    """Seconds that an answer of the simulators may take.

    Attributes:
        step_s: of a chunk step, which may begin episodes.
        reset_s: of a reset of all environments, and of building them.
    """

    step_s: float
    reset_s: float


class RemoteSimulators:
    """The environments of one worker in one process.

    Calls block; they belong into a thread. The process is started by the first `build` from the thread that calls it
    and ends with that thread, whatever ends it.

    Args:
        name: of the worker, for messages.
        deadlines: of answers.
    """

    def __init__(self, name: str, deadlines: SimulatorDeadlines) -> None:
        self._name, self._deadlines = name, deadlines
        self._builds: list[tuple[Callable[..., Any], dict[str, Any]]] = []
        self._progress: list[Any] = []
        self._process: SimulatorProcess | None = None
        self.life = 0  # how often the process has been lost

    @property
    def pid(self) -> int | None:
        """Of the process, if it runs."""
        return None if self._process is None else self._process.pid

    def build(self, factory: Callable[..., Any], **arguments: Any) -> RemoteEnvironment:
        """Have ``factory(**arguments)`` made in the process; both travel by pickle.

        Raises:
            SimulatorLostError: it can't be made.
        """
        if self._process is None:
            self._process = SimulatorProcess(_Served)
        self._builds.append((factory, arguments))
        self._progress.append(self._ask("build", (factory, arguments, None), self._deadlines.reset_s))
        return RemoteEnvironment(self, len(self._builds) - 1)

    def call(self, number: int, method: str, *args: Any, attributes: dict[str, Any] | None = None) -> Any:
        """The answer of an environment's method, with `attributes` set before.

        Raises:
            SimulatorLostError: no answer; the process is gone then, `restart` makes another.
        """
        limit_s = self._deadlines.reset_s if method == "reset" else self._deadlines.step_s
        answer, self._progress[number] = self._ask("call", (number, method, args, attributes or {}), limit_s)
        return answer

    def progress(self, number: int) -> Any:
        """Of an environment, at its last answer."""
        return self._progress[number]

    def restart(self) -> None:
        """A process with the same environments, which go on with other episodes than those that were begun.

        Raises:
            SimulatorLostError: they can't be made again.
        """
        self.close()
        self._process = SimulatorProcess(_Served)
        for number, build in enumerate(self._builds):
            self._progress[number] = self._ask("build", (*build, self._progress[number]), self._deadlines.reset_s)

    def kill(self) -> None:
        """End the process, whatever it does; a call that waits for it fails. May come from any thread."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process when nothing waits for it."""
        self.kill()
        if self._process is not None:
            self._process.hang_up()
        self._process = None

    def _ask(self, kind: str, request: tuple[Any, ...], limit_s: float) -> Any:
        doing = f"{request[1]} of its environment {request[0]}" if kind == "call" else "building an environment"
        process = self._process
        if process is None:
            raise SimulatorLostError(f"The simulators of {self._name} do not run ({doing}).")
        try:
            process.send((kind, request))
            failure, answer = process.receive(limit_s)
        except TimeoutError:
            raise self._lost(f"hung: no answer to {doing} within {limit_s:g} s") from None
        except (EOFError, OSError):
            raise self._lost(f"crashed at {doing}, exit code {process.exit_code()}") from None
        if failure is not None:
            raise self._lost(f"raised at {doing}:\n{failure}")
        return answer

    def _lost(self, what: str) -> SimulatorLostError:
        self.close()
        self.life += 1
        return SimulatorLostError(f"The simulators of {self._name} {what}")


class RemoteEnvironment:
    """RLinf's interface of an environment that is in a process of `RemoteSimulators`."""

    is_start = True

    def __init__(self, simulators: RemoteSimulators, number: int) -> None:
        self._simulators, self._number = simulators, number

    def reset(self) -> Any:
        return self._simulators.call(self._number, "reset", attributes={"is_start": self.is_start})

    def chunk_step(self, chunk_actions: Any) -> Any:
        return self._simulators.call(self._number, "chunk_step", chunk_actions)

    def update_reset_state_ids(self) -> None:
        self._simulators.call(self._number, "update_reset_state_ids")

    def progress(self) -> Any:
        return self._simulators.progress(self._number)

    def go_on(self, progress: Any) -> None:
        self._simulators.call(self._number, "go_on", progress)


class _Served:
    """Environments and what is done with them, in their process."""

    def __init__(self) -> None:
        self._environments: list[Any] = []

    def answer(self, message: tuple[str, tuple[Any, ...]]) -> Iterator[tuple[str | None, Any]]:
        """Of one request: what it raised, or what came of it."""
        kind, request = message
        try:
            yield None, getattr(self, f"_{kind}")(*request)
        except Exception:  # whatever a simulator raises is told to the worker, which decides
            yield traceback.format_exc(), None

    def close(self) -> None:
        """Nothing to do: the environments end with their process."""

    def _build(self, factory: Callable[..., Any], arguments: dict[str, Any], progress: Any) -> Any:
        environment = factory(**arguments)
        if progress is not None:
            environment.go_on(progress)
        self._environments.append(environment)
        return environment.progress()

    def _call(self, number: int, method: str, args: tuple[Any, ...], attributes: dict[str, Any]) -> Any:
        environment = self._environments[number]
        for name, value in attributes.items():
            setattr(environment, name, value)
        answer = getattr(environment, method)(*args)
        return answer, environment.progress()
