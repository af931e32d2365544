# SPDX-License-Identifier: Apache-2.0
"""Choose an attention backend: the named one, or the first that can run and computes the right numbers.

Every backend is checked against dense fp32 attention with an explicit mask before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from embodix.attention.segments import Segments, dtype_problem
from embodix.contracts import AttentionBackend

# Largest relative error (Frobenius norm) that the self-check lets pass; bf16 itself costs about 4e-3.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}

BackendFactories = Mapping[str, Callable[[], AttentionBackend]]


def choose_backend(
    name: str, device: torch.device | str, dtype: torch.dtype, head_dim: int, candidates: BackendFactories
) -> AttentionBackend:
    """The backend called ``name``, or with ``auto`` the first that passes its probe and the self-check.

    Args:
        candidates: name -> zero-argument callable that makes the backend.

    Raises:
        ValueError: unknown name, the named backend can't run here, it fails the self-check, or none can run.
            The message has the reason and the backends that can run.
    """
    device = torch.device(device)
    problem = dtype_problem(dtype)
    if problem:
        raise ValueError(f"attention={name}: {problem}.")
    if name == "auto":
        return _first_that_works(device, dtype, head_dim, candidates)
    if name not in candidates:
        raise ValueError(f"attention={name} is unknown; known: auto, {', '.join(sorted(candidates))}.")
    backend = candidates[name]()
    reason = backend_problem(backend, device, dtype, head_dim)
    if reason:
        usable = usable_backends(device, dtype, head_dim, candidates)
        raise ValueError(
            f"attention={name} can't run on {device.type} in {dtype} with head_dim {head_dim}: {reason}. "
            f"Usable here: {', '.join(usable) or 'none'} (or attention=auto)."
        )
    return backend


def usable_backends(device: torch.device, dtype: torch.dtype, head_dim: int, candidates: BackendFactories) -> list[str]:
    """Names of the backends whose probe passes, best first."""
    return [n for n in by_preference(candidates) if candidates[n]().probe(device, dtype, head_dim) is None]


def by_preference(candidates: BackendFactories) -> list[str]:
    """Names in the order in which ``auto`` tries them: the lowest ``preference`` first, those without one last."""
    return sorted(candidates, key=lambda name: _place(candidates[name]))


def _place(make: Callable[[], AttentionBackend]) -> float:
    try:
        preference = getattr(make(), "preference", None)
    except Exception:  # a backend that can't be made says so when it is its turn
        preference = None
    return math.inf if preference is None else preference


def _first_that_works(
    device: torch.device, dtype: torch.dtype, head_dim: int, candidates: BackendFactories
) -> AttentionBackend:
    reasons = []
    for name in by_preference(candidates):
        backend = candidates[name]()
        reason = backend_problem(backend, device, dtype, head_dim)
        if reason is None:
            return backend
        reasons.append(f"{name}: {reason}")
    raise ValueError(f"attention=auto: no backend can run on {device.type} in {dtype}. " + "; ".join(reasons))


def backend_problem(backend: AttentionBackend, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why a backend can't be used (its probe's reason, or a self-check that disagrees), or None."""
    reason = backend.probe(device, dtype, head_dim)
    if reason or device.type == "meta":
        return reason
    try:
        error = self_check_error(backend, device, dtype, head_dim)
    except Exception as failure:
        # A kernel that probes well may still refuse this machine; what it says becomes the reason.
        return f"its first call failed: {type(failure).__name__}: {failure}"
    if not error <= TOLERANCE[dtype]:
        return f"its self-check is off by {error:.2g} (relative), more than {TOLERANCE[dtype]:.0e}"
    return None


def self_check_error(backend: AttentionBackend, device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    """Largest relative error of output and gradients on 64 tokens in two segments, against fp32."""
    segments = Segments.from_lengths((40, 24), (44, 20), device)
    generator = torch.Generator().manual_seed(0)

    def draw(num_heads: int) -> Tensor:
        values = torch.randn(64, num_heads, head_dim, generator=generator)
        return values.to(device=device, dtype=dtype).requires_grad_()

    q_NHD, k_MGD, v_MGD, slope_NHD = draw(8), draw(1), draw(1), draw(8).detach()
    with torch.enable_grad():
        results = [
            _output_and_gradients(call, (q_NHD, k_MGD, v_MGD), slope_NHD, segments)
            for call in (backend, reference_attention)
        ]
    errors = [_relative_error(got, wanted) for got, wanted in zip(*results, strict=True)]
    return max(errors)


def _output_and_gradients(
    call: Callable[..., Tensor], inputs: tuple[Tensor, Tensor, Tensor], slope_NHD: Tensor, segments: Segments
) -> list[Tensor]:
    output_NHD = call(*inputs, segments)
    gradients = torch.autograd.grad(output_NHD, inputs, slope_NHD.to(output_NHD.dtype))
    return [output_NHD, *gradients]


def _relative_error(got: Tensor, wanted: Tensor) -> float:
    difference = (got.detach().float() - wanted.detach().float()).norm()
    return float(difference / wanted.detach().float().norm())


def visible_keys(segments: Segments, *, causal: bool, device: torch.device) -> Tensor:
    """Bool ``[N, M]``: which packed key each packed query may see."""
    num_q, num_k = sum(segments.lengths_q), sum(segments.lengths_k)
    visible = torch.zeros(num_q, num_k, dtype=torch.bool, device=device)
    start_q = start_k = 0
    for length_q, length_k in zip(segments.lengths_q, segments.lengths_k, strict=True):
        block = torch.ones(length_q, length_k, dtype=torch.bool, device=device)
        if causal:
            block = block.tril(diagonal=length_k - length_q)
        visible[start_q : start_q + length_q, start_k : start_k + length_k] = block
        start_q, start_k = start_q + length_q, start_k + length_k
    return visible


def reference_attention(
    q_NHD: Tensor,
    k_MGD: Tensor,
    v_MGD: Tensor,
    segments: Segments,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """fp32 attention over the whole packed batch with a dense mask, ``[N, H, D]``; rows that see no key are 0."""
    group = q_NHD.shape[1] // k_MGD.shape[1]
    q_HND = q_NHD.float().transpose(0, 1)
    k_HMD = k_MGD.float().transpose(0, 1).repeat_interleave(group, dim=0)
    v_HMD = v_MGD.float().transpose(0, 1).repeat_interleave(group, dim=0)
    visible = visible_keys(segments, causal=causal, device=q_NHD.device)
    scores = q_HND @ k_HMD.transpose(1, 2) * (q_NHD.shape[-1] ** -0.5 if scale is None else scale)
    lowest = torch.finfo(torch.float32).min
    weights = torch.softmax(scores.masked_fill(~visible, lowest), dim=-1).masked_fill(~visible, 0.0)
    return (weights @ v_HMD).transpose(0, 1)
