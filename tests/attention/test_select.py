# SPDX-License-Identifier: Apache-2.0
"""Which backend is chosen, and what is said when one can't run."""

from __future__ import annotations

import functools
import sys
import types

import pytest
import torch

from embodix import plugins
from embodix.attention import Segments
from embodix.attention import cuda as cuda_backends
from embodix.attention.cpu import SegmentAuto, SegmentGemm, SegmentSdpa
from embodix.attention.cuda import FlashAttention2, FlashAttention4, Flex, TorchVarlen, zero_blind_rows
from embodix.attention.select import by_preference, choose_backend, usable_backends
from embodix.hookspecs import Registration

CPU = torch.device("cpu")
ALL = {
    backend.name: backend
    for backend in (SegmentSdpa, SegmentGemm, SegmentAuto, FlashAttention2, FlashAttention4, TorchVarlen, Flex)
}


class Wrong(SegmentGemm):
    """Forgets to divide by the root of head_dim."""

    name = "wrong"
    preference = None

    def __call__(self, *inputs, **options):
        return super().__call__(*inputs, **{**options, "scale": 1.0})


class Broken(SegmentGemm):
    name = "broken"

    def __call__(self, *inputs, **options):
        raise RuntimeError("no kernel image")


def test_auto_takes_the_first_that_can_run():
    assert choose_backend("auto", CPU, torch.float32, 32, ALL).name == "segment_auto"


def test_auto_passes_over_backends_that_compute_something_else_or_fail():
    candidates = {"wrong": Wrong, "broken": Broken, "plain": SegmentSdpa}
    assert choose_backend("auto", CPU, torch.float32, 32, candidates).name == "segment_sdpa"


@pytest.mark.parametrize(("backend", "reason"), [(Wrong, "self-check is off by"), (Broken, "no kernel image")])
def test_a_named_backend_is_checked_too(backend, reason):
    with pytest.raises(ValueError, match=reason):
        choose_backend(backend.name, CPU, torch.float32, 32, {backend.name: backend})


@pytest.mark.parametrize("name", ["flash_attn_2", "flash_attn_4", "torch_varlen", "flex"])
def test_a_named_backend_that_cannot_run_says_why_and_what_can(name):
    with pytest.raises(ValueError, match=r"needs a CUDA device|CUDA only") as error:
        choose_backend(name, CPU, torch.bfloat16, 256, ALL)
    assert "Usable here: segment_auto, segment_gemm, segment_sdpa" in str(error.value)


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match="segment_gemm"):
        choose_backend("segmnt", CPU, torch.float32, 32, ALL)


def test_when_nothing_can_run_every_reason_is_given():
    with pytest.raises(ValueError, match=r"flash_attn_2: .*; torch_varlen: "):
        choose_backend("auto", CPU, torch.bfloat16, 64, {n: ALL[n] for n in ("torch_varlen", "flash_attn_2")})


def test_fp16_is_refused_before_anything_is_tried():
    with pytest.raises(ValueError, match="fp16 is refused"):
        choose_backend("auto", CPU, torch.float16, 32, ALL)


def test_foreign_backends_come_after_the_known_ones():
    assert by_preference({"theirs": Wrong, **ALL})[-1] == "theirs"
    assert usable_backends(CPU, torch.float32, 32, ALL) == ["segment_auto", "segment_gemm", "segment_sdpa"]


class Theirs:
    """A third party's backend, which need not derive from embodix's own."""

    name = "theirs"
    preference = 45

    def probe(self, device, dtype, head_dim):
        return None

    def __call__(self, *inputs, **options):
        return SegmentSdpa()(*inputs, **options)


def registered_backends():
    names = plugins.registry().names("attention_backends")
    return {name: functools.partial(plugins.build, "attention_backends", name, {}) for name in names}


def test_auto_takes_a_registered_backend_of_a_third_party_by_the_place_it_states(monkeypatch):
    theirs = types.ModuleType("their_attention")
    theirs.Theirs = Theirs
    monkeypatch.setitem(sys.modules, "their_attention", theirs)
    known = plugins.registry().implementations["attention_backends"]
    monkeypatch.setitem(known, "theirs", Registration("theirs", "their_attention:Theirs", "a third party's"))
    ours = ["flash_attn_2", "flash_attn_4", "torch_varlen", "flex", "segment_auto", "segment_gemm", "segment_sdpa"]
    assert by_preference(registered_backends()) == [*ours[:4], "theirs", *ours[4:]]
    assert choose_backend("auto", CPU, torch.float32, 32, registered_backends()).name == "theirs"
    monkeypatch.delattr(Theirs, "preference")
    assert by_preference(registered_backends()) == [*ours, "theirs"]
    assert choose_backend("auto", CPU, torch.float32, 32, registered_backends()).name == "segment_auto"


def test_a_backend_that_cannot_be_made_comes_last():
    def unbuildable():
        raise RuntimeError("no such option")

    assert by_preference({"unbuildable": unbuildable, **ALL})[-1] == "unbuildable"
    assert choose_backend("auto", CPU, torch.float32, 32, {"unbuildable": unbuildable, **ALL}).name == "segment_auto"


@pytest.mark.parametrize("backend", [FlashAttention2, FlashAttention4, TorchVarlen, Flex])
def test_probes_never_raise(backend):
    for device in ("cpu", "meta", "cuda"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            reason = backend().probe(torch.device(device), dtype, 72)
            assert reason is None or reason


def test_a_library_that_fails_to_import_is_a_reason(monkeypatch):
    broken = types.ModuleType("flash_attn")
    broken.__spec__ = types.SimpleNamespace(name="flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", broken)
    reason = cuda_backends.import_problem("flash_attn", "flash_attn_varlen_func", "flash-attn>=2.8,<3")
    assert "can't be imported" in reason
    assert "AttributeError" in reason


def fake_kernel(monkeypatch, module, kernel):
    holder = types.ModuleType(module)
    holder.flash_attn_varlen_func = kernel
    monkeypatch.setitem(sys.modules, module, holder)


def flash_attention_2_signature(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """The parameters of flash-attn 2.8's function, computing on the CPU."""
    from embodix.attention.select import reference_attention

    lengths_q = cu_seqlens_q.diff().tolist()
    lengths_k = cu_seqlens_k.diff().tolist()
    assert (max_seqlen_q, max_seqlen_k) == (max(lengths_q), max(lengths_k))
    segments = Segments.from_lengths(lengths_q, lengths_k)
    return reference_attention(q, k, v, segments, causal=causal, scale=softmax_scale).to(q.dtype)


@pytest.mark.parametrize(
    ("backend", "module", "wrap"),
    [(FlashAttention2, "flash_attn", lambda out: out), (FlashAttention4, "flash_attn.cute", lambda out: (out, None))],
)
def test_flash_kernels_are_called_by_their_own_parameter_names(monkeypatch, backend, module, wrap):
    fake_kernel(monkeypatch, module, lambda *args, **kwargs: wrap(flash_attention_2_signature(*args, **kwargs)))
    segments = Segments.from_lengths((3, 2), (4, 2))
    q, k, v = torch.randn(5, 4, 8), torch.randn(6, 1, 8), torch.randn(6, 1, 8)
    torch.testing.assert_close(backend()(q, k, v, segments, scale=0.3), SegmentGemm()(q, k, v, segments, scale=0.3))


def test_torch_varlen_has_the_parameters_that_are_used():
    assert TorchVarlen().signature_problem() is None


def test_torch_varlen_scales_and_expands_heads(monkeypatch):
    def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        assert query.shape[1] == key.shape[1] == value.shape[1]
        return flash_attention_2_signature(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, causal=is_causal)

    monkeypatch.setattr(TorchVarlen, "_kernel", staticmethod(lambda: kernel))
    segments = Segments.from_lengths((3, 2), (4, 2))
    q, k, v = torch.randn(5, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    for causal in (False, True):
        torch.testing.assert_close(
            TorchVarlen()(q, k, v, segments, causal=causal, scale=0.3),
            SegmentGemm()(q, k, v, segments, causal=causal, scale=0.3),
        )


@pytest.mark.parametrize("causal", [False, True])
def test_flex_masks_segments_and_buckets(monkeypatch, causal):
    """The mask and the padding of FlexAttention, run uncompiled on the CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    backend = Flex()
    backend.kernel = flex_attention
    segments = Segments.from_lengths((70, 33), (90, 33))
    q, k, v = torch.randn(103, 4, 16), torch.randn(123, 1, 16), torch.randn(123, 1, 16)
    for _ in range(2):
        torch.testing.assert_close(
            backend(q, k, v, segments, causal=causal, scale=0.3),
            SegmentGemm()(q, k, v, segments, causal=causal, scale=0.3),
            rtol=1e-4,
            atol=1e-5,
        )
    assert len(backend.masks) == 1


def test_blind_rows_of_a_kernel_are_zeroed():
    segments = Segments.from_lengths((3, 2), (0, 2))
    out = zero_blind_rows(torch.full((5, 1, 2), float("nan")), segments, causal=False)
    assert torch.count_nonzero(out[:3]) == 0
    assert torch.isnan(out[3:]).all()
