# SPDX-License-Identifier: Apache-2.0
"""Simulators in a process of their own, which may crash or hang without taking anything else along.

RLinf's environment worker stands in groups and channels that only its own process can be part of, so it can't be
started again alone; its simulators can. `RemoteSimulators` looks to the worker like their environment class.

One request is under way at a time. Tensors travel as the bytes of arrays (`encode`): PyTorch's own way of sending them
between processes shares memory that both must keep alive.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

PATIENCE_S = 5.0  # for a killed process to be gone
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


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


class _TensorsAsArrays(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if (kind.__module__, kind.__name__) != ("torch", "Tensor"):
            return NotImplemented
        import torch  # it is there: a simulator without tensors does not wait for it

        if obj.device.type != "cpu" or obj.dtype is torch.bfloat16:
            return NotImplemented
        return torch.from_numpy, (obj.detach().contiguous().numpy(),)


def encode(message: Any) -> memoryview:
    """A message as bytes, for `pickle.loads`."""
    buffer = io.BytesIO()
    _TensorsAsArrays(buffer, protocol=5).dump(message)
    return buffer.getbuffer()


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
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
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
            self._start()
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
        self.kill()
        self._start()
        for number, build in enumerate(self._builds):
            self._progress[number] = self._ask("build", (*build, self._progress[number]), self._deadlines.reset_s)

    def kill(self) -> None:
        """End the process, whatever it does; a call that waits for it fails. May come from any thread."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait(PATIENCE_S)

    def close(self) -> None:
        """End the process when nothing waits for it."""
        self.kill()
        self._forget()

    def _start(self) -> None:
        self._forget()
        ours, theirs = Pipe()
        os.set_inheritable(theirs.fileno(), True)
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        self._pipe = ours

    def _forget(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        self._pipe = self._process = None

    def _ask(self, kind: str, request: tuple[Any, ...], limit_s: float) -> Any:
        doing = f"{request[1]} of its environment {request[0]}" if kind == "call" else "building an environment"
        if self._pipe is None:
            raise SimulatorLostError(f"The simulators of {self._name} do not run ({doing}).")
        try:
            self._pipe.send_bytes(encode((kind, request)))
            if not self._pipe.poll(limit_s):
                raise self._lost(f"hung: no answer to {doing} within {limit_s:g} s")
            failure, answer = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._lost(f"crashed at {doing}, exit code {self._exit_code()}") from None
        if failure is not None:
            raise self._lost(f"raised at {doing}:\n{failure}")
        return answer

    def _lost(self, what: str) -> SimulatorLostError:
        self.kill()
        self._forget()
        self.life += 1
        return SimulatorLostError(f"The simulators of {self._name} {what}")

    def _exit_code(self) -> int:
        """How the process ended, which it may just be doing."""
        assert self._process is not None
        try:
            return self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(PATIENCE_S)


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

    def build(self, factory: Callable[..., Any], arguments: dict[str, Any], progress: Any) -> Any:
        environment = factory(**arguments)
        if progress is not None:
            environment.go_on(progress)
        self._environments.append(environment)
        return environment.progress()

    def call(self, number: int, method: str, args: tuple[Any, ...], attributes: dict[str, Any]) -> Any:
        environment = self._environments[number]
        for name, value in attributes.items():
            setattr(environment, name, value)
        answer = getattr(environment, method)(*args)
        return answer, environment.progress()


def serve(pipe: Connection) -> None:
    """Answer requests until the other end is gone."""
    served = _Served()
    while True:
        try:
            kind, request = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        answered: tuple[str | None, Any]
        try:
            answered = (None, getattr(served, kind)(*request))
        except Exception:  # whatever a simulator raises is told to the worker, which decides
            answered = (traceback.format_exc(), None)
        pipe.send_bytes(encode(answered))


def _die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends: one that hangs would not notice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends its workers
    _die_with(int(sys.argv[2]))
    serve(Connection(int(sys.argv[1])))
