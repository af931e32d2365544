# SPDX-License-Identifier: Apache-2.0
"""Let RLinf normalise advantages where there is no CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embodix.patching import Patch, replace_attribute

PATCH = Patch(
    name="rlinf_masked_normalization",
    target="rlinf.utils.distributed.masked_normalization",
    requires={"rlinf": ">=0.3.0,<0.3.1"},
    symptom="it calls .cuda() on its arguments, so asynchronous PPO with normalised advantages needs a CUDA device.",
    upstream="none known; the synchronous path normalises where the tensors are",
    why_safe="upstream's function runs unchanged, on tensors whose .cuda() stays; workers with CUDA call it as it is",
    remove_when="masked_normalization keeps the device of its argument",
)


def apply() -> Callable[[], None]:
    """Patch the function and its name in the asynchronous actor's module; returns the undo."""
    import torch
    from rlinf.scheduler import Worker
    from rlinf.utils import distributed
    from rlinf.workers.actor import async_ppo_fsdp_worker

    upstream = distributed.masked_normalization

    class HostTensor(torch.Tensor):
        def cuda(self, *args: Any, **kwargs: Any) -> HostTensor:
            return self

    def masked_normalization(x: torch.Tensor, mask: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if Worker.torch_device_type == "cuda":
            return upstream(x, mask, *args, **kwargs)
        host_mask = None if mask is None else mask.as_subclass(HostTensor)
        return upstream(x.as_subclass(HostTensor), host_mask, *args, **kwargs).as_subclass(torch.Tensor)

    undos = [
        replace_attribute(owner, "masked_normalization", masked_normalization)
        for owner in (distributed, async_ppo_fsdp_worker)
    ]

    def undo() -> None:
        for restore in undos:
            restore()

    return undo
