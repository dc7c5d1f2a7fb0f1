"""The registered operators: schemas, implementations and fakes. Before it: ops.py; after it: engine/hopper.py (then
bindings/module.cpp) or engine/tiled.py.

An operator takes the requested backend as a string and chooses its engine when it runs, so a compiled graph holds no
decision about the machine it was traced on. Gradients are computed from the saved (q, k, v, out, lse), which mean the
same whichever engine ran forward.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from . import checks
from .backends import resolve
from .engine import hopper, hopper_backward, hopper_options, tiled, tiles
from .engine.hopper_options import Options

_Tensor = torch.Tensor

_INPUTS = "Tensor q, Tensor k, Tensor v"
_PACKING = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k"
)
_NUMBERS = "Tensor? sink, float softmax_scale, SymInt window_left, SymInt window_right, float softcap"
_LAUNCH = "SymInt sm_margin, bool deterministic, str backend"
_FORWARD = "(Tensor out, Tensor lse)"
_GRADIENTS = "Tensor dout, Tensor? dlse"
_SAVED = "Tensor out, Tensor lse"
_BACKWARD = "(Tensor dq, Tensor dk, Tensor dv, Tensor dsink)"  # dsink is empty without a sink

library: Any = torch.library.Library("flashhopper", "DEF")  # type: ignore[no-untyped-call]
for _schema in (
    f"forward({_INPUTS}, {_NUMBERS}, {_LAUNCH}, bool? pack_gqa=None) -> {_FORWARD}",
    f"backward({_GRADIENTS}, {_INPUTS}, {_SAVED}, {_NUMBERS}, {_LAUNCH}) -> {_BACKWARD}",
    f"varlen_forward({_INPUTS}, {_PACKING}, {_NUMBERS}, {_LAUNCH}) -> {_FORWARD}",
    f"varlen_backward({_GRADIENTS}, {_INPUTS}, {_SAVED}, {_PACKING}, {_NUMBERS}, {_LAUNCH}) -> {_BACKWARD}",
):
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def dense_forward(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    sink: _Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    sm_margin: int,
    deterministic: bool,
    backend: str,
    pack_gqa: bool | None = None,
) -> tuple[_Tensor, _Tensor]:
    """flashhopper::forward on real tensors."""
    sizes = checks.dense(q, k, v)
    checks.pack_gqa(pack_gqa, sizes[2], sizes[5])
    if sink is not None:
        checks.sink(sink, sizes[2], q.device)
    options = Options(softmax_scale, window_left, window_right, softcap, sm_margin, pack_gqa)
    out, lse = run_dense(q, k, v, sink, options, backend, sizes, True)
    assert lse is not None
    return out, lse


def run_dense(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    sink: _Tensor | None,
    options: Options,
    backend: str,
    sizes: checks.DenseShape,
    needs_lse: bool,
    key: hopper.CallKey | None = None,
    into: _Tensor | None = None,
) -> tuple[_Tensor, _Tensor | None]:
    """Checked dense attention on the engine that serves it; lse may be None where it is not needed. Under key, if
    given, the Hopper engine remembers what it prepares; into, if given, is memory that it writes out to.
    """
    scale, left, right, softcap, sm_margin, pack_gqa = options
    has_sink = sink is not None
    if resolve(backend, q, sizes[3], sizes[6], left, right, softcap, has_sink, False, scale):
        if has_sink or softcap != 0.0:
            return hopper_options.dense_forward(q, k, v, sink, sizes, options, into)
        return hopper.forward(q, k, v, sizes, scale, left, right, sm_margin, pack_gqa, needs_lse, key, into)
    return tiled.dense_forward(q, k, v, sink, tiled.Settings(scale, left, right, softcap))


def _resolve_fake(
    backend: str,
    q: _Tensor,
    head_dim: int,
    head_dim_v: int,
    window_left: int,
    window_right: int,
    softcap: float,
    has_sink: bool,
    is_packed: bool,
    softmax_scale: float,
) -> None:
    """Refuse under fake tensors what the real call would refuse; sizes stay symbolic where nothing depends on them. A
    fake on the CPU may stand for a shard on a GPU (DTensor's propagation makes such): the real call judges the device.
    """
    if q.device.type == "cuda":
        sizes = (int(head_dim), int(head_dim_v), int(window_left), int(window_right))
        resolve(backend, q, *sizes, softcap, has_sink, is_packed, float(softmax_scale))


def _dense_forward_fake(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    sink: _Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    sm_margin: int,
    deterministic: bool,
    backend: str,
    pack_gqa: bool | None = None,
) -> tuple[_Tensor, _Tensor]:
    batch, seqlen_q, heads, head_dim, _, kv_heads, head_dim_v = checks.dense(q, k, v)
    checks.pack_gqa(pack_gqa, heads, kv_heads)
    if sink is not None:
        checks.sink(sink, heads, q.device)
    has_sink = sink is not None
    _resolve_fake(backend, q, head_dim, head_dim_v, window_left, window_right, softcap, has_sink, False, softmax_scale)
    out = q.new_empty((batch, seqlen_q, heads, head_dim_v))
    return out, q.new_empty((batch, heads, seqlen_q), dtype=tiles.accumulator_dtype(q.dtype))


def dense_backward(
    dout: _Tensor,
    dlse: _Tensor | None,
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    out: _Tensor,
    lse: _Tensor,
    sink: _Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    sm_margin: int,
    deterministic: bool,
    backend: str,
) -> tuple[_Tensor, _Tensor, _Tensor, _Tensor]:
    """flashhopper::backward on real tensors; dsink is empty without a sink."""
    sizes = checks.dense(q, k, v)
    checks.output_gradient(dout, out)
    has_sink = sink is not None
    window = (window_left, window_right)
    if resolve(backend, q, sizes[3], sizes[6], *window, softcap, has_sink, False, softmax_scale, True):
        numbers = hopper_backward.Numbers(softmax_scale, *window, softcap, sm_margin, deterministic)
        return hopper_backward.backward(dout, dlse, q, k, v, out, lse, sink, sizes, numbers)
    settings = tiled.Settings(softmax_scale, *window, softcap)
    dq, dk, dv, dsink = tiled.dense_backward(dout, dlse, q, k, v, out, lse, sink, settings)
    return dq, dk, dv, q.new_empty(0) if dsink is None else dsink


def _backward_fake(
    dout: _Tensor,
    dlse: _Tensor | None,
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    out: _Tensor,
    lse: _Tensor,
    sink: _Tensor | None,
) -> tuple[_Tensor, _Tensor, _Tensor, _Tensor]:
    checks.output_gradient(dout, out)
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    return dq, dk, dv, q.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def _dense_backward_fake(
    dout: _Tensor,
    dlse: _Tensor | None,
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    out: _Tensor,
    lse: _Tensor,
    sink: _Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    sm_margin: int,
    deterministic: bool,
    backend: str,
) -> tuple[_Tensor, _Tensor, _Tensor, _Tensor]:
    checks.dense(q, k, v)
    return _backward_fake(dout, dlse, q, k, v, out, lse, sink)


def varlen_forward(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    cu_seqlens_q: _Tensor,
    cu_seqlens_k: _Tensor,
    seqused_q: _Tensor | None,
    seqused_k: _Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    sink: _Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    sm_margin: int,
    deterministic: bool,
    backend: str,
) -> tuple[_Tensor, _Tensor]:
    """flashhopper::varlen_forward on real tensors."""
    packing = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    options = Options(softmax_scale, window_left, window_right, softcap, sm_margin)
    return run_packed(q, k, v, sink, packing, options, backend)


def run_packed(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    sink: _Tensor | None,
    given: tuple[Any, ...],
    options: Options,
    backend: str,
    into: _Tensor | None = None,
) -> tuple[_Tensor, _Tensor]:
    """Attention over packed sequences on the engine that serves it. given: the packing, as of checks.packed; into:
    memory that the Hopper engine writes out to.
    """
    packing = tiled.Packing(*given)
    sizes = checks.packed(q, k, v, *packing)
    if sink is not None:
        checks.sink(sink, sizes[2], q.device)
    scale, left, right, softcap, *_ = options
    if resolve(backend, q, sizes[3], sizes[6], left, right, softcap, sink is not None, True, scale):
        return hopper_options.packed_forward(q, k, v, sink, packing, sizes, options, into)
    return tiled.packed_forward(q, k, v, sink, packing, tiled.Settings(scale, left, right, softcap))


def _varlen_forward_fake(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    cu_seqlens_q: _Tensor,
    cu_seqlens_k: _Tensor,
    seqused_q: _Tensor | None,
    seqused_k: _Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    sink: _Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    sm_margin: int,
    deterministic: bool,
    backend: str,
) -> tuple[_Tensor, _Tensor]:
    sizes = checks.packed(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    _, total_q, heads, head_dim, _, _, head_dim_v = sizes
    if sink is not None:
        checks.sink(sink, heads, q.device)
    has_sink = sink is not None
    _resolve_fake(backend, q, head_dim, head_dim_v, window_left, window_right, softcap, has_sink, True, softmax_scale)
    out = q.new_empty((total_q, heads, head_dim_v))
    return out, q.new_empty((heads, total_q), dtype=tiles.accumulator_dtype(q.dtype))


def varlen_backward(
    dout: _Tensor,
    dlse: _Tensor | None,
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    out: _Tensor,
    lse: _Tensor,
    cu_seqlens_q: _Tensor,
    cu_seqlens_k: _Tensor,
    seqused_q: _Tensor | None,
    seqused_k: _Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    sink: _Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    sm_margin: int,
    deterministic: bool,
    backend: str,
) -> tuple[_Tensor, _Tensor, _Tensor, _Tensor]:
    packing = tiled.Packing(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    sizes = checks.packed(q, k, v, *packing)
    checks.output_gradient(dout, out)
    has_sink = sink is not None
    window = (window_left, window_right)
    if resolve(backend, q, sizes[3], sizes[6], *window, softcap, has_sink, True, softmax_scale, True):
        numbers = hopper_backward.Numbers(softmax_scale, *window, softcap, sm_margin, deterministic)
        return hopper_backward.packed_backward(dout, dlse, q, k, v, out, lse, sink, packing, sizes, numbers)
    settings = tiled.Settings(softmax_scale, window_left, window_right, softcap)
    dq, dk, dv, dsink = tiled.packed_backward(dout, dlse, q, k, v, out, lse, sink, packing, settings)
    return dq, dk, dv, q.new_empty(0) if dsink is None else dsink


def _varlen_backward_fake(
    dout: _Tensor,
    dlse: _Tensor | None,
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    out: _Tensor,
    lse: _Tensor,
    cu_seqlens_q: _Tensor,
    cu_seqlens_k: _Tensor,
    seqused_q: _Tensor | None,
    seqused_k: _Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    sink: _Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    sm_margin: int,
    deterministic: bool,
    backend: str,
) -> tuple[_Tensor, _Tensor, _Tensor, _Tensor]:
    return _backward_fake(dout, dlse, q, k, v, out, lse, sink)


def refuse_vmap(*_: object) -> NoReturn:
    """What every operator does under vmap."""
    raise RuntimeError(
        "flashhopper operators have no vmap rule: attention is batched already, "
        "fold the mapped dimension into batch or heads"
    )


for _name, _implementation, _fake in (
    ("forward", dense_forward, _dense_forward_fake),
    ("backward", dense_backward, _dense_backward_fake),
    ("varlen_forward", varlen_forward, _varlen_forward_fake),
    ("varlen_backward", varlen_backward, _varlen_backward_fake),
):
    library.impl(_name, _implementation, "CompositeExplicitAutograd")
    library.impl(_name, refuse_vmap, "FuncTorchBatched")
    torch.library.register_fake(f"flashhopper::{_name}", _fake, lib=library)

forward_op = torch.ops.flashhopper.forward.default
backward_op = torch.ops.flashhopper.backward.default
varlen_forward_op = torch.ops.flashhopper.varlen_forward.default
varlen_backward_op = torch.ops.flashhopper.varlen_backward.default
