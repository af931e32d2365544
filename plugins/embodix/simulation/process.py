# SPDX-License-Identifier: Apache-2.0
"""Simulators in a process of their own, which may crash or hang without taking anything else along.

`SimulatorProcess` is one such process: how it is started, what passes between it and its owner, and how it ends. What
is asked there, when its answer is late and what is done after a loss is its owner's to know: evaluation repeats an
episode from its seed and its actions, training from rollouts builds the environments again and begins other ones.

Importing this module imports neither torch nor LeRobot: the process does, and starts faster without them.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol

PATIENCE_S = 5.0  # for a process that ends to be gone
SERVE = "import sys; from embodix.simulation.process import serve; serve(*map(int, sys.argv[1:]))"
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


class Servant(Protocol):
    """What works in the process; an exception that leaves it ends the process."""

    def answer(self, message: Any) -> Iterator[Any]:
        """The answers to a message, each sent as soon as it is there."""

    def close(self) -> None:
        """Free everything, when the owner has hung up."""


class SimulatorProcess:
    """A process that serves the thread that made it, and ends with that thread, whatever ends it.

    It is a fresh interpreter: OpenGL contexts do not survive a fork, and `multiprocessing` would import the owner's
    main module, which tends to import torch.

    Args:
        make_servant: makes what works there, from a module that both can import; travels by pickle.
    """

    def __init__(self, make_servant: Callable[[], Servant]) -> None:
        first_messages = [encode(sys.path), encode(make_servant)]
        self._connection, theirs = Pipe()
        command = [sys.executable, "-P", "-c", SERVE, str(theirs.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        with suppress(BrokenPipeError):  # a process that died at once is found out by the first message
            for message in first_messages:
                self._connection.send_bytes(message)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """For `multiprocessing.connection.wait`, which tells when there is something to receive."""
        return self._connection.fileno()

    def send(self, message: Any) -> None:
        """Hand a message over.

        Raises:
            OSError: the process is gone.
        """
        self._connection.send_bytes(encode(message))

    def receive(self, limit_s: float | None = None) -> Any:
        """The next answer.

        Raises:
            TimeoutError: none came within `limit_s`.
            EOFError, OSError: the process is gone.
        """
        if limit_s is not None and not self._connection.poll(limit_s):
            raise TimeoutError(f"no answer within {limit_s:g} s")
        return pickle.loads(self._connection.recv_bytes())

    def exit_code(self) -> int:
        """How the process ended, which it may just be doing."""
        return self._wait(PATIENCE_S)

    def kill(self) -> None:
        """End the process, whatever it does; who waits for its answer hears that it is gone. From any thread."""
        self._process.kill()
        self._process.wait(PATIENCE_S)

    def hang_up(self) -> None:
        """Close the connection, upon which the process closes its simulators and ends."""
        self._connection.close()

    def end(self, patience_s: float) -> None:
        """Hang up and wait for the end; kill what does not come to it."""
        self.hang_up()
        self._wait(patience_s)

    def _wait(self, patience_s: float) -> int:
        try:
            return self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class _TensorsAsArrays(pickle.Pickler):
    """Tensors travel as the bytes of arrays: PyTorch's own way shares memory that both processes must keep alive."""

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


def serve(file_descriptor: int, parent: int) -> None:
    """The main function of the process: answer messages until the other end of the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to answer
    _die_with(parent)
    connection: Connection[Any, Any] = Connection(file_descriptor)
    sys.path[:] = pickle.loads(connection.recv_bytes())
    servant: Servant = pickle.loads(connection.recv_bytes())()
    try:
        for message in _messages(connection):
            for answer in servant.answer(message):
                connection.send_bytes(encode(answer))
    except BrokenPipeError:  # the other end was closed meanwhile: nobody wants the answer
        return
    finally:
        servant.close()


def _messages(connection: Connection[Any, Any]) -> Iterator[Any]:
    while True:
        try:
            received = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        yield pickle.loads(received)


def _die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends: one that hangs would not notice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)
