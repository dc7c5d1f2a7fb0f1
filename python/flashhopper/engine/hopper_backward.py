"""The Hopper engine's backward: from tensors to one call of the compiled module. Before it: library.py; after it:
cpp/bindings/module.cpp.

It recomputes the probabilities from (q, k, v, lse); dq is summed in a float workspace that torch's allocator lends for
the call.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..checks import DenseShape, PackedShape
from . import hopper

if TYPE_CHECKING:
    from .. import _C
    from .tiled import Packing

_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Numbers(NamedTuple):
    """The numbers of a call."""

    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    sm_margin: int
    deterministic: bool  # bit-equal gradients in every run; dq's sums then wait for one another


@lru_cache(maxsize=1024)
def _plan(
    problem: _C.Sizes, dtype: int, sm_margin: int, deterministic: bool, num_sms: int, totals: tuple[int, int]
) -> _C.Plan:
    plan: _C.Plan = hopper.module.backward_plan(problem, dtype, sm_margin, deterministic, num_sms, totals)
    return plan


def forget() -> None:
    """Drop the remembered plans (another compiled module makes others)."""
    _plan.cache_clear()


def backward_plan(
    sizes: DenseShape,
    dtype: torch.dtype,
    window_left: int,
    window_right: int,
    sm_margin: int,
    deterministic: bool,
    device: torch.device,
    totals: tuple[int, int] = (0, 0),
) -> _C.Plan:
    """What the compiled module would launch for the gradients of a problem of these sizes; totals: rows of q and k of
    a packed batch.
    """
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    problem = hopper.problem(sizes, window_left, window_right)
    return _plan(problem, hopper.dtype_code(dtype), sm_margin, deterministic, num_sms, totals)


def is_empty(sizes: DenseShape, has_sink: bool = False) -> bool:
    """Whether every gradient is zero for lack of queries or of keys. Without keys the lse is a sink's alone, and its
    gradient the sink's.
    """
    return hopper.is_empty(sizes) or (sizes[4] == 0 and not has_sink)


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
    sizes: DenseShape,
    numbers: Numbers,
) -> _Gradients:
    """Launch the dense backward on the current stream of q's device.

    Args:
        dout, out: (batch, seqlen_q, heads, head_dim_v); dlse, lse: float32 (batch, heads, seqlen_q), dlse may be None.
        q, k, v: as of the forward, float16 or bfloat16.
        sink: (heads,), any floating-point dtype, or None.
        sizes: what checks.dense returned for them.

    Returns:
        dq, dk, dv, contiguous, of the shapes and dtype of q, k, v; dsink of the sink's dtype, empty without one.

    Raises:
        RuntimeError: a CUDA call failed; the message holds it and the plan.
    """
    if is_empty(sizes, sink is not None):
        return _zeros(q, k, v, sink)
    return _launch((q, k, v, out, dout), lse, dlse, sink, None, sizes, numbers)


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
    sizes: PackedShape,
    numbers: Numbers,
) -> _Gradients:
    """The same of packed sequences: tensors (total, heads, head_dim), lse and dlse (heads, total_q). Rows of no
    sequence get gradient 0. Lengths are read on the device, when the call runs there.
    """
    batch, total_q, heads, head_dim, total_k, kv_heads, head_dim_v = sizes
    longest = (batch, packing.max_seqlen_q, heads, head_dim, packing.max_seqlen_k, kv_heads, head_dim_v)
    if is_empty((1, total_q, heads, head_dim, total_k, kv_heads, head_dim_v), sink is not None):
        return _zeros(q, k, v, sink)
    tensors = (q[None], k[None], v[None], out[None], dout[None])
    dq, dk, dv, dsink = _launch(tensors, lse, dlse, sink, packing, longest, numbers)
    return dq[0], dk[0], dv[0], dsink


def _zeros(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None) -> _Gradients:
    dsink = q.new_empty(0) if sink is None else sink.new_zeros(sink.shape)
    return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), dsink


def _launch(
    inputs: tuple[torch.Tensor, ...],
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    sink: torch.Tensor | None,
    packing: Packing | None,
    sizes: DenseShape,
    numbers: Numbers,
) -> _Gradients:
    """inputs: q, k, v, out, dout, (batch, seqlen, heads, head_dim); packed ones with batch 1, and sizes are then of the
    longest sequences.
    """
    q, k, v, out, dout = inputs
    index = q.get_device()
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            return _launch(inputs, lse, dlse, sink, packing, sizes, numbers)
    gradients = [x.new_empty(x.shape) for x in (q, k, v)]
    # Copies, where TMA needs them, live until the launch is enqueued; the allocator orders reuse behind it.
    tensors = [hopper.readable(x) for x in (q, k, v, out, dout.to(q.dtype), *gradients)]
    row_values = [None if x is None else x.to(torch.float32).contiguous() for x in (lse, dlse, sink)]
    dsink = q.new_empty(0 if sink is None else sink.shape, dtype=torch.float32)
    totals: tuple[int, int] = (0, 0)
    offsets: list[torch.Tensor | None] = [None] * 4
    if packing is not None:
        totals = (q.shape[1], k.shape[1])
        offsets = [None if x is None else x.contiguous() for x in packing[:4]]
    softmax_scale, window_left, window_right, softcap, sm_margin, deterministic = numbers
    plan = backward_plan(sizes, q.dtype, window_left, window_right, sm_margin, deterministic, q.device, totals)
    workspace = torch.empty(plan["workspace_bytes"], dtype=torch.uint8, device=q.device)
    try:
        hopper.module.backward(
            [(x.data_ptr(), *strides) for x, strides in tensors],
            [0 if x is None else x.data_ptr() for x in (*row_values, dsink, workspace, *offsets)],
            hopper.problem(sizes, window_left, window_right),
            totals,
            softmax_scale,
            softcap,
            hopper.dtype_code(q.dtype),
            sm_margin,
            deterministic,
            torch._C._cuda_getCurrentRawStream(index),
        )
    except RuntimeError as error:
        raise RuntimeError(f"{error}; plan: {plan}") from error
    dq, dk, dv = gradients
    return dq, dk, dv, q.new_empty(0) if sink is None else dsink.to(sink.dtype)
