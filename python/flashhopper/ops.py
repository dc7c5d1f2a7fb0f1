"""From checked arguments to an operator: autograd, autocast and the short way past the dispatcher. Before it:
interface.py, checks.py; after it: library.py -> bindings/module.cpp.

A plain eager call (nothing traces, transforms or counts it) runs the implementation directly, under one
autograd.Function where a gradient may be wanted. Every other call goes through the registered operators, which carry
the same gradient.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from . import checks, library
from .engine import hopper
from .engine.hopper_options import Options

_Tensor = torch.Tensor

# Bound once: an attribute chain costs as much as the call.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_interpreter = torch._C._functorch.peek_interpreter_stack
any_autocast = torch._C._is_any_autocast_enabled
_is_dynamo = torch.compiler.is_dynamo_compiling
_tracing_state = torch._C._get_tracing_state
_increment_version = torch.autograd.graph.increment_version

_SCALES, _CHOICES = (type(None), float), (type(None), bool)


def is_plain(q: _Tensor, k: _Tensor, v: _Tensor, sink: _Tensor | None) -> bool:
    """Whether nothing watches or transforms this call, so that it may skip the dispatcher.

    False under tracing, compilation, dispatch modes (fake tensors, flop counting), function transforms and forward-mode
    differentiation, and for tensor subclasses.
    """
    return (
        not _is_dynamo()
        and type(q) is _Tensor
        and type(k) is _Tensor
        and type(v) is _Tensor
        and (sink is None or type(sink) is _Tensor or type(sink) is torch.nn.Parameter)
        and _dispatch_modes() == 0
        and _interpreter() is None
        and _tracing_state() is None
        and forward_ad._current_level < 0
    )


def autocast(
    q: _Tensor, k: _Tensor, v: _Tensor, sink: _Tensor | None
) -> tuple[_Tensor, _Tensor, _Tensor, _Tensor | None]:
    """q, k, v in the autocast dtype where autocast is on for their device; float64 stays, as in torch, and so does the
    sink.
    """
    if not isinstance(q, _Tensor) or not torch.is_autocast_enabled(q.device.type):
        return q, k, v, sink
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (
        x.to(dtype) if isinstance(x, _Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in (q, k, v)
    )
    return q, k, v, sink


def wants_gradient(q: _Tensor, k: _Tensor, v: _Tensor, sink: _Tensor | None) -> bool:
    """Whether autograd must see this call."""
    return torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad)
    )


def check_output(
    out: _Tensor, q: _Tensor, k: _Tensor, v: _Tensor, sink: _Tensor | None = None, **offsets: _Tensor | None
) -> None:
    """Whether the result of checked q, k, v may go to out; autograd then knows that out changes."""
    checks.output(out, (*q.shape[:-1], v.shape[-1]), q, wants_gradient(q, k, v, sink))
    if is_plain(q, k, v, sink):  # others have no addresses
        if type(out) is not _Tensor and type(out) is not torch.nn.Parameter:
            raise ValueError(f"out is a {type(out).__name__}, q, k and v are plain tensors: must be one too")
        checks.apart(out, q=q, k=k, v=v, sink=sink, **offsets)
        _increment_version(out)  # the kernels write where torch does not see it


def call_key(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    softmax_scale: float | None,
    causal: bool,
    sm_margin: int,
    pack_gqa: bool | None,
    backend: str,
) -> hopper.CallKey | None:
    """What a repeated call has in common with the first, for a plain call without gradients, windows, softcap and sink
    (tensors unchecked as yet); None where this cannot be told by looking.
    """
    # Numbers of other types may equal these and yet be refused.
    if type(sm_margin) is not int or type(softmax_scale) not in _SCALES or type(pack_gqa) not in _CHOICES:
        return None
    layouts = hopper.read_layouts(q, k, v)
    return None if layouts is None else (layouts, softmax_scale, 0 if causal else -1, sm_margin, pack_gqa, backend)


def dense_attention(
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
    pack_gqa: bool | None,
    plain: bool,
    sizes: checks.DenseShape,
    needs_lse: bool,
    key: hopper.CallKey | None,
    into: _Tensor | None = None,
) -> tuple[_Tensor, _Tensor | None]:
    """Checked dense attention by the shortest way that this call allows; lse may be None where it is not needed. key is
    call_key's, or None for a call that is not to be remembered; into is memory that may be written to, not must.
    """
    numbers = (softmax_scale, window_left, window_right, softcap, sm_margin, deterministic, backend, pack_gqa)
    if not plain:
        refuse_tangents(q, k, v, sink)
        run = library.forward_op if is_dispatched() else _differentiable
        out, lse = run(q, k, v, sink, *numbers)
        return out, lse
    if wants_gradient(q, k, v, sink):
        out, lse = _plain(q, k, v, sink, *numbers)
        return out, lse
    options = Options(softmax_scale, window_left, window_right, softcap, sm_margin, pack_gqa)
    return library.run_dense(q, k, v, sink, options, backend, sizes, needs_lse, key, into)


def packed_attention(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    sink: _Tensor | None,
    cu_seqlens_q: _Tensor,
    cu_seqlens_k: _Tensor,
    seqused_q: _Tensor | None,
    seqused_k: _Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    sm_margin: int,
    deterministic: bool,
    backend: str,
    into: _Tensor | None = None,
) -> tuple[_Tensor, _Tensor]:
    """Checked attention over packed sequences; into is memory that may be written to, not must."""
    packing = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    # The operator, which must not write to its inputs, has no such memory.
    if into is not None and is_plain(q, k, v, sink) and not wants_gradient(q, k, v, sink):
        options = Options(softmax_scale, window_left, window_right, softcap, sm_margin)
        return library.run_packed(q, k, v, sink, packing, options, backend, into)
    numbers = (softmax_scale, window_left, window_right, softcap, sm_margin, deterministic, backend)
    refuse_tangents(q, k, v, sink)
    run = library.varlen_forward_op if is_dispatched() else _differentiable_varlen
    out, lse = run(q, k, v, *packing, sink, *numbers)
    return out, lse


def is_dispatched() -> bool:
    """Whether the operator can carry the gradient itself; function transforms need the autograd.Function."""
    return torch.compiler.is_compiling() or _interpreter() is None


def refuse_tangents(*inputs: _Tensor | None) -> None:
    """Forward-mode derivatives are refused by name: an operator without a rule would drop them."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    unpack: Any = forward_ad.unpack_dual
    if any(x is not None and unpack(x).tangent is not None for x in inputs):
        _refuse_forward_mode()


def _refuse_forward_mode(*_: Any) -> NoReturn:
    raise RuntimeError(
        "flashhopper attention has no forward-mode derivative: use reverse mode, or reference_attention instead"
    )


def _dense_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[_Tensor, _Tensor]) -> None:
    q, k, v, sink, *numbers, _ = inputs  # pack_gqa is the forward's alone
    ctx.save_for_backward(q, k, v, *output, sink)
    ctx.numbers = numbers
    ctx.set_materialize_grads(False)  # an unused lse costs nothing


def _dense_gradient(ctx: Any, dout: _Tensor | None, dlse: _Tensor | None) -> tuple[_Tensor | None, ...]:
    q, k, v, out, lse, sink = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    run = gradient_runner(library.backward_op, library.dense_backward, once, q)
    dq, dk, dv, dsink = run(dout, dlse, q, k, v, out, lse, sink, *ctx.numbers)
    return dq, dk, dv, None if sink is None else dsink, *(None,) * 8


def _varlen_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[_Tensor, _Tensor]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_q, max_k, sink, *numbers = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sink)
    ctx.lengths = (max_q, max_k)
    ctx.numbers = numbers
    ctx.set_materialize_grads(False)


def _varlen_gradient(ctx: Any, dout: _Tensor | None, dlse: _Tensor | None) -> tuple[_Tensor | None, ...]:
    *tensors, sink = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(tensors[3])
    run = gradient_runner(library.varlen_backward_op, library.varlen_backward, once_varlen, tensors[0])
    dq, dk, dv, dsink = run(dout, dlse, *tensors, *ctx.lengths, sink, *ctx.numbers)
    return dq, dk, dv, *(None,) * 6, None if sink is None else dsink, *(None,) * 7


def gradient_runner(operator: Any, implementation: Any, once: Any, q: _Tensor) -> Any:
    """How a backward runs: traced, or of a tensor subclass (DTensor), as an operator; under create_graph=True as a node
    that refuses to be differentiated again.
    """
    if torch.compiler.is_compiling() or _dispatch_modes() > 0 or type(q) not in (_Tensor, torch.nn.Parameter):
        return operator
    return once if torch.is_grad_enabled() else implementation


def _no_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[_Tensor, ...]) -> None:
    """A refusal needs nothing saved."""


def _refuse_second_derivative(ctx: Any, *_: Any) -> NoReturn:
    raise RuntimeError(
        "flashhopper attention has no second derivative: drop create_graph=True, "
        "or differentiate reference_attention instead"
    )


def _refuse_vmap(*_: Any) -> NoReturn:
    library.refuse_vmap()


class PlainAttention(torch.autograd.Function):
    """The dense operator for plain eager calls. torch binds arguments anew in every call of a Function that has a
    setup_context, at ten times the cost of this one.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[_Tensor, _Tensor]:
        output = library.dense_forward(*inputs)
        _dense_context(ctx, inputs, output)
        return output

    backward = staticmethod(_dense_gradient)


def function(name: str, forward: Any, context: Any, gradient: Any) -> Any:
    """apply() of an autograd.Function made of these parts."""
    parts = {"forward": forward, "setup_context": context, "backward": gradient}
    parts |= {"vmap": _refuse_vmap, "jvp": _refuse_forward_mode}
    made: Any = type(name, (torch.autograd.Function,), {key: staticmethod(part) for key, part in parts.items()})
    return made.apply


_plain: Any = PlainAttention.apply
_differentiable = function("Attention", library.dense_forward, _dense_context, _dense_gradient)
_differentiable_varlen = function("VarlenAttention", library.varlen_forward, _varlen_context, _varlen_gradient)
once = function("AttentionGradient", library.dense_backward, _no_context, _refuse_second_derivative)
once_varlen = function("VarlenGradient", library.varlen_backward, _no_context, _refuse_second_derivative)

for _name, _gradient, _context in (
    ("forward", _dense_gradient, _dense_context),
    ("backward", _refuse_second_derivative, _no_context),
    ("varlen_forward", _varlen_gradient, _varlen_context),
    ("varlen_backward", _refuse_second_derivative, _no_context),
):
    torch.library.register_autograd(f"flashhopper::{_name}", _gradient, setup_context=_context, lib=library.library)
