"""merge_attention: parts over disjoint keys make the whole, with gradients, empty parts and rows that see nothing."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers import assert_close, oracle

import flashhopper as fh


def test_parts_make_the_whole() -> None:
    q, k, v = (torch.randn(2, n, h, 8, dtype=torch.float64, requires_grad=True) for n, h in ((5, 4), (13, 2), (13, 2)))
    bounds = (0, 4, 4, 13)  # the middle part has no keys at all
    parts = [fh.flash_attn_func(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in itertools.pairwise(bounds)]
    out, lse = fh.merge_attention([part[0] for part in parts], [part[1] for part in parts])
    expected, expected_lse = oracle(q, k, v)
    assert_close(out, expected, 1e-12)
    assert_close(lse, expected_lse, 1e-12)
    found = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))
    truth = torch.autograd.grad(expected.square().sum() + expected_lse.sum(), (q, k, v))
    for a, b in zip(found, truth, strict=True):
        assert_close(a, b, 1e-11)


def test_stacked_packed_and_sixteen_bit() -> None:
    outs = torch.randn(3, 7, 2, 4).bfloat16()
    lses = torch.randn(3, 2, 7)
    out, lse = fh.merge_attention(outs, lses)
    weights = torch.softmax(lses, 0).transpose(1, 2)[..., None]
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert_close(out, (weights * outs).sum(0), 1e-2)
    assert_close(lse, torch.logsumexp(lses, 0), 1e-6)


def test_rows_that_nothing_sees() -> None:
    outs = torch.zeros(2, 1, 3, 1, 4, requires_grad=True)
    lses = torch.full((2, 1, 1, 3), -math.inf, requires_grad=True)
    out, lse = fh.merge_attention(outs, lses)
    assert torch.equal(out, torch.zeros(1, 3, 1, 4))
    assert torch.equal(lse, torch.full((1, 1, 3), -math.inf))
    gradients = torch.autograd.grad(out.sum(), (outs, lses))
    assert all(bool(torch.isfinite(g).all()) for g in gradients)


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ([], [], "outs has 0 parts"),
        ([torch.zeros(1, 2, 3, 4)], [], "outs has 1 parts, lses has 0"),
        ([torch.zeros(1, 2, 3, 4)], [torch.zeros(1, 2, 3)], r"lses\[0\] has \(1, 2, 3\): must be"),
        ([torch.zeros(1, 2, 3, 4)] * 2, [torch.zeros(1, 3, 2), torch.zeros(1, 3, 1)], "part 1 has shapes"),
    ],
)
def test_refusals(outs: list[torch.Tensor], lses: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fh.merge_attention(outs, lses)
