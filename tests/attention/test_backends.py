# SPDX-License-Identifier: Apache-2.0
"""Every backend against dense fp32 attention: values, gradients, blind rows, neighbours; and its refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodix.attention import Segments, cpu, folded_gemm, transposed_gemm
from embodix.attention.cpu import SegmentAuto, SegmentGemm, SegmentSdpa, SegmentTransposed
from embodix.attention.cuda import FlashAttention2, FlashAttention4, Flex, TorchVarlen
from embodix.attention.segments import PaddedRows
from embodix.attention.select import reference_attention
from embodix.testing.errors import relative_error

CPU = [SegmentGemm, SegmentSdpa, SegmentAuto]
CPU_FP32 = [*CPU, SegmentTransposed]
CUDA = [FlashAttention2, FlashAttention4, TorchVarlen, Flex]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


def packed(segments, heads_q, heads_k, head_dim, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((sum(segments.lengths_q), heads_q), (sum(segments.lengths_k), heads_k), (sum(segments.lengths_k), heads_k))
    return [torch.randn(*size, head_dim, generator=generator).to(device, dtype).requires_grad_() for size in sizes]


def output_and_gradients(call, inputs, segments, **options):
    output = call(*inputs, segments, **options)
    slope = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    gradients = torch.autograd.grad(output, inputs, slope, allow_unused=True, materialize_grads=True)
    return [output.detach(), *gradients]


def assert_agrees(backend, inputs, segments, **options):
    got = output_and_gradients(backend, inputs, segments, **options)
    wanted = output_and_gradients(reference_attention, inputs, segments, **options)
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        # A single key gets all the weight, so its dq is rounding error: the output sets the scale.
        scale = max(float(theirs.norm()), float(wanted[0].norm()))
        assert float((ours.float() - theirs.float()).norm()) <= TOLERANCE[inputs[0].dtype] * scale, name


@pytest.mark.parametrize("backend", CPU_FP32)
@pytest.mark.parametrize("causal", [False, True])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    heads=st.sampled_from([(8, 1), (4, 2), (3, 3)]),
    scale=st.sampled_from([None, 0.7]),
)
def test_segments_equal_dense_attention(backend, causal, lengths, heads, scale):
    lengths_q, lengths_k = zip(*lengths, strict=True)
    segments = Segments.from_lengths(lengths_q, lengths_k)
    assert_agrees(backend(), packed(segments, *heads, 8), segments, causal=causal, scale=scale)


@pytest.mark.parametrize("backend", CPU)
def test_bfloat16_stays_within_its_own_rounding(backend):
    segments = Segments.from_lengths((30, 11), (41, 17))
    assert_agrees(backend(), packed(segments, 8, 1, 16, torch.bfloat16), segments)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [((5, 5, 5), (7, 7, 7)), ((5, 5), (3, 3)), ((4, 4), (0, 0)), ((0, 0), (2, 2))])
def test_segments_of_one_length_equal_dense_attention(lengths, causal):
    segments = Segments.from_lengths(*lengths)
    assert_agrees(SegmentSdpa(), packed(segments, 4, 2, 8), segments, causal=causal)


def test_blocks_of_scores_do_not_change_the_result(monkeypatch):
    segments = Segments.from_lengths((13, 6), (13, 9))
    inputs = packed(segments, 4, 2, 8)
    whole = output_and_gradients(SegmentGemm(), inputs, segments, causal=True)
    monkeypatch.setattr(folded_gemm, "SCORE_BLOCK_ELEMENTS", 40)
    for ours, theirs in zip(output_and_gradients(SegmentGemm(), inputs, segments, causal=True), whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kept", [0, 2**24])
@pytest.mark.parametrize(("block_elements", "block_tokens"), [(40, 64), (2**18, 2), (2**18, 64)])
def test_transposed_blocks_equal_dense_attention(causal, kept, block_elements, block_tokens, monkeypatch):
    monkeypatch.setattr(transposed_gemm, "KEPT_ELEMENTS", kept)
    monkeypatch.setattr(transposed_gemm, "BLOCK_ELEMENTS", block_elements)
    monkeypatch.setattr(transposed_gemm, "CAUSAL_BLOCK_TOKENS", block_tokens)
    segments = Segments.from_lengths((13, 6, 4), (13, 9, 2))
    assert_agrees(SegmentTransposed(), packed(segments, 4, 2, 8), segments, causal=causal)


def test_transposed_blocks_without_their_causal_mask_are_noticed(monkeypatch):
    segments = Segments.from_lengths((13, 6), (13, 9))
    inputs = packed(segments, 4, 2, 8)
    monkeypatch.setattr(torch.Tensor, "masked_fill_", lambda self, *_: self)
    output = SegmentTransposed()(*inputs, segments, causal=True)
    assert relative_error(output, reference_attention(*inputs, segments, causal=True)) > 0.01


@pytest.mark.parametrize("backend", CPU_FP32)
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_see_no_key_are_zero_with_finite_gradients(backend, causal):
    segments = Segments.from_lengths((5, 4), (2, 4) if causal else (0, 4))
    inputs = packed(segments, 4, 1, 8)
    output, *gradients = output_and_gradients(backend(), inputs, segments, causal=causal)
    num_blind = 3 if causal else 5
    assert torch.count_nonzero(output[:num_blind]) == 0
    assert torch.count_nonzero(output[num_blind:]) > 0
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("backend", CPU_FP32)
def test_a_poisoned_neighbour_changes_nothing(backend):
    segments = Segments.from_lengths((4, 5, 3), (6, 5, 3))
    q, k, v = (tensor.detach() for tensor in packed(segments, 8, 1, 8))
    clean = backend()(q, k, v, segments)
    q, k, v = q.clone(), k.clone(), v.clone()
    q[4:9] = k[6:11] = v[6:11] = float("nan")
    poisoned = backend()(q, k, v, segments)
    assert torch.equal(poisoned[:4], clean[:4])
    assert torch.equal(poisoned[9:], clean[9:])
    assert torch.isnan(poisoned[4:9]).all()


def test_one_segment_instead_of_two_is_noticed():
    """Mutation twin: the comparison fails when the boundary between segments is dropped."""
    apart, merged = Segments.from_lengths((4, 5), (4, 5)), Segments.from_lengths((9,), (9,))
    inputs = packed(apart, 8, 1, 8)
    output = SegmentGemm()(*inputs, merged)
    assert relative_error(output, reference_attention(*inputs, apart)) > 0.1


@pytest.mark.parametrize(
    ("lengths", "dtype", "heads", "causal", "wanted"),
    [
        ((5, 7), torch.float32, (8, 1, 4), False, "batch"),
        ((5, 7), torch.float32, (8, 1, 4), True, "sdpa"),
        ((70, 70), torch.float32, (8, 1, 4), False, "sdpa"),
        ((256,), torch.float32, (8, 8, 8), False, "transposed"),
        ((256,), torch.float32, (8, 8, 16), False, "sdpa"),
        ((256,), torch.float32, (8, 8, 16), True, "sdpa"),
        ((256,), torch.float32, (4, 2, 64), True, "sdpa"),
        ((512,), torch.float32, (4, 2, 64), True, "transposed"),
        ((512,), torch.float32, (4, 2, 64), False, "sdpa"),
        ((70, 70), torch.bfloat16, (8, 1, 4), False, "batch"),
        ((900, 900), torch.bfloat16, (8, 1, 4), False, "gemm"),
        ((5,), torch.bfloat16, (8, 1, 4), False, "gemm"),
        ((5,), torch.bfloat16, (8, 8, 4), False, "sdpa"),
        ((256,), torch.bfloat16, (8, 8, 4), False, "gemm"),
    ],
)
def test_the_switch_goes_by_what_was_measured(lengths, dtype, heads, causal, wanted, monkeypatch):
    backend, used = SegmentAuto(), []
    for name in ("gemm", "sdpa", "transposed"):
        monkeypatch.setattr(backend, f"_{name}", lambda q, *_, name=name, **__: used.append(name) or q)
    monkeypatch.setattr(cpu, "batched_attention", lambda q, *_: used.append("batch") or q)
    segments = Segments.from_lengths(lengths, lengths)
    backend(*packed(segments, *heads, dtype), segments, causal=causal)
    assert used == [wanted]


def test_a_batch_without_its_key_mask_is_noticed(monkeypatch):
    """Mutation twin of the padding mask of batched segments."""
    segments = Segments.from_lengths((4, 2), (4, 2))
    inputs = packed(segments, 8, 1, 8)
    wanted = reference_attention(*inputs, segments)
    assert relative_error(SegmentAuto()(*inputs, segments), wanted) < 1e-6
    monkeypatch.setattr(PaddedRows, "additive_mask", lambda self, dtype: torch.zeros(self.valid.shape, dtype=dtype))
    assert relative_error(SegmentAuto()(*inputs, segments), wanted) > 0.01


@pytest.mark.parametrize("backend", [*CPU, *CUDA])
def test_fp16_is_refused_by_probe_and_call(backend):
    segments = Segments.from_lengths((2,), (2,))
    inputs = packed(segments, 2, 2, 8, torch.float16)
    if backend in CPU:
        assert "fp16 is refused" in backend().probe(torch.device("cpu"), torch.float16, 8)
    with pytest.raises(ValueError, match="fp16 is refused"):
        backend()(*inputs, segments)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (((3, 2, 8), (4, 2, 8), (4, 2, 8)), "cover 4 queries and 4 keys; got 3 and 4"),
        (((4, 3, 8), (4, 2, 8), (4, 2, 8)), "multiple"),
        (((4, 2, 8), (4, 2, 8), (4, 1, 8)), r"\[M, G, D\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(sizes, message):
    segments = Segments.from_lengths((4,), (4,))
    with pytest.raises(ValueError, match=message):
        SegmentGemm()(*(torch.zeros(size) for size in sizes), segments)


def test_mixed_dtypes_are_refused():
    segments = Segments.from_lengths((4,), (4,))
    q, k, v = packed(segments, 2, 2, 8)
    with pytest.raises(ValueError, match="one dtype"):
        SegmentGemm()(q, k.bfloat16(), v, segments)


@pytest.mark.parametrize(("lengths_q", "lengths_k"), [((1, 2), (3,)), ((), ()), ((-1,), (2,))])
def test_segments_that_make_no_sense_are_refused(lengths_q, lengths_k):
    with pytest.raises(ValueError, match=r"[Ss]egment"):
        Segments.from_lengths(lengths_q, lengths_k)


@pytest.mark.parametrize("backend", CUDA)
def test_cuda_kernels_agree_with_dense_attention(backend):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reason = backend().probe(device, torch.bfloat16, 64)
    if reason:
        pytest.skip(f"{backend().name}: {reason}")
    segments = Segments.from_lengths((50, 50), (300, 200), device)
    for causal in (False, True):
        assert_agrees(backend(), packed(segments, 8, 1, 64, torch.bfloat16, device), segments, causal=causal, scale=0.2)
