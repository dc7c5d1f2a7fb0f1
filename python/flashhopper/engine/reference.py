"""The oracle: attention in float64 with materialised scores, as plain as possible. Before it: tests and doctor.py;
after it: nothing.

It shares no code with the engines that it judges (not even the mask), works under autograd, and so is the gradient
oracle too.
"""

from __future__ import annotations

import math

import torch

from .. import checks


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    *,
    sink: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v in float64, O(seqlen_q * seqlen_k) memory (Vaswani et al. 2017, equation 1).

    Args:
        q: (batch, seqlen_q, heads, head_dim), or packed (total_q, heads, head_dim) with cu_seqlens_q and cu_seqlens_k.
        k, v: (batch, seqlen_k, kv_heads, head_dim) and (..., head_dim_v), or packed (total_k, ...).
        softmax_scale: default 1 / sqrt(head_dim).
        causal, window_size, softcap, sink: as in flash_attn_func.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), offsets of the packed sequences.
        seqused_q, seqused_k: int32 (batch,), leading positions of each sequence that exist; dense inputs accept
            seqused_k alone or both.

    Returns:
        out float64, q's shape with head_dim_v; lse float64 natural logarithm of the softmax denominator, sink included,
        (batch, heads, seqlen_q) or (heads, total_q). Rows that see nothing: out 0, lse -inf (the sink's logit with a
        sink).
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = checks.normalize_window(causal, window_size)
    q, k, v = q.double(), k.double(), v.double()
    sink = None if sink is None else sink.double()
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        return _packed(q, k, v, scale, left, right, softcap, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    if seqused_q is None and seqused_k is None:
        return _dense(q, k, v, scale, left, right, softcap, sink)
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_zeros(batch, seqlen_q, heads, v.shape[-1])
    lse = q.new_full((batch, heads, seqlen_q), -math.inf)
    for b in range(batch):
        rows = seqlen_q if seqused_q is None else int(seqused_q[b])
        keys = k.shape[1] if seqused_k is None else int(seqused_k[b])
        one = slice(b, b + 1)
        out[one, :rows], lse[one, :, :rows] = _dense(
            q[one, :rows], k[one, :keys], v[one, :keys], scale, left, right, softcap, sink
        )
    return out, lse


def _packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    left: int,
    right: int,
    softcap: float,
    sink: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf)
    for b in range(cu_seqlens_q.numel() - 1):
        q_begin, k_begin = int(cu_seqlens_q[b]), int(cu_seqlens_k[b])
        q_end = int(cu_seqlens_q[b + 1]) if seqused_q is None else q_begin + int(seqused_q[b])
        k_end = int(cu_seqlens_k[b + 1]) if seqused_k is None else k_begin + int(seqused_k[b])
        one_out, one_lse = _dense(
            q[None, q_begin:q_end], k[None, k_begin:k_end], v[None, k_begin:k_end], scale, left, right, softcap, sink
        )
        out[q_begin:q_end], lse[:, q_begin:q_end] = one_out[0], one_lse[0]
    return out, lse


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    left: int,
    right: int,
    softcap: float,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    seqlen_q, heads, seqlen_k, kv_heads = q.shape[1], q.shape[2], k.shape[1], k.shape[2]
    if kv_heads != heads:
        group = heads // max(kv_heads, 1)
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(seqlen_q, device=q.device)[:, None]
    j = torch.arange(seqlen_k, device=q.device)[None, :]
    distance = j - (i + seqlen_k - seqlen_q)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden = hidden | (distance < -left)
    if right >= 0:
        hidden = hidden | (distance > right)
    scores = scores.masked_fill(hidden, -math.inf)
    if sink is not None:
        # The sink is one more key that every query sees and that has no value.
        scores = torch.cat((scores, sink[None, :, None, None].expand(scores.shape[0], -1, seqlen_q, 1)), dim=-1)
    if scores.shape[-1] == 0:
        empty = q.sum(-1, keepdim=True) * 0.0
        return empty.expand(*q.shape[:3], v.shape[-1]), (empty[..., 0] - math.inf).transpose(1, 2)
    largest = scores.amax(dim=-1, keepdim=True).detach()
    largest = torch.where(torch.isneginf(largest), torch.zeros_like(largest), largest)
    weights = torch.exp(scores - largest)
    total = weights.sum(dim=-1, keepdim=True)
    seen = total != 0  # NaN stays visible
    safe = torch.where(seen, total, torch.ones_like(total))
    lse = torch.where(seen, torch.log(safe) + largest, torch.full_like(total, -math.inf))[..., 0]
    weights = (weights / safe)[..., :seqlen_k]
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse
