"""Combine attention over parts of the keys into attention over all of them. Before it: your code; after it: nothing.

With lse_i the logarithm of part i's softmax denominator, out = sum_i exp(lse_i - lse) out_i and lse = log sum_i
exp(lse_i) (Milakov and Gimelshein 2018; how split KV, a shared prefix and ring attention are put together).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def merge_attention(
    outs: Sequence[torch.Tensor] | torch.Tensor, lses: Sequence[torch.Tensor] | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial results of the same queries over disjoint sets of keys; differentiable, in torch ops.

    Args:
        outs: parts of shape (batch, seqlen_q, heads, head_dim_v), or packed (total_q, heads, head_dim_v); a sequence
            or one tensor stacked along dimension 0.
        lses: their lse of shape (batch, heads, seqlen_q) or (heads, total_q), natural logarithm.

    Returns:
        out in the dtype of the parts, lse in the dtype of theirs; rows that no part saw: out 0, lse -inf.

    Raises:
        ValueError: no parts, or shapes that do not fit.
    """
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs has {len(outs)} parts, lses has {len(lses)}: must be equal and at least 1")
    shape, lse_shape = outs[0].shape, lses[0].shape
    if len(shape) not in (3, 4) or (*shape[:-3], shape[-2], shape[-3]) != tuple(lse_shape):
        raise ValueError(
            f"outs[0] has shape {tuple(shape)}, lses[0] has {tuple(lse_shape)}: "
            "must be (batch, seqlen_q, heads, head_dim_v) with (batch, heads, seqlen_q), "
            "or (total_q, heads, head_dim_v) with (heads, total_q)"
        )
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != shape or lse.shape != lse_shape:
            raise ValueError(
                f"part {i} has shapes {tuple(out.shape)} and {tuple(lse.shape)}, "
                f"part 0 has {tuple(shape)} and {tuple(lse_shape)}: must be equal"
            )
    logs = torch.stack(lses)
    largest = logs.detach().amax(dim=0)
    largest = largest.masked_fill(largest == -math.inf, 0.0)
    weights = torch.exp(logs - largest)
    total = weights.sum(dim=0)
    empty = total == 0
    safe = total.masked_fill(empty, 1.0)
    lse = (safe.log() + largest).masked_fill(empty, -math.inf)
    shares = (weights / safe).transpose(-1, -2).unsqueeze(-1)  # (parts, ..., seqlen_q, heads, 1)
    merged = sum(share * out for share, out in zip(shares, outs, strict=True))
    assert isinstance(merged, torch.Tensor)
    return merged.to(outs[0].dtype), lse
