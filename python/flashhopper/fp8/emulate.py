"""The 8-bit kernel's arithmetic in torch operations, any device, memory linear in tokens. Before it: attention.py,
report and tests; after it: quantize.py, accumulator.py, engine/tiles.py, engine/mask.py.

Keys come in tiles of 128, the last visible tile first. In base 2, for row r and tile j,

    f = q_scale[r] softmax_scale log2(e) k_scale[j],   s = f (q . k)
    low = max(low, max s - 16),   m_new = max(max s, low),   p = 2^(s - m_new + 8)
    l = l 2^(m - m_new) + sum(e4m3(p)),   O = O 2^(m - m_new) v_scale[j + 1] / v_scale[j] + e4m3(p) @ v
    at the end  out = O v_scale / l + v_mean

m is the reference: the tile's own maximum, but at most 16 bits below the row's, whose bound is low. So probabilities
have e4m3's range in every tile, up to 2^8, and those are lost alone that are below 2^-34 of the row's largest. O is in
units of the scale of the tile added last: then no tile's product needs a factor of its own. A unit is never below
2^-64 of the largest scale of the row's tiles, for O might leave the range of float32. The row sum comes out of the
product itself, by a column of ones, so it is of p as it was rounded. The lse of a row is
(m - 8 + log2 l) ln 2 + softmax_scale lse_shift.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .. import checks
from ..engine import tiles
from ..engine.mask import Mask
from . import accumulator, formats
from .quantize import Fp8QKV, spread
from .recipe import TILE_KEYS

P_BITS = 8.0  # the largest probability is 2^8, below e4m3's 448
DROP_BITS = 16.0  # how far below a row's maximum the reference of a tile may fall
NOTHING = -1e38  # the reference of a row that has seen nothing, below every score
UNIT_BITS = 64.0  # powers of two that may lie between the units of a row's sums
ACCUMULATIONS = ("fp32", "14bit")
ROW_SUMS = ("exact", "rounded")


class _Settings(NamedTuple):
    mask: Mask
    group: int
    scores_14bit: bool
    sums_14bit: bool
    two_level: bool
    sums_rounded: bool


class _Keys(NamedTuple):
    """Keys and values of some folded heads, whole numbers of their 8-bit steps in the operands' dtype."""

    k: torch.Tensor  # (folded_heads, seqlen_k, D)
    v: torch.Tensor  # (folded_heads, seqlen_k, Dv)
    k_scale: torch.Tensor  # (folded_heads, 1, seqlen_k), or (folded_heads, 1, tiles) where a tile has one scale
    v_scale: torch.Tensor  # (folded_heads, 1, tiles)


def attention(
    qkv: Fp8QKV,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    *,
    accumulation: str = "fp32",
    two_level: bool | None = None,
    row_sum: str = "rounded",
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit attention of what quantize_fp8 returned.

    Args:
        softmax_scale: default 1 / sqrt(head_dim).
        causal, window_size: as in flash_attn_func.
        accumulation: "fp32", or "14bit": both products in Hopper's 8-bit accumulator (accumulator.py; slow; products of
            int8 stay exact, as they are there).
        two_level: default the recipe's; with "fp32" it makes no difference.
        row_sum: "exact" adds the probabilities before they are rounded to e4m3, "rounded" after, as the kernel does.
        out_dtype: default qkv.dtype, the 16-bit dtype of the inputs.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v), contiguous; lse float32 (batch, heads, seqlen_q), natural logarithm.
        A row that sees nothing gives out 0 and lse -inf.
    """
    if accumulation not in ACCUMULATIONS:
        raise ValueError(f"accumulation is {accumulation!r}: must be 'fp32' or '14bit'; the default is 'fp32'")
    if row_sum not in ROW_SUMS:
        raise ValueError(
            f"row_sum is {row_sum!r}: must be 'exact' or 'rounded'; the default is 'rounded', the kernel's"
        )
    scale = qkv.head_dim**-0.5 if softmax_scale is None else softmax_scale
    seqlen_q, seqlen_k = qkv.q.shape[1], qkv.seqlen_k
    left, right = checks.normalize_window(causal, window_size)
    mask = Mask(seqlen_q, seqlen_k, *checks.widen_window(left, right, seqlen_q, seqlen_k))
    group = qkv.q.shape[2] // max(qkv.k.shape[2], 1)
    levels = qkv.recipe.two_level if two_level is None else two_level
    is_14bit = accumulation == "14bit"
    settings = _Settings(mask, group, is_14bit and qkv.q.dtype != torch.int8, is_14bit, levels, row_sum == "rounded")
    with torch.autocast(qkv.q.device.type, enabled=False):  # it would round scores to 16 bits
        return _forward(qkv, scale, settings, qkv.dtype if out_dtype is None else out_dtype)


def _forward(
    qkv: Fp8QKV, scale: float, settings: _Settings, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, seqlen_q, heads, _ = qkv.q.shape
    kv_heads, group = qkv.k.shape[2], settings.group
    head_dim_v, device = qkv.head_dim_v, qkv.q.device
    if batch * heads * seqlen_q == 0:
        empty = torch.empty(batch, seqlen_q, heads, head_dim_v, dtype=out_dtype, device=device)
        return empty, torch.empty(batch, heads, seqlen_q, device=device)
    folded = batch * kv_heads
    # Every 8-bit value is a bfloat16 value: tensor cores may multiply them.
    operands = torch.float32 if settings.sums_14bit else tiles.operand_dtype(torch.bfloat16, device)
    keys = _fold_keys(qkv, operands)
    q = tiles.fold_queries(qkv.q.to(operands), kv_heads)
    factor = spread(qkv.q_scale, qkv.recipe.q_block, seqlen_q) * (scale * tiles.LOG2_E)
    factor = factor.reshape(folded, group, seqlen_q, 1)
    out = torch.empty(folded, group, seqlen_q, head_dim_v, dtype=out_dtype, device=device)
    lse = torch.empty(folded, group, seqlen_q, device=device)
    blocks = tiles.choose_blocks(folded, group, seqlen_q, TILE_KEYS, device)
    mean = None if qkv.v_mean is None else qkv.v_mean[..., :head_dim_v].reshape(folded, 1, head_dim_v)
    for h in tiles.spans(0, folded, blocks.heads):
        some, count = slice(*h), h[1] - h[0]
        own = _Keys(*(x[some] for x in keys))
        for q_span in tiles.spans(0, seqlen_q, blocks.q):
            rows = slice(*q_span)
            q_block = q[some, :, rows].reshape(count, -1, q.shape[-1])
            f_block = factor[some, :, rows].reshape(count, -1, 1)
            total, reference, row_sum = _walk(q_block, f_block, own, q_span, settings)
            has_seen = row_sum > 0
            total = total[..., :head_dim_v] / row_sum.masked_fill(~has_seen, 1.0)
            if mean is not None:
                total = torch.where(has_seen, total + mean[some], 0.0)
            out[some, :, rows] = total.view(count, group, -1, head_dim_v).to(out_dtype)
            # log2(0) is -inf: rows that saw nothing need no case of their own.
            exponent = row_sum.log2().add_(reference - P_BITS).mul_(1.0 / tiles.LOG2_E)
            lse[some, :, rows] = exponent.view(count, group, -1)
    lse = lse.view(batch, heads, seqlen_q)
    if qkv.lse_shift is not None:
        lse = lse + scale * qkv.lse_shift
    return tiles.unfold(out, batch), lse


def _fold_keys(qkv: Fp8QKV, operands: torch.dtype) -> _Keys:
    seqlen_k, recipe = qkv.seqlen_k, qkv.recipe
    folded = qkv.k.shape[0] * qkv.k.shape[2]
    k = tiles.fold_keys(qkv.k.to(operands))
    v = formats.restore_keys(qkv.v.view(torch.uint8)).view(formats.E4M3)
    v = v.to(operands).reshape(folded, v.shape[2], v.shape[3]).mT[:, :seqlen_k].contiguous()
    count = -(-seqlen_k // TILE_KEYS)

    def a_tile(scale: torch.Tensor, block: int) -> torch.Tensor:
        """One scale for each tile of 128 keys."""
        return spread(scale, block // TILE_KEYS, count).reshape(folded, 1, count)

    k_scale = qkv.k_scale.reshape(folded, 1, -1) if recipe.k_block == 1 else a_tile(qkv.k_scale, recipe.k_block)
    return _Keys(k, v, k_scale, a_tile(qkv.v_scale, recipe.v_block))


def _walk(
    q_block: torch.Tensor, factor: torch.Tensor, keys: _Keys, q_span: tuple[int, int], settings: _Settings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One block of queries over the keys that it sees: unnormalised output, reference and row sum, in base 2."""
    folded_heads, rows, _ = q_block.shape
    total = torch.zeros(folded_heads, rows, keys.v.shape[-1], device=q_block.device)
    row_sum = total.new_zeros(folded_heads, rows, 1)
    reference = total.new_full((folded_heads, rows, 1), NOTHING)
    lowest = reference
    begin, end = settings.mask.key_range(*q_span)
    if begin >= end:
        return total, reference, row_sum
    largest = torch.zeros_like(keys.v_scale[..., :1])
    unit = torch.ones_like(largest)
    for j in range((end - 1) // TILE_KEYS, begin // TILE_KEYS - 1, -1):
        span = (j * TILE_KEYS, min((j + 1) * TILE_KEYS, keys.k.shape[1]))
        v_scale, unit_before = keys.v_scale[..., j : j + 1], unit
        largest = torch.maximum(largest, v_scale)
        unit = torch.maximum(v_scale, largest * 2.0**-UNIT_BITS)
        change = torch.where(unit == 0, 1.0, unit_before / unit)
        tile = _scores(q_block, factor, keys, q_span, span, settings)
        block_max = tile.amax(dim=-1, keepdim=True)
        lowest = torch.maximum(lowest, block_max - DROP_BITS)
        moved = torch.maximum(block_max, lowest)
        rescale = torch.exp2(reference - moved)
        weights = tile.sub_(moved - P_BITS).exp2_()
        sums = None if settings.sums_rounded else weights.sum(dim=-1, keepdim=True)
        weights = formats.round_e4m3_(weights)
        row_sum = row_sum * rescale + (weights.sum(dim=-1, keepdim=True) if sums is None else sums)
        total = _add_values(total.mul_(rescale * change), weights, keys.v[:, slice(*span)], settings)
        reference = moved
    total *= unit
    return total, reference, row_sum


def _scores(
    q_block: torch.Tensor,
    factor: torch.Tensor,
    keys: _Keys,
    q_span: tuple[int, int],
    k_span: tuple[int, int],
    settings: _Settings,
) -> torch.Tensor:
    """One tile of masked scores in base 2, (folded_heads, group * block_q, keys), -inf where masked."""
    k = keys.k[:, slice(*k_span)]
    if settings.scores_14bit:
        start = q_block.new_zeros(q_block.shape[0], q_block.shape[1], k.shape[1])
        tile = accumulator.add_product(start, q_block, k.mT)
    else:
        tile = tiles.multiply(q_block, k.mT)
    if keys.k_scale.shape[-1] == keys.v_scale.shape[-1]:
        j = k_span[0] // TILE_KEYS
        tile.mul_(factor * keys.k_scale[..., j : j + 1])
    else:  # a scale for each key
        tile.mul_(factor).mul_(keys.k_scale[..., slice(*k_span)])
    if settings.mask.needs_predicate(*q_span, *k_span):
        hidden = ~settings.mask.keep(*q_span, *k_span, tile.device)
        tile.view(tile.shape[0], settings.group, *hidden.shape).masked_fill_(hidden, -math.inf)
    return tile


def _add_values(total: torch.Tensor, weights: torch.Tensor, v: torch.Tensor, settings: _Settings) -> torch.Tensor:
    """total + weights @ v, as the accumulator would have it."""
    if not settings.sums_14bit:
        tiles.add_product(total, weights.to(v.dtype), v)
        return total
    if settings.two_level:
        return total.add_(accumulator.add_product(torch.zeros_like(total), weights, v))
    return accumulator.add_product(total, weights, v)
