"""The tiled engine: attention in torch ops, any device and dtype, memory linear in tokens. Before it: ops.py; after it:
tiled_forward.py, tiled_backward.py.

It is what runs where there is no Hopper GPU and the specification that the kernels are tested against. Dense calls go
straight to the blocks; packed sequences are walked one by one, each vectorised over its heads, and their lengths are
read on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .. import checks
from .mask import Mask
from .tiled_backward import Gradients, backward
from .tiled_forward import forward
from .tiles import Problem, accumulator_dtype


class Settings(NamedTuple):
    """Numbers of a call: window bounds count keys, -1 is unbounded."""

    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float

    def problem(self, seqlen_q: int, seqlen_k: int) -> Problem:
        """These numbers on sequences of these lengths."""
        return Problem(Mask(seqlen_q, seqlen_k, self.window_left, self.window_right), self.softmax_scale, self.softcap)


class Packing(NamedTuple):
    """Where packed sequences begin and how long they are."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int

    def slices(self, total_q: int, total_k: int) -> Iterator[tuple[slice, slice]]:
        """Each sequence's rows of q and of k, checked."""
        q_offsets, k_offsets = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        q_used = None if self.seqused_q is None else self.seqused_q.tolist()
        k_used = None if self.seqused_k is None else self.seqused_k.tolist()
        q_lengths = checks.sequence_lengths(q_offsets, q_used, total_q, self.max_seqlen_q, "q")
        k_lengths = checks.sequence_lengths(k_offsets, k_used, total_k, self.max_seqlen_k, "k")
        for b in range(len(q_lengths)):
            yield (
                slice(q_offsets[b], q_offsets[b] + q_lengths[b]),
                slice(k_offsets[b], k_offsets[b] + k_lengths[b]),
            )


def dense_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch, seqlen_q, heads, head_dim_v) and lse (batch, heads, seqlen_q)."""
    return forward(q, k, v, sink, settings.problem(q.shape[1], k.shape[1]))


def dense_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
    settings: Settings,
) -> Gradients:
    """dq, dk, dv, dsink from the forward's own inputs and results."""
    return backward(dout, dlse, q, k, v, out, lse, sink, settings.problem(q.shape[1], k.shape[1]))


def packed_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, packing: Packing, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (total_q, heads, head_dim_v) and lse (heads, total_q); rows of no sequence get out 0 and lse -inf."""
    total_q, heads, _ = q.shape
    out = q.new_zeros(total_q, heads, v.shape[-1])
    lse = q.new_full((heads, total_q), -math.inf, dtype=accumulator_dtype(q.dtype))
    for rows, keys in packing.slices(total_q, k.shape[0]):
        problem = settings.problem(rows.stop - rows.start, keys.stop - keys.start)
        one_out, one_lse = forward(q[None, rows], k[None, keys], v[None, keys], sink, problem)
        out[rows], lse[:, rows] = one_out[0], one_lse[0]
    return out, lse


def packed_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
    packing: Packing,
    settings: Settings,
) -> Gradients:
    """dq, dk, dv, dsink of packed sequences; tokens of no sequence get gradient 0."""
    # Contiguous whatever the inputs' strides, and zero for tokens that no sequence holds.
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dsink = None if sink is None else torch.zeros(sink.shape, dtype=lse.dtype, device=sink.device)
    for rows, keys in packing.slices(q.shape[0], k.shape[0]):
        one = backward(
            dout[None, rows],
            None if dlse is None else dlse[None, :, rows],
            q[None, rows],
            k[None, keys],
            v[None, keys],
            out[None, rows],
            lse[None, :, rows],
            None if sink is None else sink.to(lse.dtype),
            settings.problem(rows.stop - rows.start, keys.stop - keys.start),
        )
        dq[rows], dk[keys], dv[keys] = one.dq[0], one.dk[0], one.dv[0]
        if dsink is not None and one.dsink is not None:
            dsink += one.dsink
    return Gradients(dq, dk, dv, None if dsink is None or sink is None else dsink.to(sink.dtype))
