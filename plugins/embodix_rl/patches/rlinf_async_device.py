# SPDX-License-Identifier: Apache-2.0
"""Let RLinf's asynchronous PPO actor train on whatever device it has."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from embodix.patching import Patch, replace_attribute

PATCH = Patch(
    name="rlinf_async_device",
    target="rlinf.workers.actor.async_ppo_fsdp_worker: torch.cuda and the device of put_tensor_device",
    requires={"rlinf": ">=0.3.0,<0.3.1"},
    symptom="AsyncPPOEmbodiedFSDPActor.run_training moves its batch to `cuda:0` and asks torch.cuda for its device.",
    upstream="still so in RLinf's main branch of August 2026; the synchronous actor asks Worker.torch_platform",
    why_safe="two names of that module only; on a CUDA worker they give what they gave",
    remove_when="the module uses self.device and Worker.torch_platform",
)


class _TorchOfTheWorker(ModuleType):
    """``torch`` with the worker's platform in place of ``torch.cuda``."""

    def __getattr__(self, name: str) -> Any:
        import torch

        if name != "cuda":
            return getattr(torch, name)
        from rlinf.scheduler import Worker

        return Worker.torch_platform


def apply() -> Callable[[], None]:
    """Patch the module's names; returns the undo."""
    from rlinf.scheduler import Worker
    from rlinf.workers.actor import async_ppo_fsdp_worker

    upstream = async_ppo_fsdp_worker.put_tensor_device

    def put_tensor_device(batch: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        if str(device).startswith("cuda") and Worker.torch_device_type != "cuda":
            device = Worker.torch_platform.current_device()
        return upstream(batch, device, *args, **kwargs)

    undo_torch = replace_attribute(async_ppo_fsdp_worker, "torch", _TorchOfTheWorker("torch"))
    undo_put = replace_attribute(async_ppo_fsdp_worker, "put_tensor_device", put_tensor_device)

    def undo() -> None:
        undo_put()
        undo_torch()

    return undo
