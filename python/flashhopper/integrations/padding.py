"""From a padded batch and its mask to packed sequences, without moving a row. Before it: transformers.py, diffusers.py;
after it: interface.py.

A padded batch of B rows is a packed one of 2 B sequences: each row is cut where its tokens begin, and only the second
part counts. So padding on either side needs no gathering of rows, and each row's masks are aligned to its own length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..interface import flash_attn_varlen_func

_CACHE = "_flashhopper_packing"


class Packing(NamedTuple):
    """The packing arguments of flash_attn_varlen_func, in its order but for seqused."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing, **options: Any) -> torch.Tensor:
    """Attention over (batch, seqlen, heads, head_dim) tensors whose rows, one behind the other, are packed so; rows of
    no sequence give 0.
    """
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
    *offsets, seqused_q, seqused_k = packing
    rows: tuple[Any, ...] = (flat_q, flat_k, flat_v, *offsets)
    out = flash_attn_varlen_func(*rows, seqused_q=seqused_q, seqused_k=seqused_k, **options)
    assert isinstance(out, torch.Tensor)
    return out.view(*q.shape[:3], v.shape[-1])


def remember(mask: torch.Tensor, key: object, make: Callable[[], Packing | None]) -> Packing | None:
    """make() once for this mask and key: the layers of a model share a mask, and making a packing reads it on the
    host.
    """
    if torch.compiler.is_compiling():
        return make()
    version = None if mask.is_inference() else mask._version  # inference tensors do not say when they change
    known: tuple[int | None, dict[object, Packing | None]] | None = getattr(mask, _CACHE, None)
    if known is None or known[0] != version:
        known = (version, {})
        setattr(mask, _CACHE, known)
    if key not in known[1]:
        known[1][key] = make()
    return known[1][key]


def pack_padded(valid: torch.Tensor, seqlen_q: int, aligned: bool) -> Packing | None:
    """The packing of a padded batch, or None where nothing is padded.

    Args:
        valid: bool (batch, seqlen_k), which keys exist: in each row one run of True.
        seqlen_q: rows of queries, the last of which belongs to the last key of `valid`.
        aligned: whether queries are tokens of the same sequence (causal attention, a window), so that padding has
            queries too, which then give 0. Otherwise every query sees every key that exists.

    Raises:
        ValueError: a row has gaps.
    """
    seqlen_k = valid.shape[1]
    counts = valid.sum(-1)
    starts = valid.int().argmax(-1)  # the first True; 0 where there is none
    ends = torch.where(counts > 0, seqlen_k - valid.flip(-1).int().argmax(-1), 0)
    gaps, padded = torch.stack([(ends - starts != counts).any(), (counts != seqlen_k).any()]).tolist()
    if gaps:
        raise ValueError(
            "attention_mask has zeros between ones: flashhopper takes padding on the left or on the right of each row; "
            "arbitrary masks are refused, take another attention implementation for them"
        )
    if not padded:
        return None
    keys = _pieces(starts, ends, seqlen_k)
    if aligned:
        shift = seqlen_k - seqlen_q
        queries = _pieces((starts - shift).clamp(0, seqlen_q), (ends - shift).clamp(0, seqlen_q), seqlen_q)
    else:
        queries = _pieces(torch.zeros_like(starts), torch.full_like(ends, seqlen_q), seqlen_q)
    return Packing(queries[0], keys[0], seqlen_q, seqlen_k, queries[1], keys[1])


def _pieces(starts: torch.Tensor, ends: torch.Tensor, seqlen: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets of (before the tokens, tokens and what follows) for each row, and how much of each exists."""
    rows = torch.arange(len(starts), device=starts.device) * seqlen
    offsets = torch.stack([rows, rows + starts], -1).flatten()
    offsets = torch.nn.functional.pad(offsets, (0, 1), value=len(starts) * seqlen)
    used = torch.stack([torch.zeros_like(starts), ends - starts], -1).flatten()
    return offsets.int(), used.int()


def pack_sequence_ids(ids: torch.Tensor) -> Packing:
    """The packing of rows that each hold several sequences: ids (batch, seqlen), integers that change where a new
    sequence begins.
    """
    batch, seqlen = ids.shape
    begins = torch.ones(ids.shape, dtype=torch.bool, device=ids.device)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    offsets = torch.nn.functional.pad(begins.flatten().nonzero().flatten(), (0, 1), value=batch * seqlen).int()
    return Packing(offsets, offsets, seqlen, seqlen)
