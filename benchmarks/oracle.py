"""Materialised attention and its gradients on the GPU, in float64 as the oracle and in 16 bit as the yardstick: chosen
rows of a head forward, whole heads backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

CHECKED_ROWS = 64  # queries compared at each of three places of the sequence
CHUNK_ROWS = 2048  # queries whose scores are materialised at once
GRADIENTS = ("dq", "dk", "dv")
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def sampled_rows(seqlen: int, count: int = CHECKED_ROWS, device: str = "cuda") -> torch.Tensor:
    """Row numbers at the start, the middle and the end of a sequence: where masks and ragged tiles go wrong."""
    starts = {0, max(0, seqlen // 2 - count // 2), max(0, seqlen - count)}
    rows = {row for start in starts for row in range(start, min(seqlen, start + count))}
    return torch.tensor(sorted(rows), device=device, dtype=torch.long)


def _hidden(diagonal: torch.Tensor, seqlen_k: int, causal: bool, left: int) -> torch.Tensor:
    """bool (rows, seqlen_k): which keys a row does not see. diagonal: the key under each row's own position."""
    keys = torch.arange(seqlen_k, device=diagonal.device)[None, :]
    right = keys > diagonal[:, None] if causal else torch.zeros_like(keys, dtype=torch.bool)
    return right | (keys < diagonal[:, None] - left) if left >= 0 else right


def attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    seqlen_q: int,
    causal: bool,
    dtype: torch.dtype = torch.float64,
    softmax_scale: float | None = None,
    left: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Materialised attention of chosen rows of one head, computed in `dtype`, bottom-right causal.

    Args:
        q: (rows, head_dim), already gathered. k: (seqlen_k, head_dim). v: (seqlen_k, head_dim_v).
        rows: the position of each row of q in its sequence of seqlen_q queries.
        left: keys before its own that a query sees, -1: all.

    Returns:
        out (rows, head_dim_v) and lse (rows); a row that sees no key gives 0 and -inf.
    """
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scale = q.size(1) ** -0.5 if softmax_scale is None else softmax_scale
    scores = q @ k.T * scale
    scores = scores.masked_fill(_hidden(rows + k.size(0) - seqlen_q, k.size(0), causal, left), -math.inf)
    lse = scores.logsumexp(-1)
    return torch.nan_to_num(scores.softmax(-1), nan=0.0) @ v, lse


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out of q's dtype and lse float32 by materialised float32 attention, a head and a few rows at a time."""
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads, v.size(3)))
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    group = heads // k.size(2)
    for b in range(batch):
        for h in range(heads):
            for rows in torch.arange(seqlen_q, device=q.device).split(CHUNK_ROWS):
                one = (q[b, rows, h], k[b, :, h // group], v[b, :, h // group], rows, seqlen_q, causal)
                exact, exact_lse = attend_rows(*one, dtype=torch.float32, softmax_scale=softmax_scale)
                out[b, rows, h] = exact.to(q.dtype)
                lse[b, h, rows] = exact_lse
    return out, lse


def head_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    causal: bool,
    dtype: torch.dtype,
    softmax_scale: float | None = None,
    left: int = -1,
) -> Tensors:
    """dq, dk and dv of one kv head and the query heads that read it, by autograd through materialised scores in
    `dtype`.

    Args:
        q: (group, seqlen_q, head_dim); k: (seqlen_k, head_dim); v: (seqlen_k, head_dim_v).
        dout: (group, seqlen_q, head_dim_v).
        left: keys before its own that a query sees, -1: all.
    """
    group, seqlen_q, seqlen_k = q.size(0), q.size(1), k.size(0)
    scale = q.size(2) ** -0.5 if softmax_scale is None else softmax_scale
    with torch.enable_grad():
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        keys, values = (x[None].expand(group, -1, -1) for x in leaves[1:])
        scores = leaves[0] @ keys.transpose(1, 2) * scale
        diagonal = torch.arange(seqlen_q, device=q.device) + seqlen_k - seqlen_q
        hidden = _hidden(diagonal, seqlen_k, causal, left)
        dead = hidden.all(1, keepdim=True)
        # A row that sees nothing would be NaN, and so would its gradients: finite scores, then no weight.
        scores = scores.masked_fill(hidden & ~dead, -math.inf)
        weights = scores.softmax(-1).masked_fill(dead, 0.0)
        dq, dk, dv = torch.autograd.grad(weights @ values, leaves, dout.to(dtype))
    return dq, dk, dv


@dataclass
class GradientErrors:
    """Largest errors of dq, dk and dv over the heads compared, those of the same-dtype autograd, elements not
    written."""

    error: dict[str, float]
    plain: dict[str, float]
    nan: int

    @property
    def wrong(self) -> list[str]:
        """What breaks the 16-bit rule; empty where nothing does."""
        found = [f"{self.nan} elements are NaN or were never written"] if self.nan else []
        for name in GRADIENTS:
            allowed = 2 * self.plain[name] + 1e-5
            if not self.error[name] <= allowed:
                found.append(f"{name} max error {self.error[name]:.2e}, allowed {allowed:.2e}")
        return found


def gradient_errors(
    gradients: Sequence[torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    causal: bool,
    softmax_scale: float | None = None,
    left: int = -1,
) -> GradientErrors:
    """Compares the first kv head of the first batch entry and the last of the last, every row of them."""
    group = q.size(2) // k.size(2)
    result = GradientErrors(dict.fromkeys(GRADIENTS, 0.0), dict.fromkeys(GRADIENTS, 0.0), 0)
    result.nan = sum(int(x.isnan().sum().item()) for x in gradients)
    for b, h in dict.fromkeys([(0, 0), (q.size(0) - 1, k.size(2) - 1)]):
        heads = slice(h * group, (h + 1) * group)
        one = (q[b, :, heads].transpose(0, 1), k[b, :, h], v[b, :, h], dout[b, :, heads].transpose(0, 1), causal)
        exact = head_gradients(*one, torch.float64, softmax_scale, left)
        plain = head_gradients(*one, q.dtype, softmax_scale, left)
        mine = (gradients[0][b, :, heads].transpose(0, 1), gradients[1][b, :, h], gradients[2][b, :, h])
        for name, ours, right, yardstick in zip(GRADIENTS, mine, exact, plain, strict=True):
            for errors, value in ((result.error, ours), (result.plain, yardstick)):
                difference = (value.double() - right).abs().nan_to_num(math.inf).amax().item()
                errors[name] = max(errors[name], difference)
    return result
