"""The Hopper engine's backward: from tensors to one call of the compiled module. Before it: library.py; after it:
cpp/bindings/module.cpp.

It recomputes the probabilities from (q, k, v, lse); dq is summed in a float workspace that torch's allocator lends for
the call.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from ..checks import DenseShape
from . import hopper

if TYPE_CHECKING:
    from .. import _C


@lru_cache(maxsize=1024)
def _plan(problem: _C.Sizes, dtype: int, sm_margin: int, deterministic: bool, num_sms: int) -> _C.Plan:
    plan: _C.Plan = hopper.module.backward_plan(problem, dtype, sm_margin, deterministic, num_sms)
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
) -> _C.Plan:
    """What the compiled module would launch for the gradients of a problem of these sizes."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    problem = hopper.problem(sizes, window_left, window_right)
    return _plan(problem, hopper.dtype_code(dtype), sm_margin, deterministic, num_sms)


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
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    sm_margin: int,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the dense backward on the current stream of q's device.

    Args:
        dout, out: (batch, seqlen_q, heads, head_dim_v); dlse, lse: float32 (batch, heads, seqlen_q), dlse may be None.
        q, k, v: as of the forward, float16 or bfloat16.
        sink: (heads,), any floating-point dtype, or None.
        sizes: what checks.dense returned for them.
        deterministic: bit-equal gradients in every run; dq's sums then wait for one another.

    Returns:
        dq, dk, dv, contiguous, of the shapes and dtype of q, k, v; dsink of the sink's dtype, empty without one.

    Raises:
        RuntimeError: a CUDA call failed; the message holds it and the plan.
    """
    if is_empty(sizes, sink is not None):
        dsink = q.new_empty(0) if sink is None else torch.zeros_like(sink)
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), dsink
    index = q.get_device()
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            return backward(
                dout, dlse, q, k, v, out, lse, sink, sizes,
                softmax_scale, window_left, window_right, softcap, sm_margin, deterministic,
            )  # fmt: skip
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    # Copies, where TMA needs them, live until the launch is enqueued; the allocator orders reuse behind it.
    tensors = [hopper.readable(x) for x in (q, k, v, out, dout.to(q.dtype), dq, dk, dv)]
    views = [(x.data_ptr(), *strides) for x, strides in tensors]
    lse = lse.contiguous()
    if dlse is not None:
        dlse = dlse.to(torch.float32).contiguous()
    dsink = q.new_empty(0)
    if sink is not None:
        sink = sink.contiguous()
        logits = sink.to(torch.float32)
        dsink = torch.empty_like(logits)
    plan = backward_plan(sizes, q.dtype, window_left, window_right, sm_margin, deterministic, q.device)
    workspace = torch.empty(plan["workspace_bytes"], dtype=torch.uint8, device=q.device)
    try:
        hopper.module.backward(
            views,
            (
                lse.data_ptr(),
                0 if dlse is None else dlse.data_ptr(),
                0 if sink is None else logits.data_ptr(),
                0 if sink is None else dsink.data_ptr(),
                workspace.data_ptr(),
            ),
            hopper.problem(sizes, window_left, window_right),
            softmax_scale,
            softcap,
            hopper.dtype_code(q.dtype),
            sm_margin,
            deterministic,
            torch._C._cuda_getCurrentRawStream(index),
        )
    except RuntimeError as error:
        raise RuntimeError(f"{error}; plan: {plan}") from error
    return dq, dk, dv, dsink if sink is None else dsink.to(sink.dtype)
