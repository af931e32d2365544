# SPDX-License-Identifier: Apache-2.0
"""Which EGL device is which CUDA device: renderers count by EGL's order, which need not be CUDA's.

Extensions EGL_EXT_device_enumeration, EGL_EXT_device_query and EGL_NV_device_cuda of the Khronos registry.
"""

from __future__ import annotations

import ctypes
from typing import Any

LIBRARY = "libEGL.so.1"
CUDA_DEVICE = 0x323A  # EGL_CUDA_DEVICE_NV
MAX_DEVICES = 64


def cuda_of_egl() -> list[int | None]:
    """CUDA's number of each EGL device, None for one that is no CUDA device (a software renderer, say).

    CUDA's numbers are those of all devices of the machine; ``CUDA_VISIBLE_DEVICES`` does not change them.

    Raises:
        RuntimeError: EGL is not installed, or can't list its devices; the message has the reason.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise RuntimeError(f"{LIBRARY} is not installed ({error})") from error
    devices = _devices(library)
    ask = _function(library, "eglQueryDeviceAttribEXT", ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_ssize_t))
    return [_cuda_number(ask, device) for device in devices]


def _devices(library: Any) -> list[int]:
    """Handles, in EGL's order."""
    query = _function(
        library, "eglQueryDevicesEXT", ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int)
    )
    handles, number = (ctypes.c_void_p * MAX_DEVICES)(), ctypes.c_int(0)
    if not query(MAX_DEVICES, handles, ctypes.byref(number)):
        raise RuntimeError("EGL does not list its devices (eglQueryDevicesEXT failed)")
    return [handle for handle in handles[: number.value] if handle is not None]


def _cuda_number(ask: Any, device: int) -> int | None:
    value = ctypes.c_ssize_t(-1)
    return int(value.value) if ask(device, CUDA_DEVICE, ctypes.byref(value)) else None


def _function(library: Any, name: str, *arguments: Any) -> Any:
    """An extension's function.

    Raises:
        RuntimeError: this EGL does not have it.
    """
    library.eglGetProcAddress.restype = ctypes.c_void_p
    library.eglGetProcAddress.argtypes = [ctypes.c_char_p]
    address = library.eglGetProcAddress(name.encode())
    if not address:
        raise RuntimeError(f"EGL lacks {name}, so its devices can't be told apart")
    return ctypes.CFUNCTYPE(ctypes.c_uint, *arguments)(address)


def describe_egl_devices() -> str:
    """The map in words, for people: ``0 is CUDA 1, 1 is no CUDA device``, or why there is none."""
    try:
        found = cuda_of_egl()
    except RuntimeError as error:
        return f"not known: {error}"
    if not found:
        return "no device"
    return ", ".join(
        f"{egl} is {'no CUDA device' if cuda is None else f'CUDA {cuda}'}" for egl, cuda in enumerate(found)
    )
