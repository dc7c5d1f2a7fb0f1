"""Failures that users of attention libraries met in public, as small inputs against the oracle; those that need no
GPU.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import assert_close, gradients, oracle, small_tiles

import flashhopper as fh


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def compare(inputs: list[torch.Tensor], tolerance: float, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward and all gradients, those through lse too, against the oracle."""
    sink = inputs[3] if len(inputs) > 3 else None
    out, lse = fh.flash_attn_func(*inputs[:3], sink=sink, return_lse=True, **options)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected, expected_lse = oracle(*exact[:3], sink=exact[3] if sink is not None else None, **options)
    assert_close(out, expected, tolerance)
    assert_close(lse, expected_lse, tolerance)
    dout, dlse = torch.randn(out.shape).to(out.dtype), torch.randn(lse.shape)
    truth = gradients(expected, expected_lse, exact, dout.double(), dlse.double())
    for mine, reference in zip(gradients(out, lse, inputs, dout, dlse), truth, strict=True):
        assert_close(mine, reference, tolerance)
    return out, lse


def test_empty_query_sequences_in_a_packed_batch() -> None:
    q, k, v = leaves((1023, 2, 128), (1535, 2, 128), (1535, 2, 128), dtype=torch.bfloat16)
    out = fh.flash_attn_varlen_func(q, k, v, offsets(0, 0, 1023), offsets(0, 512, 1535), 1023, 1023, causal=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert all(bool(torch.isfinite(x).all()) for x in (out, dq, dk, dv))
    assert not dk[:512].any()
    assert not dv[:512].any()
    assert dk[512:].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
def test_zero_length_keys(causal: bool, with_sink: bool) -> None:
    inputs = leaves((2, 5, 4, 16), (2, 0, 2, 16), (2, 0, 2, 8), *([(4,)] if with_sink else []))
    out, lse = compare(inputs, 1e-6, causal=causal)
    assert not out.any()
    if not with_sink:
        assert torch.equal(lse, torch.full((2, 4, 5), -math.inf))
    q, k, v = leaves((6, 4, 16), (7, 2, 16), (7, 2, 16))
    out, lse = fh.flash_attn_varlen_func(
        q, k, v, offsets(0, 2, 6), offsets(0, 0, 7), 4, 7, causal=causal, return_lse=True
    )
    dq, *_ = torch.autograd.grad(out.sum(), (q, k, v))
    assert not out[:2].any()
    assert not dq[:2].any()
    assert bool((lse[:, :2] == -math.inf).all())
    assert bool(torch.isfinite(lse[:, 2:]).all())


def test_all_sequences_empty() -> None:
    q, k, v = leaves((0, 4, 16), (0, 2, 16), (0, 2, 8))
    for cu in (offsets(0), offsets(0, 0, 0)):
        out, lse = fh.flash_attn_varlen_func(q, k, v, cu, cu, 0, 0, return_lse=True)
        assert out.shape == (0, 4, 8)
        assert lse.shape == (4, 0)
        found = torch.autograd.grad(out.sum(), (q, k, v))
        assert [g.shape for g in found] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize(("batch", "seqlen_q"), [(0, 3), (2, 0), (0, 0)])
def test_empty_dense_batches(batch: int, seqlen_q: int) -> None:
    inputs = leaves((batch, seqlen_q, 4, 8), (batch, 5, 2, 8), (batch, 5, 2, 8))
    out, lse = compare(inputs, 0.0)
    assert (out.numel(), lse.numel()) == (0, 0)


@pytest.mark.parametrize("width", [0, 1, 63, 64, 127, 128, 1000])
@pytest.mark.parametrize("sides", ["left", "right", "both"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(150, 190), (190, 150)])
def test_windows_with_grouped_heads(width: int, sides: str, seqlen_q: int, seqlen_k: int) -> None:
    window = {"left": (width, 0), "right": (0, width), "both": (width, width)}[sides]
    with small_tiles(elements=30000, block_k=64, rows=128):
        compare(leaves((1, seqlen_q, 8, 64), (1, seqlen_k, 1, 64), (1, seqlen_k, 1, 64)), 2e-5, window_size=window)


def test_a_window_as_wide_as_the_sequence_is_causal_to_the_bit() -> None:
    q, k, v = (torch.randn(1, 130, h, 64) for h in (4, 2, 2))
    causal = fh.flash_attn_func(q, k, v, causal=True, return_lse=True)
    for window in ((130, 0), (129, 0), (5000, 0)):
        for options in ({"window_size": window}, {"window_size": window, "causal": True}):
            again = fh.flash_attn_func(q, k, v, return_lse=True, **options)
            assert all(torch.equal(a, b) for a, b in zip(causal, again, strict=True))


def test_causal_with_more_queries_than_keys() -> None:
    out, lse = compare(leaves((1, 300, 4, 64), (1, 77, 2, 64), (1, 77, 2, 64)), 2e-5, causal=True)
    assert not out[:, :223].any()
    assert bool((lse[..., :223] == -math.inf).all())
    assert bool(torch.isfinite(lse[..., 223:]).all())


@pytest.mark.parametrize("kv_heads", [12, 3])
def test_deterministic_gradients(kv_heads: int) -> None:
    inputs = leaves((2, 128, 12, 64), (2, 128, kv_heads, 64), (2, 128, kv_heads, 64), dtype=torch.float16)
    dout = torch.randn(2, 128, 12, 64).half()

    def run() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(fh.flash_attn_func(*inputs, deterministic=True), inputs, dout)

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_head_dim_192_with_128() -> None:
    compare(leaves((1, 130, 4, 192), (1, 130, 4, 192), (1, 130, 4, 128)), 2e-5, causal=True)


def test_a_gradient_with_a_large_row_stride() -> None:
    q, k, v = leaves((1, 40, 4, 64), (1, 40, 4, 64), (1, 40, 4, 64))
    out = fh.flash_attn_func(q, k, v)
    dout = torch.randn(1, 40, 9728)[..., :256].unflatten(-1, (4, 64))
    assert dout.stride(1) == 9728
    found = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    for a, b in zip(found, torch.autograd.grad(out, (q, k, v), dout.contiguous()), strict=True):
        assert torch.equal(a, b)
    expanded = torch.autograd.grad(fh.flash_attn_func(q, k, v).sum(), q)  # a gradient of stride 0
    assert bool(torch.isfinite(expanded[0]).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sinks_have_gradients(dtype: torch.dtype) -> None:
    inputs = leaves((1, 70, 16, 32), (1, 70, 4, 32), (1, 70, 4, 32), (16,), dtype=dtype)
    compare(inputs, 3e-2 if dtype == torch.bfloat16 else 2e-5, causal=True, window_size=(20, 0))


def test_large_inputs() -> None:
    """Scores up to 1e4 in fp16: finite, and what the oracle says of the same inputs."""
    scaled = [(30 * x.detach()).requires_grad_() for x in leaves(*[(1, 256, 2, 128)] * 3, dtype=torch.float16)]
    out = fh.flash_attn_func(*scaled, causal=True)
    exact = [x.detach().double().requires_grad_() for x in scaled]
    expected, _ = oracle(*exact, causal=True)
    scores = torch.einsum("bqhd,bkhd->bhqk", exact[0], exact[1]) * 128**-0.5
    assert float(scores.detach().abs().max()) > 3e3
    assert_close(out, expected, 1e-3)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, scaled, dout)
    for a, b in zip(found, torch.autograd.grad(expected, exact, dout.double()), strict=True):
        assert bool(torch.isfinite(a).all())
        assert_close(a, b, 2e-3)


def test_nan_beyond_the_used_length_stays_there() -> None:
    q, k, v = (torch.randn(20, h, 16) for h in (4, 2, 2))
    cu_q, cu_k = offsets(0, 8, 20), offsets(0, 12, 20)
    used_q, used_k = offsets(5, 12), offsets(7, 0)
    arguments = (cu_q, cu_k, 12, 12)
    options = {"causal": True, "seqused_q": used_q, "seqused_k": used_k, "return_lse": True}
    clean = fh.flash_attn_varlen_func(q, k, v, *arguments, **options)
    q[5:8], k[7:], v[7:] = math.nan, math.nan, math.nan
    leaf = [x.requires_grad_() for x in (q, k, v)]
    out, lse = fh.flash_attn_varlen_func(*leaf, *arguments, **options)
    assert torch.equal(out, clean[0])
    assert torch.equal(lse, clean[1])
    dout = torch.randn_like(out)
    dout[5:8] = math.nan
    found = torch.autograd.grad(out, leaf, dout)
    assert all(bool(torch.isfinite(g).all()) for g in found)
    assert not found[0][5:8].any()
    assert not found[1][7:].any()


def test_import_is_one_package_and_needs_no_gpu() -> None:
    assert fh.__all__ == sorted(fh.__all__, key=lambda name: (not name[0].isupper(), name))
    assert all(hasattr(fh, name) for name in fh.__all__)
