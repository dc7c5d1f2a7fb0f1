"""The registered 8-bit operators: schemas, implementations, fakes, gradients. Before it: attention.py, raw.py; after
it: engine/hopper_fp8.py or quantize.py and emulate.py.

A recipe travels as its code, one string. The gradient of 8-bit attention is straight-through, as if quantising were the
identity: the 16-bit backward (library.py) on the saved 16-bit q, k, v with the output and lse of the 8-bit forward.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch

from .. import checks
from .. import library as dense_library
from .. import ops as dense_ops
from ..engine import hopper_fp8, tiled
from . import emulate
from .quantize import Fp8QKV
from .quantize import quantize as quantize_in_torch
from .recipe import Fp8Recipe

_Tensor = torch.Tensor

library = dense_library.library
_INPUTS = "Tensor q, Tensor k, Tensor v, str recipe"
_PACKING = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k"
)
_NUMBERS = "float softmax_scale, SymInt window_left, SymInt window_right, SymInt sm_margin"
_QUANTIZED = "Tensor q_scale, Tensor k_scale, Tensor v_scale, Tensor lse_shift, Tensor k_mean, Tensor v_mean"
_SIZES = "SymInt head_dim, SymInt head_dim_v, ScalarType dtype"
for _schema in (
    # What a recipe does not have comes out, and goes in, as a tensor without elements.
    f"quantize({_INPUTS}, str backend) -> (Tensor q8, Tensor k8, Tensor v8, {_QUANTIZED})",
    f"forward8(Tensor q8, Tensor k8, Tensor v8, {_QUANTIZED}, str recipe, {_SIZES}, {_NUMBERS}, str backend)"
    " -> (Tensor out, Tensor lse)",
    f"fp8_forward({_INPUTS}, {_NUMBERS}, bool deterministic, str backend) -> (Tensor out, Tensor lse)",
    f"fp8_varlen_forward({_INPUTS}, {_PACKING}, {_NUMBERS}, bool deterministic, str backend)"
    " -> (Tensor out, Tensor lse)",
):
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def flatten(qkv: Fp8QKV) -> tuple[_Tensor, ...]:
    """The nine tensors of the schemas."""
    nothing = qkv.q_scale.new_empty(0)
    means = (nothing.clone() if x is None else x for x in (qkv.lse_shift, qkv.k_mean, qkv.v_mean))
    return qkv.q, qkv.k, qkv.v, qkv.q_scale, qkv.k_scale, qkv.v_scale, *means


def unflatten(tensors: tuple[_Tensor, ...], recipe: Fp8Recipe, dims: tuple[int, int], dtype: torch.dtype) -> Fp8QKV:
    """flatten's inverse; dims are head_dim and head_dim_v."""
    q, k, v, q_scale, k_scale, v_scale, *means = tensors
    has = (recipe.smooth_k, recipe.smooth_k, recipe.center_v)
    shift, k_mean, v_mean = (x if is_there else None for x, is_there in zip(means, has, strict=True))
    head_dim, head_dim_v = dims
    return Fp8QKV(q, k, v, q_scale, k_scale, v_scale, shift, k_mean, v_mean, recipe, head_dim, head_dim_v, dtype)


def run_quantize(q: _Tensor, k: _Tensor, v: _Tensor, recipe: Fp8Recipe, backend: str) -> Fp8QKV:
    """Quantise checked tensors where the recipe is served: both ways write the same format."""
    if backend != "tiled" and hopper_fp8.quantize_refusal(q.device, q.dtype, (q.shape[3], v.shape[3]), recipe) is None:
        return hopper_fp8.quantize(q, k, v, recipe)
    return quantize_in_torch(q, k, v, recipe)


def resolve(device: torch.device, dims: tuple[int, int], recipe: Fp8Recipe, softmax_scale: float, backend: str) -> bool:
    """Whether the 8-bit kernel serves a call (else it is emulated); dims are head_dim and head_dim_v.

    Raises:
        RuntimeError: "hopper" was asked for and does not serve the call; or "auto" would take it, were its library
            loadable.
    """
    if backend == "tiled":
        return False
    return _decide(hopper_fp8.forward_refusal(device, dims, recipe, softmax_scale), backend)


def resolve_packed(q: _Tensor, dims: tuple[int, int], recipe: Fp8Recipe, softmax_scale: float, backend: str) -> bool:
    """The same of packed sequences."""
    if backend == "tiled":
        return False
    return _decide(hopper_fp8.packed_refusal(q.device, q.dtype, dims, recipe, softmax_scale), backend)


def _decide(refusal: tuple[str | None, bool], backend: str) -> bool:
    reason, is_broken = refusal
    if reason is None:
        return True
    if backend == "hopper":
        raise RuntimeError(f'backend "hopper" cannot serve this 8-bit call: {reason}')
    if is_broken:
        raise RuntimeError(f'{reason}; run `python -m flashhopper doctor`, or ask for set_backend("tiled") by name')
    return False


def run_attention(
    qkv: Fp8QKV, softmax_scale: float, window_left: int, window_right: int, sm_margin: int, backend: str
) -> tuple[_Tensor, _Tensor]:
    """8-bit attention on the engine that serves it."""
    if resolve(qkv.q.device, (qkv.head_dim, qkv.head_dim_v), qkv.recipe, softmax_scale, backend):
        return hopper_fp8.forward(qkv, softmax_scale, window_left, window_right, sm_margin)
    return emulate.attention(qkv, softmax_scale, window_size=(window_left, window_right))


def _quantize(q: _Tensor, k: _Tensor, v: _Tensor, recipe: str, backend: str) -> tuple[_Tensor, ...]:
    return flatten(run_quantize(q, k, v, Fp8Recipe.parse(recipe), backend))


def _quantize_fake(q: _Tensor, k: _Tensor, v: _Tensor, recipe: str, backend: str) -> tuple[_Tensor, ...]:
    return flatten(hopper_fp8.empty(q, checks.dense(q, k, v), Fp8Recipe.parse(recipe)))


def _forward8(*arguments: Any) -> tuple[_Tensor, _Tensor]:
    tensors, (code, head_dim, head_dim_v, dtype, *numbers) = arguments[:9], arguments[9:]
    return run_attention(unflatten(tensors, Fp8Recipe.parse(code), (head_dim, head_dim_v), dtype), *numbers)


def _forward8_fake(*arguments: Any) -> tuple[_Tensor, _Tensor]:
    q8, (code, head_dim, head_dim_v, dtype, scale, _, _, _, backend) = arguments[0], arguments[9:]
    _resolve_fake(q8.device, (head_dim, head_dim_v), code, scale, backend)
    batch, seqlen_q, heads, _ = q8.shape
    out = q8.new_empty((batch, seqlen_q, heads, head_dim_v), dtype=dtype)
    return out, q8.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


def _resolve_fake(device: torch.device, dims: tuple[int, int], code: str, scale: float, backend: str) -> None:
    """Refuse under fake tensors what the real call would refuse; sizes stay symbolic where nothing depends on them."""
    if device.type == "cuda":  # else as library._resolve_fake()
        head_dim, head_dim_v = dims
        resolve(device, (int(head_dim), int(head_dim_v)), Fp8Recipe.parse(code), float(scale), backend)


def fp8_forward(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    recipe: str,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    sm_margin: int,
    deterministic: bool,
    backend: str,
) -> tuple[_Tensor, _Tensor]:
    """flashhopper::fp8_forward on real tensors: quantise and attend."""
    parsed = Fp8Recipe.parse(recipe)
    resolve(q.device, (q.shape[3], v.shape[3]), parsed, softmax_scale, backend)  # before the work of quantising
    qkv = run_quantize(q, k, v, parsed, backend)
    return run_attention(qkv, softmax_scale, window_left, window_right, sm_margin, backend)


def _fp8_forward_fake(
    q: _Tensor, k: _Tensor, v: _Tensor, recipe: str, scale: float, left: int, right: int, *rest: Any
) -> tuple[_Tensor, _Tensor]:
    batch, seqlen_q, heads, head_dim, _, _, head_dim_v = checks.dense(q, k, v)
    _resolve_fake(q.device, (head_dim, head_dim_v), recipe, scale, rest[-1])
    return q.new_empty((batch, seqlen_q, heads, head_dim_v)), q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


def fp8_varlen_forward(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    recipe: str,
    cu_seqlens_q: _Tensor,
    cu_seqlens_k: _Tensor,
    seqused_q: _Tensor | None,
    seqused_k: _Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    sm_margin: int,
    deterministic: bool,
    backend: str,
) -> tuple[_Tensor, _Tensor]:
    """flashhopper::fp8_varlen_forward on real tensors: each sequence with its own means and scales."""
    parsed = Fp8Recipe.parse(recipe)
    packing = tiled.Packing(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    sizes = checks.packed(q, k, v, *packing)
    if resolve_packed(q, (q.shape[2], v.shape[2]), parsed, softmax_scale, backend):
        numbers = (softmax_scale, window_left, window_right, sm_margin)
        return hopper_fp8.packed_forward(q, k, v, parsed, packing, sizes, numbers)
    total_q, heads, _ = q.shape
    out = q.new_zeros(total_q, heads, v.shape[-1])
    lse = q.new_full((heads, total_q), -math.inf, dtype=torch.float32)
    for rows, keys in packing.slices(total_q, k.shape[0]):
        qkv = quantize_in_torch(q[None, rows], k[None, keys], v[None, keys], parsed)
        one_out, one_lse = emulate.attention(qkv, softmax_scale, window_size=(window_left, window_right))
        out[rows], lse[:, rows] = one_out[0], one_lse[0]
    return out, lse


def _fp8_varlen_forward_fake(q: _Tensor, k: _Tensor, v: _Tensor, recipe: str, *rest: Any) -> tuple[_Tensor, _Tensor]:
    _, total_q, heads, head_dim, _, _, head_dim_v = checks.packed(q, k, v, *rest[:6])
    scale, backend = rest[6], rest[-1]
    if q.device.type == "cuda":
        resolve_packed(q, (int(head_dim), int(head_dim_v)), Fp8Recipe.parse(recipe), float(scale), backend)
    return q.new_empty((total_q, heads, head_dim_v)), q.new_empty((heads, total_q), dtype=torch.float32)


for _name, _implementation, _fake in (
    ("quantize", _quantize, _quantize_fake),
    ("forward8", _forward8, _forward8_fake),
    ("fp8_forward", fp8_forward, _fp8_forward_fake),
    ("fp8_varlen_forward", fp8_varlen_forward, _fp8_varlen_forward_fake),
):
    library.impl(_name, _implementation, "CompositeExplicitAutograd")
    library.impl(_name, dense_library.refuse_vmap, "FuncTorchBatched")
    torch.library.register_fake(f"flashhopper::{_name}", _fake, lib=library)

quantize_op = torch.ops.flashhopper.quantize.default
forward8_op = torch.ops.flashhopper.forward8.default
fp8_forward_op = torch.ops.flashhopper.fp8_forward.default
fp8_varlen_forward_op = torch.ops.flashhopper.fp8_varlen_forward.default


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[_Tensor, _Tensor]) -> None:
    q, k, v, _, *numbers = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.numbers = numbers
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dout: _Tensor | None, dlse: _Tensor | None) -> tuple[_Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    scale, left, right, *launch = ctx.numbers
    dout = torch.zeros_like(out) if dout is None else dout
    run = dense_ops.gradient_runner(dense_library.backward_op, dense_library.dense_backward, dense_ops.once, q)
    dq, dk, dv, _ = run(dout, dlse, q, k, v, out, lse, None, scale, left, right, 0.0, *launch)
    return *_without_nan(dout, dlse, dq, dk, dv), *(None,) * 7


def _varlen_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[_Tensor, _Tensor]) -> None:
    q, k, v, _, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_q, max_k, *numbers = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    ctx.lengths, ctx.numbers = (max_q, max_k), numbers
    ctx.set_materialize_grads(False)


def _varlen_gradient(ctx: Any, dout: _Tensor | None, dlse: _Tensor | None) -> tuple[_Tensor | None, ...]:
    tensors = ctx.saved_tensors
    scale, left, right, *launch = ctx.numbers
    dout = torch.zeros_like(tensors[3]) if dout is None else dout
    run = dense_ops.gradient_runner(
        dense_library.varlen_backward_op, dense_library.varlen_backward, dense_ops.once_varlen, tensors[0]
    )
    dq, dk, dv, _ = run(dout, dlse, *tensors, *ctx.lengths, None, scale, left, right, 0.0, *launch)
    return *_without_nan(dout, dlse, dq, dk, dv), *(None,) * 13


def _without_nan(dout: _Tensor, dlse: _Tensor | None, *gradients: _Tensor) -> tuple[_Tensor, ...]:
    """NaN that the incoming gradients do not explain becomes 0.

    The backward takes exp(16-bit score - 8-bit lse), which overflows where quantising moved a score by more than a
    format's range (e^11 in float16), and the difference of two infinities is none. An infinity stays, and so does what
    comes from a gradient that was not finite: gradient scalers look for them.
    """
    explained = ~dout.isfinite().all()
    if dlse is not None:
        explained = explained | ~dlse.isfinite().all()
    return tuple(torch.where(x.isnan() & ~explained, 0.0, x) for x in gradients)


def _refuse_gradient(ctx: Any, *_: Any) -> NoReturn:
    raise RuntimeError(
        "flashhopper.quantize_fp8 and flash_attn_fp8_func have no gradient: use flash_attn_func(q, k, v, fp8=recipe), "
        "whose gradient is straight-through, or call them under torch.no_grad()"
    )


def _no_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[_Tensor, ...]) -> None:
    """A refusal needs nothing saved."""


for _name, _backward, _setup in (
    ("quantize", _refuse_gradient, _no_context),
    ("forward8", _refuse_gradient, _no_context),
    ("fp8_forward", _gradient, _context),
    ("fp8_varlen_forward", _varlen_gradient, _varlen_context),
):
    torch.library.register_autograd(f"flashhopper::{_name}", _backward, setup_context=_setup, lib=library)

differentiable = dense_ops.function("Fp8Attention", fp8_forward, _context, _gradient)
differentiable_varlen = dense_ops.function("Fp8VarlenAttention", fp8_varlen_forward, _varlen_context, _varlen_gradient)
