# SPDX-License-Identifier: Apache-2.0
"""Give RLinf's workers a torch platform where there is no accelerator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from embodix.patching import Patch, replace_attribute

PATCH = Patch(
    name="rlinf_cpu_platform",
    target="rlinf.scheduler.hardware.accelerators.accelerator.AcceleratorUtil.get_torch_platform, get_device_type",
    requires={"rlinf": ">=0.3.0,<0.3.1"},
    symptom="a worker on a machine without accelerator has Worker.torch_platform None, and ends at its first use.",
    upstream="none known: RLinf supports nodes without accelerator for environments only",
    why_safe="only what RLinf has for no accelerator, None, is replaced; collectives stay on gloo",
    remove_when="RLinf has a platform of its own for AcceleratorType.NO_ACCEL",
)


class CpuStream(contextlib.nullcontext[None]):
    """What is done on it is done when the call returns."""

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back."""


class CpuPlatform:
    """The part of ``torch.cuda`` that RLinf's embodied workers use, on the CPU.

    ``is_available`` is False: it asks for an accelerator, and upstream's CPU-only branches depend on it.
    """

    Stream = CpuStream
    Event = contextlib.nullcontext

    @staticmethod
    def is_available() -> bool:
        return False

    @staticmethod
    def is_initialized() -> bool:
        return True  # it needs no initialisation

    @staticmethod
    def device_count() -> int:
        return 0

    @staticmethod
    def current_device() -> Any:
        import torch

        return torch.device("cpu")

    @staticmethod
    def current_stream(device: Any = None) -> CpuStream:
        return CpuStream()

    @staticmethod
    def stream(stream: Any) -> Any:
        return contextlib.nullcontext(stream)

    @staticmethod
    def set_device(device: Any) -> None:
        """There is one."""

    @staticmethod
    def synchronize(device: Any = None) -> None:
        """Nothing runs behind the caller's back."""

    @staticmethod
    def empty_cache() -> None:
        """The CPU allocator keeps no cache."""

    @staticmethod
    def ipc_collect() -> None:
        """Nothing is shared by device handles."""

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        return 0

    @staticmethod
    def memory_reserved(device: Any = None) -> int:
        return 0


def apply() -> Callable[[], None]:
    """Patch this process; returns the undo."""
    # The collectives read the device's type while their module is imported, and "cpu" would send them to an
    # accelerator's library: the import comes first.
    import rlinf.scheduler.collective.collective_group  # noqa: F401
    from rlinf.scheduler.hardware.accelerators.accelerator import AcceleratorType, AcceleratorUtil
    from rlinf.scheduler.worker.worker import Worker

    platform, device_type = AcceleratorUtil.get_torch_platform, AcceleratorUtil.get_device_type

    def get_torch_platform(accelerator_type: Any) -> Any:
        return CpuPlatform if accelerator_type == AcceleratorType.NO_ACCEL else platform(accelerator_type)

    def get_device_type(accelerator_type: Any) -> Any:
        return "cpu" if accelerator_type == AcceleratorType.NO_ACCEL else device_type(accelerator_type)

    undos = [
        replace_attribute(AcceleratorUtil, "get_torch_platform", staticmethod(get_torch_platform)),
        replace_attribute(AcceleratorUtil, "get_device_type", staticmethod(get_device_type)),
    ]
    if Worker.accelerator_type == AcceleratorType.NO_ACCEL:
        undos.append(replace_attribute(Worker, "torch_platform", CpuPlatform))
        undos.append(replace_attribute(Worker, "torch_device_type", "cpu"))

    def undo() -> None:
        for restore in reversed(undos):
            restore()

    return undo
