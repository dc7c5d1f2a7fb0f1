"""8-bit calls of the public functions: checks, then an operator. Before it: interface.py; after it: operators.py.

What 8-bit attention does not have is refused by name, never ignored.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import backends, checks, ops
from . import formats, operators
from .quantize import INPUT_DTYPES, Fp8QKV
from .recipe import Fp8Recipe

_Tensor = torch.Tensor
OUTPUT_DTYPES = (torch.float16, torch.bfloat16)


def check_recipe(fp8: object, name: str = "fp8") -> Fp8Recipe:
    """fp8 itself, if it is a recipe."""
    if not isinstance(fp8, Fp8Recipe):
        raise ValueError(
            f"{name} is {fp8!r}: must be a flashhopper.Fp8Recipe or None; "
            f"pass {name}=flashhopper.Fp8Recipe() for the default recipe"
        )
    return fp8


def check_inputs(q: _Tensor, head_dim: int, head_dim_v: int, allowed: tuple[torch.dtype, ...] = OUTPUT_DTYPES) -> None:
    """Check what 8-bit attention asks of q, k, v beyond the 16-bit one; they passed the checks of that."""
    if q.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(f"q has dtype {q.dtype}: with fp8 it must be one of {names}; cast with .to(torch.bfloat16)")
    formats.computed_head_dims(head_dim, head_dim_v)


def check_options(softcap: float, sink: object, out: object = None) -> None:
    """Refuse by name what 8-bit attention does not have."""
    if softcap != 0.0:
        raise NotImplementedError(f"softcap={softcap} is not available with fp8: pass softcap=0.0, or fp8=None")
    if sink is not None:
        raise NotImplementedError("sink is not available with fp8: pass sink=None, or fp8=None")
    if out is not None:
        raise NotImplementedError("out is not available with fp8: pass out=None and copy the result, or fp8=None")


def dense(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    recipe: Fp8Recipe,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    sm_margin: int,
    deterministic: bool,
) -> tuple[_Tensor, _Tensor]:
    """flash_attn_func with a recipe: out of q's dtype, and lse."""
    q, k, v, _ = ops.autocast(q, k, v, None)
    sizes = checks.dense(q, k, v)
    check_inputs(q, sizes[3], sizes[6])
    checks.scalars(softmax_scale, 0.0, sm_margin)
    scale = sizes[3] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = checks.normalize_window(causal, window_size)
    left, right = checks.widen_window(left, right, sizes[1], sizes[4])
    arguments = (q, k, v, recipe.code, scale, left, right, sm_margin, deterministic, backends.backend())
    return _run(operators.fp8_forward, operators.fp8_forward_op, operators.differentiable, q, k, v, arguments)


def packed(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    packing: tuple[Any, ...],
    recipe: Fp8Recipe,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    sm_margin: int,
    deterministic: bool,
) -> tuple[_Tensor, _Tensor]:
    """flash_attn_varlen_func with a recipe; packing is as of checks.packed."""
    q, k, v, _ = ops.autocast(q, k, v, None)
    sizes = checks.packed(q, k, v, *packing)
    check_inputs(q, sizes[3], sizes[6])
    checks.scalars(softmax_scale, 0.0, sm_margin)
    scale = sizes[3] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = checks.normalize_window(causal, window_size)
    left, right = checks.widen_window(left, right, packing[4], packing[5])
    arguments = (q, k, v, recipe.code, *packing, scale, left, right, sm_margin, deterministic, backends.backend())
    operator, differentiable = operators.fp8_varlen_forward_op, operators.differentiable_varlen
    return _run(operators.fp8_varlen_forward, operator, differentiable, q, k, v, arguments)


def _run(
    implementation: Any, operator: Any, differentiable: Any, q: _Tensor, k: _Tensor, v: _Tensor, arguments: Any
) -> tuple[_Tensor, _Tensor]:
    """By the shortest way that this call allows, as ops.dense_attention."""
    if ops.is_plain(q, k, v, None) and not ops.wants_gradient(q, k, v, None):
        out, lse = implementation(*arguments)
        return out, lse
    ops.refuse_tangents(q, k, v)
    out, lse = (operator if ops.is_dispatched() else differentiable)(*arguments)
    return out, lse


def quantize_fp8(q: _Tensor, k: _Tensor, v: _Tensor, recipe: Fp8Recipe | None = None) -> Fp8QKV:
    """Quantise queries, keys and values to 8 bits; flash_attn_func(..., fp8=recipe) does it in one call with attention.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16 or float32, any strides; head_dim at most 256.
        k: (batch, seqlen_k, kv_heads, head_dim); v: (batch, seqlen_k, kv_heads, head_dim_v).
        recipe: default Fp8Recipe(), which is Fp8Recipe.accurate().

    Returns:
        An Fp8QKV: data, scales, means. `.to_reference()` dequantises; `flashhopper.fp8.emulate.attention` attends.

    Raises:
        ValueError: an argument breaks a rule; the message names it, its value, the rule and the way out.
        RuntimeError: a gradient was asked through it; it has none.
    """
    recipe = Fp8Recipe() if recipe is None else check_recipe(recipe, "recipe")
    sizes = checks.dense(q, k, v)
    check_inputs(q, sizes[3], sizes[6], INPUT_DTYPES)
    backend = backends.backend()
    if ops.is_plain(q, k, v, None) and not ops.wants_gradient(q, k, v, None):
        return operators.run_quantize(q, k, v, recipe, backend)
    tensors = operators.quantize_op(q, k, v, recipe.code, backend)
    dtype = torch.bfloat16 if q.dtype == torch.float32 else q.dtype
    return operators.unflatten(tensors, recipe, (sizes[3], sizes[6]), dtype)
