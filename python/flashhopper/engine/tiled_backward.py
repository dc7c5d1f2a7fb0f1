"""The tiled backward: gradients by recomputing each tile from (out, lse). Before it: tiled.py; after it: tiles.py,
mask.py.

Dao et al. 2022, algorithm 4, with the query blocks outside, so that every sum has one order and gradients are
bit-reproducible. With P = exp(S - lse) and delta_i = sum_d dO_id O_id - dlse_i:  dV = P^T dO,  dS = P * (dO V^T -
delta),  dQ = scale dS K, dK = scale dS^T Q. The gradient through lse needs nothing but its place in delta.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from . import tiles
from .tiles import Problem


class Gradients(NamedTuple):
    """Gradients in the dtypes of their tensors; dsink is None without a sink."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsink: torch.Tensor | None


class _Block(NamedTuple):
    """One block of queries of some folded heads, (folded_heads, group * block_q, ...)."""

    q: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor  # in base 2; +inf for rows that saw nothing: their weights come out as 2^-inf = 0
    delta: torch.Tensor


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
    problem: Problem,
) -> Gradients:
    """Gradients of equally long sequences; shapes as in tiled_forward.forward, dout as out, dlse as lse or None."""
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads, head_dim_v = v.shape[1:]
    sums = tiles.accumulator_dtype(q.dtype)
    delta = (dout.to(sums) * out.to(sums)).sum(-1).transpose(1, 2)  # (batch, heads, seqlen_q)
    if dlse is not None:
        delta = delta - dlse
    dsink = None if sink is None else _sink_gradient(sink, lse, delta)
    if q.numel() == 0 or k.numel() == 0:
        return Gradients(q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), dsink)
    group, folded_heads = heads // kv_heads, batch * kv_heads
    operands = tiles.operand_dtype(q.dtype, q.device)
    folded_q, folded_dout = (tiles.fold_queries(x, kv_heads).to(operands) for x in (q, dout))
    folded_k, folded_v = (tiles.fold_keys(x).to(operands) for x in (k, v))
    folded_lse = lse.masked_fill(lse == -math.inf, math.inf).mul(tiles.LOG2_E).reshape(folded_heads, group, seqlen_q, 1)
    folded_delta = delta.reshape(folded_heads, group, seqlen_q, 1)
    dq = torch.empty_like(folded_q, dtype=q.dtype)
    dk, dv = torch.zeros_like(folded_k, dtype=sums), torch.zeros_like(folded_v, dtype=sums)
    blocks = tiles.choose_blocks(folded_heads, group, seqlen_q, seqlen_k, q.device)
    memory = tiles.scratch(blocks, group, folded_q), tiles.scratch(blocks, group, folded_q)
    for h in tiles.spans(0, folded_heads, blocks.heads):
        some, count = slice(*h), h[1] - h[0]
        for q_span in tiles.spans(0, seqlen_q, blocks.q):
            rows = slice(*q_span)
            block = _Block(
                folded_q[some, :, rows].reshape(count, -1, head_dim),
                folded_dout[some, :, rows].reshape(count, -1, head_dim_v),
                folded_lse[some, :, rows].reshape(count, -1, 1),
                folded_delta[some, :, rows].reshape(count, -1, 1),
            )
            step = _walk(
                block, folded_k[some], folded_v[some], dk[some], dv[some], problem, group, q_span, blocks.k, memory
            )
            dq[some, :, rows] = step.view(count, group, -1, head_dim)
    dk, dv = tiles.unfold(dk.to(k.dtype), batch), tiles.unfold(dv.to(v.dtype), batch)
    return Gradients(tiles.unfold(dq, batch), dk, dv, dsink)


def _walk(
    block: _Block,
    k: torch.Tensor,
    v: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    problem: Problem,
    group: int,
    q_span: tuple[int, int],
    block_k: int,
    memory: tuple[tiles.Scratch | None, tiles.Scratch | None],
) -> torch.Tensor:
    """One block of queries over all keys that it sees: adds to dk and dv in place, returns its dq."""
    dq = torch.zeros_like(block.q, dtype=dk.dtype)
    for k_span in tiles.spans(*problem.mask.key_range(*q_span), block_k):
        keys = slice(*k_span)
        tile, tanh = tiles.scores(block.q, k[:, keys], problem, group, q_span, k_span, memory[0])
        weights = tile.sub_(block.lse).exp2_()
        tiles.add_product(dv[:, keys], weights.to(v.dtype).mT, block.dout)
        dscores = tiles.multiply(block.dout, v[:, keys].mT, memory[1]).sub_(block.delta).mul_(weights)
        if tanh is not None:
            dscores.mul_(1.0 - tanh.square_())
        dscores = dscores.mul_(problem.softmax_scale).to(k.dtype)
        tiles.add_product(dq, dscores, k[:, keys])
        tiles.add_product(dk[:, keys], dscores.mT, block.q)
    return dq


def _sink_gradient(sink: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The sink is a key with value 0 and weight exp(sink - lse): its score's gradient is weight * (0 - delta)."""
    logit = sink.to(lse.dtype)[None, :, None]
    weight = torch.exp(logit - lse.masked_fill(lse == -math.inf, math.inf))
    return -(weight * delta).sum(dim=(0, 2)).to(sink.dtype)
