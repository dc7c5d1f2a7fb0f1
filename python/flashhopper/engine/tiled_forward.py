"""The tiled forward: FlashAttention's online softmax over blocks. Before it: tiled.py; after it: tiles.py, mask.py.

Dao et al. 2022, algorithm 1, with the rescaling of Milakov and Gimelshein 2018: a block of queries walks over the
blocks of keys that its mask leaves, carrying its running row maximum, row sum and unnormalised output.
"""

from __future__ import annotations

import math

import torch

from . import tiles
from .tiles import Problem


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, problem: Problem
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of equally long sequences.

    Args:
        q: (batch, seqlen_q, heads, head_dim); k: (batch, seqlen_k, kv_heads, head_dim); v: (batch, seqlen_k, kv_heads,
            head_dim_v).
        sink: (heads,) or None.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) of q's dtype, contiguous; lse (batch, heads, seqlen_q) float32
        (float64 for float64).
    """
    batch, seqlen_q, heads, _ = q.shape
    kv_heads, head_dim_v = v.shape[2:]
    sums = tiles.accumulator_dtype(q.dtype)
    if batch * heads * seqlen_q == 0:
        return q.new_empty(batch, seqlen_q, heads, head_dim_v), q.new_empty(batch, heads, seqlen_q, dtype=sums)
    group = heads // kv_heads
    operands = tiles.operand_dtype(q.dtype, q.device)
    folded_q = tiles.fold_queries(q, kv_heads).to(operands)
    folded_k, folded_v = tiles.fold_keys(k).to(operands), tiles.fold_keys(v).to(operands)
    folded_heads = batch * kv_heads
    out = q.new_empty(folded_heads, group, seqlen_q, head_dim_v)
    lse = q.new_empty(folded_heads, group, seqlen_q, dtype=sums)
    logits = None
    if sink is not None:
        logits = sink.to(sums).view(1, kv_heads, group).expand(batch, -1, -1).reshape(folded_heads, group, 1)
    blocks = tiles.choose_blocks(folded_heads, group, seqlen_q, k.shape[1], q.device)
    memory = tiles.scratch(blocks, group, folded_q)
    for h in tiles.spans(0, folded_heads, blocks.heads):
        some = slice(*h)
        for q_span in tiles.spans(0, seqlen_q, blocks.q):
            rows = slice(*q_span)
            block = folded_q[some, :, rows].reshape(h[1] - h[0], -1, q.shape[-1])
            acc, row_max, row_sum = _walk(
                block, folded_k[some], folded_v[some], problem, group, q_span, blocks.k, memory
            )
            shape = (h[1] - h[0], group, q_span[1] - q_span[0])
            _finish(
                acc.view(*shape, head_dim_v),
                row_max.view(shape),
                row_sum.view(shape),
                None if logits is None else logits[some],
                out[some, :, rows],
                lse[some, :, rows],
            )
    return tiles.unfold(out, batch), lse.view(batch, heads, seqlen_q)


def _walk(
    q_block: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    group: int,
    q_span: tuple[int, int],
    block_k: int,
    memory: tiles.Scratch | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One block of queries over all keys that it sees: unnormalised output, row maximum and row sum, in
    base 2.
    """
    folded_heads, rows, _ = q_block.shape
    sums = tiles.accumulator_dtype(q_block.dtype)
    acc = q_block.new_zeros(folded_heads, rows, v.shape[-1], dtype=sums)
    row_sum = acc.new_zeros(folded_heads, rows, 1)
    row_max = acc.new_full((folded_heads, rows, 1), -math.inf)
    first = True
    for k_span in tiles.spans(*problem.mask.key_range(*q_span), block_k):
        keys = slice(*k_span)
        tile, _ = tiles.scores(q_block, k[:, keys], problem, group, q_span, k_span, memory)
        new_max = torch.maximum(row_max, tile.amax(dim=-1, keepdim=True))
        # A row that has seen nothing keeps -inf; subtracting 0 instead makes its weights 2^-inf = 0.
        base = new_max.masked_fill(new_max == -math.inf, 0.0)
        weights = tile.sub_(base).exp2_()
        if first:
            row_sum = weights.sum(dim=-1, keepdim=True)
            acc = tiles.multiply(weights.to(v.dtype), v[:, keys])
            first = False
        else:
            decay = torch.exp2(row_max - base)
            row_sum.mul_(decay).add_(weights.sum(dim=-1, keepdim=True))
            acc.mul_(decay)
            tiles.add_product(acc, weights.to(v.dtype), v[:, keys])
        row_max = new_max
    return acc, row_max, row_sum


def _finish(
    acc: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Normalise one block into its place; the sink, a natural logit, joins the denominator only."""
    saw_nothing = row_max == -math.inf
    if sink is not None:
        logit = sink * tiles.LOG2_E
        largest = torch.maximum(row_max, logit)
        base = largest.masked_fill(largest == -math.inf, 0.0)
        decay = torch.exp2(row_max - base)
        row_sum = row_sum * decay + torch.exp2(logit - base)
        acc = acc * decay[..., None]
        row_max = largest
    empty = row_sum == 0
    out.copy_(acc / row_sum.masked_fill(empty, 1.0)[..., None])
    # log2(0) + (-inf) is -inf: rows that saw nothing need no case of their own.
    natural = row_sum.log2().add_(row_max).mul_(1.0 / tiles.LOG2_E)
    # Of a row that saw nothing, lse is the sink itself, as in the kernels: not rounded by way of base 2.
    lse.copy_(natural if sink is None else torch.where(saw_nothing, sink, natural))
