# SPDX-License-Identifier: Apache-2.0
"""Run a training step on torch's meta device, where nothing has values, and count its operations and its memory.

Attention is counted as the products it stands for and keeps its inputs and output, as a fused kernel does. Activations
are all storages alive at the highest moment of the step, without parameters, their gradients and the batch.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from embodix.attention.segments import Segments
from embodix.contracts import StepUse
from embodix.costs.operations import run_operation
from embodix.patching import replace_attribute
from embodix.policies.units import UNIT_CALL, enter_by

_READS = {getattr(Tensor, name) for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__")}
_AUTOCAST = {F.linear, F.conv2d, torch.matmul, torch.bmm, torch.baddbmm, Tensor.matmul, Tensor.__matmul__}


@dataclass(frozen=True)
class CountedStep:
    """One training step of a batch.

    Attributes:
        forward, backward: floating-point operations of matrix products, convolutions and attention.
        activations: bytes at the highest moment, beside parameters and gradients.
        kept: bytes that the forward pass leaves for the backward pass.
        gradients: bytes of the parameters that get a gradient.
        use: what the step enters and trains.
    """

    forward: int
    backward: int
    activations: int
    kept: int
    gradients: int
    use: StepUse


def count_step(
    policy: nn.Module,
    batch: Mapping[str, Any],
    attention: CountedAttention,
    host_keys: tuple[str, ...] = (),
    entries: Mapping[str, nn.Module] | None = None,
) -> CountedStep:
    """Forward and backward pass of a policy that is on the meta device.

    Args:
        batch: preprocessed; masks that decide on shapes may be on the CPU.
        attention: what an installed fast path attends with; it stands in for torch's own too.
        host_keys: tensors that stay there although the policy moves them, because it asks for their values.
        entries: of units that are gathered together where parameters are sharded, by path.
    """
    tally, attention.flops = _Tally(policy, batch), 0
    on_host = {id(batch[key]) for key in host_keys if key in batch}
    with _meta_host(attention, on_host), watched_entries(entries or {}) as entered, tally:
        loss = policy(dict(batch))[0]
        forward = tally.flops + attention.flops
        kept = tally.live()
        loss.backward()
    backward = tally.flops + attention.flops - forward
    tally.close()
    use = StepUse(frozenset(name for name, p in policy.named_parameters() if p in tally.trained), entered)
    return CountedStep(forward, backward, tally.peak(), kept, tally.gradients, use)


@contextmanager
def watched_entries(entries: Mapping[str, nn.Module]) -> Iterator[dict[str, bool]]:
    """Note which entries are called, and whether what they return asks for a backward pass."""
    entered: dict[str, bool] = {}

    def note(path: str, out: Any) -> None:
        returned = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(out))
        entered[path] = entered.get(path, False) or returned

    with ExitStack() as stack:
        for path, entry in entries.items():
            stack.callback(entry.register_forward_hook(lambda *call, path=path: note(path, call[-1])).remove)
            run = getattr(entry, enter_by(entry))
            stack.callback(entry.__dict__.pop, UNIT_CALL)
            entry.__dict__[UNIT_CALL] = functools.partial(_noted, run, functools.partial(note, path))
        yield entered


def _noted(run: Callable[..., Any], note: Callable[[Any], None], function: Callable[..., Any], *given: Any) -> Any:
    out = run(function, *given)
    note(out)
    return out


class CountedAttention:
    """An attention backend that computes nothing and counts its products: two forward, four backward."""

    name = "counted"

    def __init__(self) -> None:
        self.flops = 0

    def probe(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None

    def __call__(
        self,
        q_NHD: Tensor,
        k_MGD: Tensor,
        v_MGD: Tensor,
        segments: Segments,
        *,
        causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        pairs = sum(q * k for q, k in zip(segments.lengths_q, segments.lengths_k, strict=True))
        return self.attend(q_NHD, k_MGD, v_MGD, 2 * pairs * q_NHD.shape[1] * q_NHD.shape[2])

    def padded(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """In the place of torch's ``scaled_dot_product_attention``."""
        return self.attend(query, key, value, 2 * query.numel() * key.shape[-2])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, product: int) -> Tensor:
        out: Tensor = _Attention.apply(self, product, query, key, value)
        return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tally: CountedAttention, product: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        tally.flops += 2 * product
        ctx.tally, ctx.product = tally, product
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.tally.flops += 4 * ctx.product
        query, key, value, _ = ctx.saved_tensors
        return None, None, *(torch.empty_like(tensor) for tensor in (query, key, value))


class _Tally(TorchDispatchMode):
    """Floating-point operations, and bytes of storages on the meta device in the order in which they come and go."""

    def __init__(self, policy: nn.Module, batch: Mapping[str, Any]) -> None:
        super().__init__()
        parameters = list(policy.parameters())
        given = [t for t in (*parameters, *policy.buffers(), *batch.values()) if isinstance(t, Tensor)]
        self._numbers = weakref.WeakKeyDictionary(dict.fromkeys((t.untyped_storage() for t in given), 0))
        self._events: list[tuple[int, int]] = []
        self._sizes = [0]
        self._gradient_numbers: set[int] = set()
        self.flops = self.gradients = 0
        self.trained: set[Tensor] = set()
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._hooks = [p.register_hook(self._note_gradient) for p in trained]
        self._hooks += [p.register_post_accumulate_grad_hook(self._drop_gradient) for p in trained]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, flops = run_operation(func, args, kwargs or {})
        self.flops += flops
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                self._note(tensor.untyped_storage())
        return out

    def live(self) -> int:
        """Bytes that are alive now."""
        return sum(sign * self._sizes[number] for number, sign in self._events)

    def peak(self) -> int:
        """Bytes at the highest moment; a gradient that is handed to its parameter counts there."""
        live = highest = 0
        for number, sign in self._events:
            if number not in self._gradient_numbers:
                live += sign * self._sizes[number]
                highest = max(highest, live)
        return highest

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage in self._numbers:
            return
        number = len(self._sizes)
        self._sizes.append(storage.nbytes())
        self._numbers[storage] = number
        self._events.append((number, 1))
        weakref.finalize(storage, self._events.append, (number, -1))

    def _note_gradient(self, gradient: Tensor) -> None:
        self._gradient_numbers.add(self._numbers.get(gradient.untyped_storage(), 0))

    def _drop_gradient(self, parameter: Tensor) -> None:
        self.gradients += parameter.numel() * parameter.element_size()
        self.trained.add(parameter)
        parameter.grad = None


class _HostReads(TorchFunctionMode):
    """Gives zeros where a policy reads values, and casts as autocast would, which the meta device does not know."""

    def __init__(self, kept: set[int]) -> None:
        super().__init__()
        self._kept = kept
        self.autocast: torch.dtype | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and args[0].device.type == "meta":
            return func(torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu"))
        if func is Tensor.to and id(args[0]) in self._kept:
            return args[0]
        if self.autocast is not None and func in _AUTOCAST:
            args, kwargs = tree_map(self._cast, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _cast(self, value: Any) -> Any:
        return value.to(self.autocast) if isinstance(value, Tensor) and value.is_floating_point() else value


@contextmanager
def _meta_host(attention: CountedAttention, kept: set[int]) -> Iterator[None]:
    """What a host's code needs on the meta device. Attention is replaced by name: modes do not reach recomputation."""
    reads = _HostReads(kept)
    autocast, is_enabled = torch.autocast, torch.is_autocast_enabled

    @contextmanager
    def cast(dtype: torch.dtype | None) -> Iterator[None]:
        before, reads.autocast = reads.autocast, dtype
        try:
            yield
        finally:
            reads.autocast = before

    def meta_autocast(device_type: str, dtype: Any = None, enabled: bool = True, **options: Any) -> Any:
        if device_type != "meta":
            return autocast(device_type, dtype, enabled, **options)
        return cast((dtype or torch.bfloat16) if enabled else None)

    def meta_enabled(device_type: str = "cuda") -> bool:
        return reads.autocast is not None if device_type == "meta" else is_enabled(device_type)

    with ExitStack() as stack:
        stack.callback(replace_attribute(F, "scaled_dot_product_attention", attention.padded))
        stack.callback(replace_attribute(torch, "autocast", meta_autocast))
        stack.callback(replace_attribute(torch, "is_autocast_enabled", meta_enabled))
        stack.enter_context(reads)
        yield
