"""Calls of the backward operator with small tensors, for the tests of its way to the compiled module. Before it:
test_backward_plumbing.py, test_backward_copies.py, test_backward_routes.py; after it: flashhopper.library.
"""

from __future__ import annotations

import torch

Tensors = list[torch.Tensor]


def inputs(
    *, batch: int = 2, seqlen_q: int = 5, seqlen_k: int = 7, heads: int = 4, kv_heads: int = 2, dim_v: int = 64
) -> Tensors:
    shapes = ((batch, seqlen_q, heads, 64), (batch, seqlen_k, kv_heads, 64), (batch, seqlen_k, kv_heads, dim_v))
    return [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]


def outputs(q: torch.Tensor, v: torch.Tensor) -> Tensors:
    """dout, out and lse of the right shapes."""
    shape = (*q.shape[:3], v.shape[3])
    lse = torch.randn(q.shape[0], q.shape[2], q.shape[1])
    return [torch.randn(shape, dtype=q.dtype), torch.randn(shape, dtype=q.dtype), lse]


def run(
    tensors: Tensors,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sink: torch.Tensor | None = None,
    sm_margin: int = 0,
    deterministic: bool = False,
    backend: str = "hopper",
) -> Tensors:
    """flashhopper::backward; dsink comes with a sink alone."""
    bounds = (-1, 0 if causal else -1) if window is None else window
    numbers = (0.25, *bounds, softcap, sm_margin, deterministic, backend)
    gradients: Tensors = list(torch.ops.flashhopper.backward(dout, dlse, *tensors, out, lse, sink, *numbers))
    if sink is None:
        assert gradients.pop().numel() == 0
    return gradients


def strides(x: torch.Tensor) -> tuple[int, ...]:
    return x.stride()[:3]


def odd(x: torch.Tensor) -> torch.Tensor:
    """x two bytes beyond an aligned address."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
