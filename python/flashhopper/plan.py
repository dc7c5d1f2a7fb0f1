"""explain(): what a call would do, without doing it. Before it: your code; after it: backends.py, plan_engines.py.

A packed call's plan counts what its lengths ask for, which are read on the host: explain() waits for the device, the
call itself does not.
"""

from __future__ import annotations

from typing import Any

import torch

from . import backends, checks, flops
from .engine import hopper_backward, hopper_fp8, tiles
from .engine.mask import Mask
from .engine.tiled import Packing
from .fp8 import Fp8Recipe
from .fp8 import attention as fp8_attention
from .plan_engines import Call, Plan, hopper_plan, notes, quantizer_text, tiled_plan

__all__ = ["Plan", "explain"]

_TILED_GRADIENTS = "tiled engine, recomputed from the saved (q, k, v, out, lse); bit-reproducible"


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    *,
    sink: torch.Tensor | None = None,
    deterministic: bool = False,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    fp8: Fp8Recipe | None = None,
    return_lse: bool = False,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
) -> Plan:
    """What flash_attn_func, or with cu_seqlens flash_attn_varlen_func, would do with these arguments here and now;
    launches nothing.

    The lengths of a packed call are read on the host, which waits for the device.

    Returns:
        A Plan: engine and why, tile config, grid, scheduler, shared memory and workspace, flops, bytes, copies, and
        where gradients come from. When set_backend demands what cannot run, `why` says what the call would raise.

    Raises:
        ValueError, NotImplementedError: as the function.
    """
    checks.not_built(num_splits)
    packing = _packing(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    if packing is None:
        sizes = checks.dense(q, k, v)
        checks.pack_gqa(pack_gqa, sizes[2], sizes[5])
        lengths = [(sizes[1], sizes[4])] * sizes[0]
    else:
        sizes = _longest(checks.packed(q, k, v, *packing), packing)
        checks.no_packing(pack_gqa, "packed calls")
        lengths = flops.packed_lengths(packing, q.shape[0], k.shape[0])
    if sink is not None:
        checks.sink(sink, sizes[2], q.device)
    checks.scalars(softmax_scale, softcap, sm_margin)
    if fp8 is not None:
        fp8_attention.check_recipe(fp8)
        fp8_attention.check_options(softcap, sink)
        checks.no_packing(pack_gqa, "8-bit calls")
        fp8_attention.check_inputs(q, sizes[3], sizes[6])
    left, right = checks.normalize_window(causal, window_size)
    left, right = checks.widen_window(left, right, sizes[1], sizes[4])
    scale = sizes[3] ** -0.5 if softmax_scale is None else softmax_scale
    options = (scale, softcap, sink is not None, sm_margin, deterministic, pack_gqa)
    return _plan(Call(q, k, v, sizes, packing, lengths, left, right, *options), fp8)


def _packing(*given: Any) -> Packing | None:
    """The packing of a packed call, None of a dense one."""
    packing = Packing(*given)
    if all(x is None for x in packing):
        return None
    for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
        if getattr(packing, name) is None:
            raise ValueError(
                f"{name} is None: packed sequences need cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k; "
                "give it, or none of them for a padded batch"
            )
    return packing


def _longest(sizes: checks.PackedShape, packing: Packing) -> checks.DenseShape:
    batch, _, heads, head_dim, _, kv_heads, head_dim_v = sizes
    return batch, packing.max_seqlen_q, heads, head_dim, packing.max_seqlen_k, kv_heads, head_dim_v


def _plan(call: Call, recipe: Fp8Recipe | None) -> Plan:
    q, k, v = call.q, call.k, call.v
    _, _, heads, head_dim, _, _, head_dim_v = call.sizes
    requested = backends.backend()
    if recipe is None:
        reason, is_broken = call.refusal()
    elif call.packing is not None:
        reason, is_broken = hopper_fp8.packed_refusal(q.device, q.dtype, (head_dim, head_dim_v), recipe, call.scale)
    else:
        reason, is_broken = hopper_fp8.forward_refusal(q.device, (head_dim, head_dim_v), recipe, call.scale)
    runs_hopper = requested != "tiled" and (reason is None or requested == "hopper" or is_broken)
    if call.packing is not None and not runs_hopper and not flops.is_fake(call.packing):
        for _ in call.packing.slices(*call.totals):
            pass  # raises for lengths that the tiled engine refuses
    kept = sum(Mask(sq, sk, call.left, call.right).kept() for sq, sk in call.lengths)
    rows = q.shape[:-1].numel()
    elements = q.numel() + k.numel() + v.numel() + rows * head_dim_v
    common: dict[str, object] = {
        "requested": requested,
        "why": _why(requested, reason, runs_hopper),
        "problem": _problem_text(call),
        "flops": float(flops.forward_flops(kept, heads, head_dim, head_dim_v)),
        "bytes": float(elements * q.element_size() + rows * tiles.accumulator_dtype(q.dtype).itemsize),
        "gradients": ("straight-through; " if recipe is not None else "") + _gradients(requested, call),
        "notes": notes(),
    }
    if recipe is not None:
        common |= {"recipe": str(recipe), "quantizer": quantizer_text(call, recipe, requested, reason)}
    if runs_hopper and reason is None:
        return hopper_plan(call, recipe, common)
    return tiled_plan(call, recipe, "hopper" if runs_hopper else "tiled", common)


def _why(requested: str, reason: str | None, runs_hopper: bool) -> str:
    if requested == "tiled":
        return "asked for by name"
    if reason is None:
        return "a Hopper GPU, dtype, head sizes and options that the kernels have"
    return f"the call would raise RuntimeError, {reason}" if runs_hopper else reason


def _problem_text(call: Call) -> str:
    batch, seqlen_q, heads, head_dim, seqlen_k, kv_heads, head_dim_v = call.sizes
    of_queries, of_keys = f"seqlen_q {seqlen_q}", f"seqlen_k {seqlen_k}"
    if call.packing is not None:
        total_q, total_k = call.totals
        of_queries, of_keys = f"{total_q} packed queries (at most {seqlen_q})", f"{total_k} keys (at most {seqlen_k})"
    return (
        f"batch {batch}, {heads} heads on {kv_heads} KV heads, {of_queries}, {of_keys}, "
        f"head_dim {head_dim}/{head_dim_v}, "
        f"{_mask_text(call.left, call.right)}, {str(call.q.dtype).removeprefix('torch.')} on {call.q.device}"
    )


def _mask_text(left: int, right: int) -> str:
    if left < 0 and right == 0:
        return "causal"
    return "full" if left < 0 and right < 0 else f"window ({left}, {right})"


def _gradients(requested: str, call: Call) -> str:
    reason, _ = call.refusal(is_backward=True)
    if requested == "hopper" and reason is not None:
        return f"none: backward would raise RuntimeError, {reason}"
    if requested == "tiled" or reason is not None:
        return _TILED_GRADIENTS
    has_keys = call.k.shape[:-1].numel() > 0
    if not call.has_rows or not (has_keys or call.has_sink):
        return "hopper, zeros: the problem has no queries or no keys"
    row = hopper_backward.backward_plan(
        call.sizes,
        call.q.dtype,
        call.left,
        call.right,
        call.sm_margin,
        call.deterministic,
        call.q.device,
        call.totals,
    )
    order = "in a fixed order, bit-reproducible" if call.deterministic else "in the order of arrival"
    most = "" if call.packing is None else "at most "
    return (
        f"hopper, {row['config']}: {most}{row['tiles']} tiles of {row['tile_n']} keys, {row['grid']} thread blocks, "
        f"{row['smem_bytes']} bytes of shared memory, {row['workspace_bytes']} of workspace; dq summed {order}"
    )
