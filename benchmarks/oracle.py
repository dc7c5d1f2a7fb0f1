"""Sampled float64 attention: the value of a few queries of one head, at any sequence length, on the GPU."""

from __future__ import annotations

import math

import torch

CHECKED_ROWS = 64  # queries compared at each of three places of the sequence


def sampled_rows(seqlen: int, count: int = CHECKED_ROWS, device: str = "cuda") -> torch.Tensor:
    """Row numbers at the start, the middle and the end of a sequence: where masks and ragged tiles go wrong."""
    starts = {0, max(0, seqlen // 2 - count // 2), max(0, seqlen - count)}
    rows = {row for start in starts for row in range(start, min(seqlen, start + count))}
    return torch.tensor(sorted(rows), device=device, dtype=torch.long)


def attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    seqlen_q: int,
    causal: bool,
    dtype: torch.dtype = torch.float64,
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Materialised attention of chosen rows of one head, computed in `dtype`, bottom-right causal.

    Args:
        q: (rows, head_dim), already gathered. k: (seqlen_k, head_dim). v: (seqlen_k, head_dim_v).
        rows: the position of each row of q in its sequence of seqlen_q queries.

    Returns:
        out (rows, head_dim_v) and lse (rows); a row that sees no key gives 0 and -inf.
    """
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scale = q.size(1) ** -0.5 if softmax_scale is None else softmax_scale
    scores = q @ k.T * scale
    if causal:
        keys = torch.arange(k.size(0), device=k.device)
        scores = scores.masked_fill(keys[None, :] > (rows[:, None] + k.size(0) - seqlen_q), -math.inf)
    lse = scores.logsumexp(-1)
    return torch.nan_to_num(scores.softmax(-1), nan=0.0) @ v, lse
