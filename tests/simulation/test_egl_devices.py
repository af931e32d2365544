# SPDX-License-Identifier: Apache-2.0
"""The map of EGL's devices to CUDA's, on this machine's own EGL, a made-up one, and none."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from embodix.simulation import egl_devices
from embodix.simulation.egl_devices import CUDA_DEVICE, cuda_of_egl, describe_egl_devices


def test_devices_of_this_machine_are_listed_or_it_is_said_why_not() -> None:
    try:
        found = cuda_of_egl()
    except RuntimeError as error:
        assert str(error) in describe_egl_devices()
    else:
        assert len(describe_egl_devices().split(", ")) == max(1, len(found))


class MadeUpEgl:
    """Two CUDA devices in the other order, and a software renderer."""

    numbers = (1, 0, None)

    def __init__(self) -> None:
        query = ctypes.CFUNCTYPE(
            ctypes.c_uint, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int)
        )
        ask = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_ssize_t))
        self._kept = {b"eglQueryDevicesEXT": query(self._list), b"eglQueryDeviceAttribEXT": ask(self._ask)}

    def address(self, name: bytes) -> int:
        return ctypes.cast(self._kept[name], ctypes.c_void_p).value or 0

    def _list(self, most: int, handles: Any, number: Any) -> int:
        for place in range(len(self.numbers)):
            handles[place] = 100 + place
        number[0] = len(self.numbers)
        return 1

    def _ask(self, handle: int, attribute: int, value: Any) -> int:
        assert attribute == CUDA_DEVICE
        cuda = self.numbers[handle - 100]
        if cuda is None:
            return 0
        value[0] = cuda
        return 1


def test_orders_that_differ_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egl_devices.ctypes, "CDLL", lambda name: _library())
    assert cuda_of_egl() == [1, 0, None]
    assert describe_egl_devices() == "0 is CUDA 1, 1 is CUDA 0, 2 is no CUDA device"


def _library() -> Any:
    """A library whose lookup is a plain function that takes attributes, as those of ctypes do."""
    made_up = MadeUpEgl()

    def lookup(name: bytes) -> int:
        return made_up.address(name)

    library = type("Library", (), {})()
    library.eglGetProcAddress = lookup
    library.kept = made_up
    return library


def test_a_machine_without_egl_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egl_devices, "LIBRARY", "libEGL_of_no_machine.so.9")
    assert "libEGL_of_no_machine.so.9 is not installed" in describe_egl_devices()
