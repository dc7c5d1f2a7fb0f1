"""The tiled engine against the float64 oracle: any shape, mask, cap, sink, stride and dtype, forward and backward."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, gradients, oracle, small_tiles
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashhopper as fh
from flashhopper.engine import tiles

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

layouts = st.sampled_from(("bshd", "bhsd", "fused", "sliced"))


def tensor(layout: str, batch: int, seqlen: int, heads: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """A (batch, seqlen, heads, dim) float64 tensor that lies in memory as named."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if layout == "bhsd":
        return normal(batch, heads, seqlen, dim).transpose(1, 2)
    if layout == "fused":
        return normal(batch, seqlen, heads, 3, dim)[:, :, :, 1]
    if layout == "sliced":
        return normal(batch, seqlen + 2, heads, 2 * dim)[:, 1 : seqlen + 1, :, ::2]
    return normal(batch, seqlen, heads, dim)


@PROPERTY
@given(data=st.data())
def test_any_dense_problem(data: st.DataObject) -> None:
    batch, kv_heads, group = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    seqlen_q, seqlen_k = data.draw(st.integers(0, 60)), data.draw(st.integers(0, 60))
    dim, dim_v = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 24))
    window = (data.draw(st.integers(-1, 40)), data.draw(st.integers(-1, 40)))
    options = {
        "causal": data.draw(st.booleans()),
        "window_size": window,
        "softcap": data.draw(st.sampled_from((0.0, 0.0, 1.5, 30.0))),
        "softmax_scale": data.draw(st.sampled_from((None, 0.3))),
    }
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    heads = kv_heads * group
    inputs = [
        tensor(data.draw(layouts), batch, seqlen_q, heads, dim, generator),
        tensor(data.draw(layouts), batch, seqlen_k, kv_heads, dim, generator),
        tensor(data.draw(layouts), batch, seqlen_k, kv_heads, dim_v, generator),
    ]
    if data.draw(st.booleans()):
        inputs.append(torch.randn(heads, generator=generator, dtype=torch.float64))
    inputs = [x.requires_grad_() for x in inputs]
    sink = inputs[3] if len(inputs) == 4 else None
    with small_tiles():
        out, lse = fh.flash_attn_func(*inputs[:3], sink=sink, return_lse=True, **options)
        expected_out, expected_lse = oracle(*inputs[:3], sink=sink, **options)
        assert_close(out, expected_out, 1e-11)
        assert_close(lse, expected_lse, 1e-11)
        dout, dlse = torch.randn(out.shape, dtype=torch.float64), torch.randn(lse.shape, dtype=torch.float64)
        expected = gradients(expected_out, expected_lse, inputs, dout, dlse)
        for mine, reference in zip(gradients(out, lse, inputs, dout, dlse), expected, strict=True):
            assert_close(mine, reference, 1e-10)


@PROPERTY
@given(data=st.data())
def test_any_packed_problem(data: st.DataObject) -> None:
    lengths = st.lists(st.integers(0, 30), min_size=1, max_size=4)
    q_lengths = data.draw(lengths)
    k_lengths = data.draw(st.lists(st.integers(0, 30), min_size=len(q_lengths), max_size=len(q_lengths)))
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    slack = data.draw(st.integers(0, 3))  # tokens behind the last sequence
    use_used = data.draw(st.booleans())
    packing = {
        "cu_seqlens_q": torch.tensor([0, *q_lengths]).cumsum(0).int(),
        "cu_seqlens_k": torch.tensor([0, *k_lengths]).cumsum(0).int(),
        "seqused_q": torch.tensor([data.draw(st.integers(0, n)) for n in q_lengths]).int() if use_used else None,
        "seqused_k": torch.tensor([data.draw(st.integers(0, n)) for n in k_lengths]).int() if use_used else None,
    }
    options = {
        "causal": data.draw(st.booleans()),
        "window_size": (data.draw(st.integers(-1, 20)), data.draw(st.integers(-1, 20))),
        "softcap": data.draw(st.sampled_from((0.0, 2.0))),
    }
    total_q, total_k = sum(q_lengths) + slack, sum(k_lengths) + slack
    inputs = [
        torch.randn(total_q, kv_heads * group, 8, dtype=torch.float64),
        torch.randn(total_k, kv_heads, 8, dtype=torch.float64),
        torch.randn(total_k, kv_heads, 12, dtype=torch.float64),
    ]
    if data.draw(st.booleans()):
        inputs.append(torch.randn(kv_heads * group, dtype=torch.float64))
    inputs = [x.requires_grad_() for x in inputs]
    sink = inputs[3] if len(inputs) == 4 else None
    longest = {"max_seqlen_q": max(q_lengths), "max_seqlen_k": max(k_lengths)}
    with small_tiles():
        out, lse = fh.flash_attn_varlen_func(*inputs[:3], **packing, **longest, sink=sink, return_lse=True, **options)
        expected_out, expected_lse = oracle(*inputs[:3], sink=sink, **packing, **options)
        assert_close(out, expected_out, 1e-11)
        assert_close(lse, expected_lse, 1e-11)
        dout, dlse = torch.randn(out.shape, dtype=torch.float64), torch.randn(lse.shape, dtype=torch.float64)
        expected = gradients(expected_out, expected_lse, inputs, dout, dlse)
        for mine, reference in zip(gradients(out, lse, inputs, dout, dlse), expected, strict=True):
            assert_close(mine, reference, 1e-10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_gradcheck(causal: bool, softcap: float) -> None:
    q = torch.randn(1, 5, 4, 3, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 6, 2, 3, dtype=torch.float64, requires_grad=True)
    v = torch.randn(1, 6, 2, 2, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def attend(*x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return fh.flash_attn_func(*x[:3], causal=causal, softcap=softcap, sink=x[3], return_lse=True)

    with small_tiles(elements=40, block_k=2, rows=4):
        assert torch.autograd.gradcheck(attend, (q, k, v, sink))


def test_gradcheck_packed() -> None:
    q = torch.randn(7, 2, 3, dtype=torch.float64, requires_grad=True)
    k = torch.randn(6, 1, 3, dtype=torch.float64, requires_grad=True)
    v = torch.randn(6, 1, 3, dtype=torch.float64, requires_grad=True)
    cu_q, cu_k = torch.tensor([0, 3, 3, 7]).int(), torch.tensor([0, 2, 4, 6]).int()

    def attend(*x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = fh.flash_attn_varlen_func(*x, cu_q, cu_k, 4, 2, causal=True, return_lse=True)
        return out, torch.where(torch.isfinite(lse), lse, torch.zeros_like(lse))

    assert torch.autograd.gradcheck(attend, (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
def test_low_precision_beats_materialised_attention(dtype: torch.dtype, causal: bool) -> None:
    """The 16-bit rule: at most twice the error of the same dtype's materialised attention, plus 1e-5."""
    inputs = [torch.randn(2, 150, h, 64, dtype=dtype).requires_grad_() for h in (4, 2, 2)]
    out, lse = fh.flash_attn_func(*inputs, causal=causal, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected, expected_lse = oracle(*exact, causal=causal)
    dout = torch.randn_like(out)
    naive = materialised(*inputs, causal=causal)
    bound = 2 * (naive - expected).abs().max() + 1e-5
    assert (out - expected).abs().max() <= bound
    assert_close(lse, expected_lse, 1e-5)
    mine = torch.autograd.grad(out, inputs, dout)
    yardstick = torch.autograd.grad(naive, inputs, dout)
    truth = torch.autograd.grad(expected, exact, dout.double())
    for a, b, c in zip(mine, yardstick, truth, strict=True):
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + 1e-5


def materialised(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def test_out_and_gradients_do_not_depend_on_the_run() -> None:
    inputs = [torch.randn(2, 300, h, 64).requires_grad_() for h in (6, 2, 2)]

    def run() -> list[torch.Tensor]:
        out = fh.flash_attn_func(*inputs, causal=True, deterministic=True)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]

    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    q, k, v = (torch.randn(200, h, 32) for h in (4, 2, 2))
    cu = torch.tensor([0, 50, 50, 130, 200]).int()
    out = fh.flash_attn_varlen_func(q, k, v, cu, cu, 80, 80, causal=True)
    alone = torch.tensor([0, 80]).int()
    one = slice(50, 130)
    expected = fh.flash_attn_varlen_func(q[one], k[one], v[one], alone, alone, 80, 80, causal=True)
    assert torch.equal(out[one], expected)


@pytest.mark.parametrize("sink", [False, True])
def test_unused_lse_and_unused_out(sink: bool) -> None:
    q, k, v = (torch.randn(1, 9, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    logits = torch.randn(2, dtype=torch.float64, requires_grad=True) if sink else None
    out, lse = fh.flash_attn_func(q, k, v, sink=logits, return_lse=True)
    expected_out, expected_lse = oracle(q, k, v, sink=logits)
    inputs = [q, k, *([logits] if logits is not None else [])]
    for mine, reference in ((out, expected_out), (lse, expected_lse)):
        found = torch.autograd.grad(mine.square().sum(), inputs, retain_graph=True)
        expected = torch.autograd.grad(reference.square().sum(), inputs, retain_graph=True)
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b, 1e-12)


@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_rows_that_see_nothing_keep_the_bits_of_their_sink(softcap: float) -> None:
    """In blocks with keys for other rows and in blocks without."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, n, heads, 16, generator=generator) for n, heads in ((90, 6), (30, 2), (30, 2)))
    sink = 4 * torch.randn(6, generator=generator)
    with small_tiles():
        out, lse = fh.flash_attn_func(q, k, v, causal=True, softcap=softcap, sink=sink, return_lse=True)
    assert torch.equal(lse[:, :, :60], sink.view(1, 6, 1).expand(1, 6, 60))
    assert not out[:, :60].any()
    assert (lse[:, :, 60:] > sink[:, None]).all()


def test_sink_of_minus_infinity_is_no_sink() -> None:
    q, k, v = (torch.randn(1, 7, 2, 8, requires_grad=True) for _ in range(3))
    sink = torch.full((2,), float("-inf"), requires_grad=True)
    out, lse = fh.flash_attn_func(q, k[:, :4], v[:, :4], causal=True, sink=sink, return_lse=True)
    plain, plain_lse = fh.flash_attn_func(q, k[:, :4], v[:, :4], causal=True, return_lse=True)
    assert_close(out, plain, 1e-6)
    assert_close(lse, plain_lse, 1e-6)
    (dsink,) = torch.autograd.grad(out.sum(), sink)
    assert torch.equal(dsink, torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_products(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What GPUs do, 16-bit operands with float32 sums, with a product that does so on a CPU: still within the 16-bit
    rule.
    """
    monkeypatch.setattr(tiles, "operand_dtype", lambda dtype, device: dtype)
    product = torch.bmm

    def bmm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        assert a.dtype == b.dtype == dtype
        assert out_dtype == torch.float32
        return product(a.float(), b.float())

    monkeypatch.setattr(torch, "bmm", bmm)
    inputs = [torch.randn(2, 100, h, 64, dtype=dtype).requires_grad_() for h in (4, 2, 2)]
    with small_tiles(elements=20000, block_k=32):
        out, lse = fh.flash_attn_func(*inputs, causal=True, softcap=20.0, return_lse=True)
        dout = torch.randn_like(out)
        found = torch.autograd.grad(out, inputs, dout)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected, expected_lse = oracle(*exact, causal=True, softcap=20.0)
    tolerance = 3e-3 if dtype == torch.float16 else 2e-2
    assert_close(out, expected, tolerance)
    assert_close(lse, expected_lse, 1e-5)
    for a, b in zip(found, torch.autograd.grad(expected, exact, dout.double()), strict=True):
        assert_close(a, b, tolerance)
