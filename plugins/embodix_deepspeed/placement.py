# SPDX-License-Identifier: Apache-2.0
"""A policy in place under DeepSpeed's engine; see ``embodix.contracts.Placement``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from embodix.contracts import PlacedBytes, RankLayout
from embodix.parallel.gradient_norm import scale_down, square_sum
from embodix.parallel.optimizer_state import named_optimizer_state, optimizer_bytes
from embodix_deepspeed.fragments import whole_shape
from embodix_deepspeed.library import load_deepspeed
from embodix_deepspeed.optimizer_parts import OptimizerParts, cut
from embodix_deepspeed.stepping import ZeroStep
from embodix_deepspeed.unread import KeptRanges, ReadParameters


class ZeroPlacement:
    """One of ZeRO's stages around upstream's optimizer, which stays the object and the arithmetic that it is.

    Args:
        policy: with its fast path in place.
        optimizer: torch's.
        stage: 1 cuts the optimizer's state, 2 gradients too, 3 parameters too.

    Raises:
        ValueError: parameters that are not float32.
    """

    def __init__(
        self, policy: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, layout: RankLayout, stage: int
    ) -> None:
        require_float32(policy, stage)
        self.layout, self.strategy, self.backend = layout, f"DeepSpeed ZeRO-{stage}", dist.get_backend()
        self._bare, self._stage, self._device = policy, stage, device
        self._total = sum(p.numel() * p.element_size() for p in policy.parameters())
        before = named_optimizer_state(policy, optimizer)
        optimizer.state.clear()
        self._deepspeed = load_deepspeed(device)
        self._mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        engine, self._zero, _, _ = self._deepspeed.initialize(
            model=policy, optimizer=optimizer, config=engine_settings(policy, stage)
        )
        self.policy = engine
        self.optimizer = ZeroStep(engine, optimizer, self._step_ended)
        self._trained = trained
        self._read, self._kept = ReadParameters(trained, elsewhere=stage == 3), KeptRanges(optimizer)
        self._parts = OptimizerParts(self._zero, optimizer, trained, self._mesh)
        self._client = optimizer
        engine.set_gradient_accumulation_boundary(True)
        if before:
            self.load_optimizer(before)

    def backward(self, loss: Tensor) -> None:
        self.policy.backward(loss)

    @contextmanager
    def _adding_up(self) -> Iterator[None]:
        self.policy.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.policy.set_gradient_accumulation_boundary(True)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._adding_up()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        read = self._read.agreed(self._device)
        self._kept.choose(self._zero, [p for name, p in self._trained.items() if name not in read])
        parts = [part for group in self._zero.averaged_gradients.values() for part in group or () if part.numel()]
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        if parts:
            square += square_sum(parts)
        dist.all_reduce(square)
        norm = square.sqrt().float()
        scale_down(parts, norm, max_norm)
        return norm

    def whole_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """Gradients by name, between backward and step; every rank must ask, and read on."""
        read = self._read.agreed(self._device)
        for name, parameter in self._trained.items():
            whole = self._deepspeed.utils.safe_get_full_grad(parameter)
            yield name, whole.detach().clone() if name in read else None

    def placed_bytes(self) -> PlacedBytes:
        cut_bytes = whole_bytes = 0
        parameter: Any
        for parameter in self._bare.parameters():
            if self._stage < 3 or getattr(parameter, "ds_persist", False):
                whole_bytes += whole_shape(parameter).numel() * parameter.element_size()
            else:
                cut_bytes += parameter.partition_numel() * parameter.element_size()
        masters = sum(flat.numel() * flat.element_size() for flat in self._parts.flats())
        return PlacedBytes(cut_bytes, whole_bytes, masters + optimizer_bytes(self._client), self._total)

    def state(self) -> dict[str, Any]:
        model = {name: self._cut_value(value) for name, value in self._bare.state_dict(keep_vars=True).items()}
        return {"model": model, "optimizer": dict(self._parts.named(self._read.ever))}

    def _cut_value(self, value: Tensor) -> Tensor:
        if not isinstance(value, nn.Parameter):
            return value
        if self._stage < 3:
            return cut(value, self._mesh)
        with self._deepspeed.zero.GatheredParameters([value]):
            return cut(value, self._mesh)

    def optimizer_template(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if name not in self._trained:
            raise ValueError(f"The optimizer's state names {name!r}, which is no trained parameter of this policy.")
        if not shape or whole_shape(self._trained[name]) != shape:
            return torch.empty(shape, dtype=dtype)  # a count of steps
        return cut(torch.empty(shape, dtype=dtype, device=self._device), self._mesh)

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        self._read.ever = self._parts.load(state)

    def release(self) -> None:
        self._read.release()
        self._kept.release()
        if dist.is_initialized():  # the engine exchanges as it ends, and accelerate ends the group with the run
            self.policy.destroy()

    def _step_ended(self) -> None:
        self._read.step_ended()
        if self._stage == 3:
            self._zero.grad_partitions_flat_buffer.zero_()  # a parameter unread in the next step has none


def require_float32(policy: nn.Module, stage: int) -> None:
    """
    Raises:
        ValueError: parameters in another dtype.
    """
    others = sorted({str(p.dtype) for p in policy.parameters() if p.dtype != torch.float32})
    if others:
        raise ValueError(
            f"parallel=zero{stage} steps float32 parameters; got some in {', '.join(others)}. Set "
            "policy.dtype=float32, or choose parallel=fsdp2."
        )


def engine_settings(policy: nn.Module, stage: int) -> dict[str, Any]:
    """DeepSpeed's config. Norms, whose gain is read past their call, are parameters of one dimension: from the size of
    the largest down all are kept whole, and the rest is given up after each module."""
    largest_vector = max((p.numel() for p in policy.parameters() if p.dim() < 2), default=0)
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": False}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": largest_vector, "stage3_max_reuse_distance": 0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
