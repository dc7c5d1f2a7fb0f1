"""Backward past 2^31 elements, over millions of tokens, batches past 65535: offsets and grids in 64 bits."""

from __future__ import annotations

import pytest
import torch
from gpu_support import (
    GRADIENTS,
    NAN,
    Tensors,
    draw_dout,
    gradients,
    judge_gradients,
    materialised_gradients,
)

import flashhopper

pytestmark = [pytest.mark.usefixtures("hopper_gradients", "empty_cache"), pytest.mark.xdist_group("large")]
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
CHUNK = 1 << 16


def _normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """bf16 values made in place, so that a tensor of gigabytes needs no copy."""
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    return x.normal_(generator=torch.Generator(device="cuda").manual_seed(seed))


def _poison(*counts: int) -> None:
    """NaN in blocks of so many bf16 elements, given back to torch's allocator."""
    blocks = [torch.full((count,), NAN, dtype=torch.bfloat16, device="cuda") for count in counts]
    del blocks


def _backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """out, lse and the gradients; memory for dq and for its fp32 sums is full of NaN before."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = flashhopper.flash_attn_func(*leaves, causal=causal, return_lse=True)
    _poison(q.numel(), 2 * q.numel())
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    for name, gradient in zip(GRADIENTS, (dq, dk, dv), strict=True):
        for part in gradient.split(CHUNK, 1):
            assert part.isfinite().all(), f"{name} has elements that are not finite or were never written"
    return out.detach(), lse.detach(), (dq, dk, dv)


def _check_dq(
    dq: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool, start: int
) -> None:
    """Rows of dq depend on those rows alone: a problem of its own, whose keys end where the last of them looks."""
    rows = slice(start, start + 128)
    stop = max(0, rows.stop + k.size(1) - q.size(1)) if causal else k.size(1)
    if stop == 0:
        assert (dq[:, rows] == 0).all()
        return
    one = (q[:, rows], k[:, :stop], v[:, :stop], dout[:, rows], causal)
    exact = materialised_gradients(*one, torch.float64)[0]
    plain = materialised_gradients(*one, q.dtype)[0]
    error = (dq[:, rows].double() - exact).abs().max().item()
    allowed = 2 * (plain.double() - exact).abs().max().item() + 1e-5
    assert error <= allowed, f"dq rows from {start}: max error {error:.3e}, allowed {allowed:.3e}"


def _check_keys(
    found: Tensors,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    keys: list[int],
    relative: float,
) -> None:
    """dk and dv of a few keys without a mask, summed over all queries in float64 from out and lse."""
    scale = q.size(3) ** -0.5
    group = q.size(2) // k.size(2)
    for kv_head in dict.fromkeys((0, k.size(2) - 1)):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        k_rows, v_rows = (x[0, keys, kv_head].double() for x in (k, v))  # (n, D)
        dk, dv = torch.zeros_like(k_rows), torch.zeros_like(v_rows)
        for start in range(0, q.size(1), CHUNK):
            rows = slice(start, start + CHUNK)
            qs, douts, outs = (x[0, rows, heads].double() for x in (q, dout, out))  # (rows, group, D)
            weights = (qs @ k_rows.T * scale - lse[0, heads, rows].double().T[..., None]).exp()  # (rows, group, n)
            ds = weights * (douts @ v_rows.T - (douts * outs).sum(-1, keepdim=True))
            dv += torch.einsum("rgn,rgd->nd", weights, douts)
            dk += torch.einsum("rgn,rgd->nd", ds, qs) * scale
        for name, mine, right in (("dk", found[1], dk), ("dv", found[2], dv)):
            error = (mine[0, keys, kv_head].double() - right).abs().max().item()
            allowed = relative * right.abs().max().item() + 1e-5
            assert error <= allowed, f"{name} of kv head {kv_head}: max error {error:.3e}, allowed {allowed:.3e}"


@MASKS
def test_more_than_2_31_elements_of_queries(causal: bool) -> None:
    """q, out, dout and dq have more; few keys keep the work small. Causal: all but the last 300 rows see nothing."""
    seqlen, heads, head_dim = 1_060_000, 16, 128
    q, dout = _normal((1, seqlen, heads, head_dim), 1), _normal((1, seqlen, heads, head_dim), 2)
    assert q.numel() > 2**31
    k, v = _normal((1, 300, 2, head_dim), 3), _normal((1, 300, 2, head_dim), 4)
    out, lse, found = _backward(q, k, v, dout, causal)
    for start in (0, 1_048_576 - 64, seqlen - 300, seqlen - 128):  # 2^31 elements end at row 1048576
        _check_dq(found[0], q, k, v, dout, causal, start)
    if causal:
        tail = (q[:, -300:], k, v, dout[:, -300:])
        problem = judge_gradients((found[0][:, -300:], *found[1:]), *tail, True)
        assert problem is None, problem
    else:
        # Sums of 8.5 million rows in an fp32 accumulator that truncates (docs/numerics.md): beyond the 16-bit rule.
        _check_keys(found, q, k, v, dout, out, lse, [0, 63, 64, 150, 299], 3e-2)


def test_more_than_2_31_elements_of_keys() -> None:
    """k, v, dk and dv have more."""
    seqlen, heads, head_dim = 1_060_000, 16, 128
    k, v = _normal((1, seqlen, heads, head_dim), 5), _normal((1, seqlen, heads, head_dim), 6)
    q, dout = _normal((1, 128, heads, head_dim), 7), _normal((1, 128, heads, head_dim), 8)
    # Each of a million keys has a weight near 1e-6; a dout of this size brings dk and dv to about 1e-2.
    dout *= 1024
    out, lse, found = _backward(q, k, v, dout, False)
    _check_keys(found, q, k, v, dout, out, lse, [0, 127, 128, 524_288, 1_048_576, 1_048_577, seqlen - 1], 2e-2)


@MASKS
def test_slices_of_a_fused_tensor_past_2_31_elements(causal: bool) -> None:
    tokens, heads, head_dim = 360_000, 16, 128
    qkv = _normal((1, tokens, 3, heads, head_dim), 9)
    assert qkv.numel() > 2**31
    q, k, v = (x[:, -1500:] for x in qkv.unbind(2))
    dout = draw_dout(9, q, v)
    problem = judge_gradients(gradients(q, k, v, dout, causal), q, k, v, dout, causal)
    assert problem is None, problem


@MASKS
def test_batch_stride_past_2_31(causal: bool) -> None:
    store = _normal((2, 2**31 + 2**20), 10)
    count = 300 * 4 * 128
    q, k, v, dout = (store[:, at : at + count].view(2, 300, 4, 128) for at in (0, 2**20, 2**31, 2**30))
    problem = judge_gradients(gradients(q, k, v, dout, causal), q, k, v, dout, causal)
    assert problem is None, problem


@MASKS
@pytest.mark.parametrize("deterministic", [False, True])
def test_batch_past_65535(deterministic: bool, causal: bool) -> None:
    q, k, v, dout = (_normal((70_001, 5, 2, 64), seed) for seed in (11, 12, 13, 14))
    found = gradients(q, k, v, dout, causal, deterministic=deterministic)
    problem = judge_gradients(found, q, k, v, dout, causal)
    assert problem is None, problem


def test_millions_of_tokens() -> None:
    """One head of 4.2 million queries, and one of as many keys."""
    tokens = 4_200_000
    many, many_dout = _normal((1, tokens, 1, 64), 15), _normal((1, tokens, 1, 64), 16)
    k, v = _normal((1, 200, 1, 64), 17), _normal((1, 200, 1, 64), 18)
    out, lse, found = _backward(many, k, v, many_dout, False)
    for start in (0, tokens // 2, tokens - 128):
        _check_dq(found[0], many, k, v, many_dout, False, start)
    _check_keys(found, many, k, v, many_dout, out, lse, [0, 100, 199], 2e-2)
    del out, lse, found
    dout = 4096 * _normal((1, 200, 1, 64), 19)
    out, lse, found = _backward(k, many, many_dout, dout, False)
    _check_keys(found, k, many, many_dout, dout, out, lse, [0, 2_097_151, tokens - 1], 2e-2)
