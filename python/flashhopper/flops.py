"""Floating-point operations of the operators, for torch.utils.flop_counter and explain(). Before it: __init__.py;
after it: engine/mask.py (how many scores the mask keeps).

Only kept (query, key) pairs count, 2 operations a multiply-add: the forward has two products, scores and output; the
backward five, for it recomputes the scores. Packed sequences are counted by their lengths where those are at hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import ops as _ops  # noqa: F401 - defines the operators
from .engine.mask import Mask
from .fp8 import operators as _operators  # noqa: F401 - and the 8-bit ones


def forward_flops(kept: int, heads: int, head_dim: int, head_dim_v: int) -> int:
    """Q K^T and P V over `kept` (query, key) pairs, summed over the batch, of each head."""
    return 2 * kept * heads * (head_dim + head_dim_v)


def backward_flops(kept: int, heads: int, head_dim: int, head_dim_v: int) -> int:
    """Q K^T again, dS K and dS^T Q; dO V^T and P^T dO."""
    return 2 * kept * heads * (3 * head_dim + 2 * head_dim_v)


def _kept_dense(q: torch.Tensor, k: torch.Tensor, left: int, right: int) -> int:
    return q.shape[0] * Mask(q.shape[1], k.shape[1], left, right).kept()


def is_fake(packing: tuple[Any, ...]) -> bool:
    """Whether the offsets of packed sequences hold no numbers."""
    return any(type(x) is not torch.Tensor or x.is_meta for x in packing[:2])


def packed_lengths(packing: tuple[Any, ...], total_q: int, total_k: int) -> list[tuple[int, int]]:
    """Queries and keys of each sequence, read on the host; packing is as of checks.packed. As the kernels have them
    (cpp/core/seqlen.hpp): cut off at the ends of the tensors. Where there are only fakes, the longest's.
    """
    cu_q, cu_k, used_q, used_k, max_q, max_k = packing
    if is_fake(packing):
        return [(max_q, max_k)] * int(cu_q.shape[0] - 1)
    sides = ((cu_q, used_q, total_q), (cu_k, used_k, total_k))
    of_queries, of_keys = (_lengths(cu, used, total) for cu, used, total in sides)
    return list(zip(of_queries, of_keys, strict=True))


def _lengths(cu_seqlens: torch.Tensor, used: torch.Tensor | None, total: int) -> list[int]:
    lengths = cu_seqlens.clamp(0, total).diff().clamp(min=0)
    return (lengths if used is None else used.clamp(min=0).minimum(lengths)).tolist()


def _kept_packed(q: torch.Tensor, k: torch.Tensor, packing: tuple[Any, ...], left: int, right: int) -> int:
    lengths = packed_lengths(packing, q.shape[0], k.shape[0])
    return sum(Mask(sq, sk, left, right).kept() for sq, sk in lengths)


@register_flop_formula(torch.ops.flashhopper.forward, get_raw=True)
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: Any,
    scale: float,
    left: int,
    right: int,
    *_: Any,
    **__: Any,
) -> int:
    return forward_flops(_kept_dense(q, k, left, right), q.shape[2], q.shape[3], v.shape[3])


@register_flop_formula(torch.ops.flashhopper.backward, get_raw=True)
def _backward(
    dout: torch.Tensor, dlse: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **_: Any
) -> int:
    left, right = rest[4:6]  # after out, lse, sink, softmax_scale
    return backward_flops(_kept_dense(q, k, left, right), q.shape[2], q.shape[3], v.shape[3])


@register_flop_formula(torch.ops.flashhopper.varlen_forward, get_raw=True)
def _varlen_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **_: Any) -> int:
    left, right = rest[8:10]  # after six of packing, sink, softmax_scale
    return forward_flops(_kept_packed(q, k, rest[:6], left, right), q.shape[1], q.shape[2], v.shape[2])


@register_flop_formula(torch.ops.flashhopper.varlen_backward, get_raw=True)
def _varlen_backward(
    dout: torch.Tensor, dlse: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **_: Any
) -> int:
    packing, (left, right) = rest[2:8], rest[10:12]  # out and lse come first, then as in varlen_forward
    return backward_flops(_kept_packed(q, k, packing, left, right), q.shape[1], q.shape[2], v.shape[2])


@register_flop_formula(torch.ops.flashhopper.fp8_forward, get_raw=True)
def _fp8_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    recipe: str,
    scale: float,
    left: int,
    right: int,
    *_: Any,
    **__: Any,
) -> int:
    return forward_flops(_kept_dense(q, k, left, right), q.shape[2], q.shape[3], v.shape[3])


@register_flop_formula(torch.ops.flashhopper.forward8, get_raw=True)
def _forward8(q8: torch.Tensor, k8: torch.Tensor, *rest: Any, **_: Any) -> int:
    _, head_dim, head_dim_v, _, _, left, right = rest[7:14]  # after v8 and six of scales and means
    return forward_flops(_kept_dense(q8, k8, left, right), q8.shape[2], head_dim, head_dim_v)


@register_flop_formula(torch.ops.flashhopper.fp8_varlen_forward, get_raw=True)
def _fp8_varlen_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: str, *rest: Any, **_: Any) -> int:
    left, right = rest[7:9]  # after six of packing, softmax_scale
    return forward_flops(_kept_packed(q, k, rest[:6], left, right), q.shape[1], q.shape[2], v.shape[2])
