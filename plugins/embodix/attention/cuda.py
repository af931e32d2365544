# SPDX-License-Identifier: Apache-2.0
"""Variable-length attention kernels for CUDA, each behind a probe that says why it can't run.

The libraries are imported on first use. Blind rows (queries without keys) are set to 0 here, whatever a kernel does.

Shape suffixes: N packed queries, M packed keys, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from embodix.attention.segments import Segments, dtype_problem, require_packed

AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)


def cuda_problem(device: torch.device, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Why a half-precision CUDA kernel can't run on ``device``, or None."""
    if device.type != "cuda":
        return f"needs a CUDA device, got {device.type}"
    if not torch.cuda.is_available():
        return "needs a CUDA device, and torch sees none"
    found = torch.cuda.get_device_capability(device)
    if found < capability:
        wanted = ".".join(map(str, capability))
        return f"needs compute capability {wanted} or higher, got {found[0]}.{found[1]}"
    if dtype != torch.bfloat16:
        return dtype_problem(dtype) or f"computes in bfloat16 only, got {dtype}"
    return None


def import_problem(module: str, attribute: str, package: str) -> str | None:
    """Why ``module.attribute`` can't be used, or None. A broken binary counts, whatever it raises."""
    try:
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed: pip install '{package}'"
        getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:
        return f"{package} is not installed: pip install '{package}'"
    except Exception as error:
        return f"{package} is installed but can't be imported: {type(error).__name__}: {error}"
    return None


def zero_blind_rows(out_NHD: Tensor, segments: Segments, *, causal: bool) -> Tensor:
    """The output with 0 in rows that may see no key; untouched when there are none."""
    blind = [
        max(0, length_q - length_k) if causal else (length_q if length_k == 0 else 0)
        for length_q, length_k in zip(segments.lengths_q, segments.lengths_k, strict=True)
    ]
    if not any(blind):
        return out_NHD
    keep_N = torch.ones(out_NHD.shape[0], dtype=torch.bool)
    start = 0
    for length_q, num_blind in zip(segments.lengths_q, blind, strict=True):
        keep_N[start : start + num_blind] = False
        start += length_q
    return torch.where(keep_N.to(out_NHD.device)[:, None, None], out_NHD, torch.zeros_like(out_NHD))


class _FlashVarlen:
    """The call that flash-attn 2 and 4 share."""

    name: str
    module: str
    package: str
    capability: tuple[int, int]
    max_head_dim = 256

    def probe(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        problem = cuda_problem(device, dtype, self.capability)
        if problem is None and (head_dim > self.max_head_dim or head_dim % 8):
            problem = f"takes head_dim up to {self.max_head_dim} in steps of 8, got {head_dim}"
        return problem or import_problem(self.module, "flash_attn_varlen_func", self.package)

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
        require_packed(q_NHD, k_MGD, v_MGD, segments)
        kernel: Callable[..., Any] = importlib.import_module(self.module).flash_attn_varlen_func
        result = kernel(
            q_NHD,
            k_MGD,
            v_MGD,
            cu_seqlens_q=segments.cu_seqlens_q,
            cu_seqlens_k=segments.cu_seqlens_k,
            max_seqlen_q=segments.max_q,
            max_seqlen_k=segments.max_k,
            softmax_scale=scale,
            causal=causal,
        )
        # flash-attn-4 returns (output, log-sum-exp), flash-attn 2 the output alone.
        out_NHD: Tensor = result[0] if isinstance(result, tuple) else result
        return zero_blind_rows(out_NHD, segments, causal=causal)


class FlashAttention2(_FlashVarlen):
    """``flash_attn.flash_attn_varlen_func`` (Dao, 2023): grouped heads native, head_dim to 256."""

    name = "flash_attn_2"
    preference = 10
    module = "flash_attn"
    package = "flash-attn>=2.8,<3"
    capability = AMPERE


class FlashAttention4(_FlashVarlen):
    """``flash_attn.cute.flash_attn_varlen_func``, kernels compiled at run time; Hopper and Blackwell."""

    name = "flash_attn_4"
    preference = 20
    module = "flash_attn.cute"
    package = "flash-attn-4"
    capability = HOPPER


class TorchVarlen:
    """``torch.nn.attention.varlen.varlen_attn``: flash attention inside torch, no extra package.

    It takes no scale and equal numbers of heads, so q is scaled beforehand and K, V are expanded.
    """

    name = "torch_varlen"
    preference = 30
    _wanted_parameters = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal")

    def probe(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        problem = cuda_problem(device, dtype, AMPERE)
        if problem is None and (head_dim > 256 or head_dim % 8):
            problem = f"takes head_dim up to 256 in steps of 8, got {head_dim}"
        return problem or self.signature_problem()

    def signature_problem(self) -> str | None:
        """Why the installed torch's prototype does not fit, or None."""
        problem = import_problem("torch.nn.attention.varlen", "varlen_attn", "torch>=2.10")
        if problem:
            return problem
        parameters = inspect.signature(self._kernel()).parameters
        missing = [name for name in self._wanted_parameters if name not in parameters]
        if missing:
            return f"torch {torch.__version__} has another varlen_attn: it lacks {', '.join(missing)}"
        return None

    @staticmethod
    def _kernel() -> Callable[..., Any]:
        kernel: Callable[..., Any] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        return kernel

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
        require_packed(q_NHD, k_MGD, v_MGD, segments)
        group = q_NHD.shape[1] // k_MGD.shape[1]
        if scale is not None:
            q_NHD = q_NHD * (scale * q_NHD.shape[-1] ** 0.5)
        out_NHD: Tensor = self._kernel()(
            q_NHD,
            k_MGD.repeat_interleave(group, dim=1) if group > 1 else k_MGD,
            v_MGD.repeat_interleave(group, dim=1) if group > 1 else v_MGD,
            segments.cu_seqlens_q,
            segments.cu_seqlens_k,
            segments.max_q,
            segments.max_k,
            is_causal=causal,
        )
        return zero_blind_rows(out_NHD, segments, causal=causal)


class Flex:
    """FlexAttention with a block mask of the segments; compiled, so lengths are padded up to a whole bucket."""

    name = "flex"
    preference = 40
    bucket = 128

    def __init__(self) -> None:
        self.kernel: Callable[..., Any] | None = None
        self.masks: dict[tuple[tuple[int, ...], tuple[int, ...], bool, torch.device], Any] = {}

    def probe(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cuda":
            return f"its backward pass is compiled for CUDA only, got {device.type}"
        problem = cuda_problem(device, torch.bfloat16, AMPERE) or dtype_problem(dtype)
        return problem or import_problem("torch.nn.attention.flex_attention", "flex_attention", "torch>=2.10")

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
        require_packed(q_NHD, k_MGD, v_MGD, segments)
        if self.kernel is None:
            flex = importlib.import_module("torch.nn.attention.flex_attention")
            self.kernel = torch.compile(flex.flex_attention, dynamic=False)
        num_q = q_NHD.shape[0]
        out_1HND = self.kernel(
            self._bucketed(q_NHD),
            self._bucketed(k_MGD),
            self._bucketed(v_MGD),
            block_mask=self._block_mask(segments, causal, q_NHD.device),
            scale=scale,
            enable_gqa=q_NHD.shape[1] != k_MGD.shape[1],
        )
        return zero_blind_rows(out_1HND[0].transpose(0, 1)[:num_q], segments, causal=causal)

    def _bucketed(self, packed_NHD: Tensor) -> Tensor:
        """``[1, H, bucketed N, D]``, zeros at the end."""
        missing = -packed_NHD.shape[0] % self.bucket
        return torch.nn.functional.pad(packed_NHD, (0, 0, 0, 0, 0, missing)).transpose(0, 1)[None]

    def _block_mask(self, segments: Segments, causal: bool, device: torch.device) -> Any:
        """The block mask of these segments; the last few are kept, since all layers of a step share them."""
        key = (segments.lengths_q, segments.lengths_k, causal, device)
        if key not in self.masks:
            if len(self.masks) >= 8:
                self.masks.pop(next(iter(self.masks)))
            self.masks[key] = self._build_block_mask(segments, causal, device)
        return self.masks[key]

    def _build_block_mask(self, segments: Segments, causal: bool, device: torch.device) -> Any:
        flex = importlib.import_module("torch.nn.attention.flex_attention")
        # Rows of the bucket belong to no segment: queries -1 and keys -2 never meet.
        segment_q, last_key_q = _row_labels(segments.lengths_q, segments.lengths_k, self.bucket, -1)
        segment_k, _ = _row_labels(segments.lengths_k, segments.lengths_k, self.bucket, -2)
        segment_q, segment_k = segment_q.to(device), segment_k.to(device)
        last_key_q = last_key_q.to(device)

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            same = segment_q[query] == segment_k[key]
            return same & (key <= last_key_q[query]) if causal else same

        return flex.create_block_mask(
            sees, B=None, H=None, Q_LEN=segment_q.numel(), KV_LEN=segment_k.numel(), device=device
        )


def _row_labels(
    lengths: tuple[int, ...], lengths_k: tuple[int, ...], bucket: int, outside: int
) -> tuple[Tensor, Tensor]:
    """Segment index of every row and the last packed key it sees when causal, padded to a whole bucket."""
    labels: list[int] = []
    last_keys: list[int] = []
    end_k = 0
    for index, (length, length_k) in enumerate(zip(lengths, lengths_k, strict=True)):
        end_k += length_k
        labels += [index] * length
        last_keys += range(end_k - length, end_k)
    missing = -len(labels) % bucket
    return torch.tensor(labels + [outside] * missing), torch.tensor(last_keys + [-1] * missing)
