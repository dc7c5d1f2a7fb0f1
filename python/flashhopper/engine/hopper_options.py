"""The Hopper forward with what the short way of hopper.py does not have: packed sequences, softcap and sink. Before it:
library.py; after it: cpp/bindings/module.cpp.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..checks import DenseShape, PackedShape
from . import hopper
from .tiled import Packing


class Options(NamedTuple):
    """The numbers of a call."""

    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    sm_margin: int
    pack_gqa: bool | None = None


def dense_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    sizes: DenseShape,
    options: Options,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch, seqlen_q, heads, head_dim_v) and lse (batch, heads, seqlen_q), as hopper.forward."""
    batch, seqlen_q, heads, _, _, _, head_dim_v = sizes
    out = q.new_empty((batch, seqlen_q, heads, head_dim_v)) if out is None else _writable(out)
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    if lse.numel() > 0:
        _launch(q, k, v, out, lse, sink, None, sizes, options)
    return out, lse


def packed_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    packing: Packing,
    sizes: PackedShape,
    options: Options,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (total_q, heads, head_dim_v) and lse (heads, total_q). Lengths are read on the device, when the call runs
    there: a captured graph sees those of its replay. Offsets beyond the tensors are cut off at their end.
    """
    batch, total_q, heads, head_dim, _, kv_heads, head_dim_v = sizes
    out = q.new_empty((total_q, heads, head_dim_v)) if out is None else _writable(out)
    lse = q.new_empty((heads, total_q), dtype=torch.float32)
    if lse.numel() > 0:
        longest = (batch, packing.max_seqlen_q, heads, head_dim, packing.max_seqlen_k, kv_heads, head_dim_v)
        _launch(q[None], k[None], v[None], out[None], lse, sink, packing, longest, options)
    return out, lse


def _writable(out: torch.Tensor) -> torch.Tensor:
    """Memory of the caller, refused where the kernels cannot write."""
    if (reason := hopper.copy_reason(out if out.dim() == 4 else out[None])) is not None:
        raise ValueError(f"out cannot be written in 16-byte pieces: {reason}")
    return out


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
    packing: Packing | None,
    sizes: DenseShape,
    options: Options,
) -> None:
    """Launch on the current stream of q's device; tensors are (batch, seqlen, heads, head_dim), packed ones batch 1."""
    index = q.get_device()
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            return _launch(q, k, v, out, lse, sink, packing, sizes, options)
    stream = torch._C._cuda_getCurrentRawStream(index)
    # Held until the launch: while a graph is captured nobody else owns it.
    _held, workspace, *_ = hopper.borrow_workspace(index, stream)
    readable = [hopper.readable(x) for x in (q, k, v, out)]
    logits = None if sink is None else sink.detach().to(torch.float32).contiguous()
    totals, memory = (0, 0), None
    offsets: list[torch.Tensor | None] = [None] * 4
    if packing is not None:
        totals = (q.shape[1], k.shape[1])
        offsets = [None if x is None else x.contiguous() for x in packing[:4]]
        memory = torch.empty(
            hopper.module.packed_workspace_bytes(sizes[0], totals[0]), dtype=torch.uint8, device=q.device
        )
    addresses = [0 if x is None else x.data_ptr() for x in (logits, *offsets, memory)]
    try:
        hopper.module.forward(
            [(x.data_ptr(), *strides) for x, strides in readable],
            (lse.data_ptr(), workspace, *addresses),
            hopper.problem(sizes, options.window_left, options.window_right),
            totals,
            options.softmax_scale,
            options.softcap,
            hopper.dtype_code(q.dtype),
            options.sm_margin,
            hopper.pack_code(options.pack_gqa),
            stream,
        )
    except RuntimeError as error:
        window = (options.window_left, options.window_right)
        plan = hopper.forward_plan(sizes, q.dtype, *window, options.sm_margin, options.pack_gqa, q.device, totals)
        raise RuntimeError(f"{error}; plan: {plan}") from error
