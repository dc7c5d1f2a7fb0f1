"""The public attention functions. Before it: your code; after it: checks.py -> ops.py -> bindings/module.cpp.

Names, argument order and layout follow flash-attn; what it does not have is keyword-only.
"""

from __future__ import annotations

import torch

from . import backends, checks, ops
from .engine import hopper
from .fp8 import Fp8Recipe
from .fp8 import attention as fp8_attention

_UNBOUNDED = (-1, -1)
_Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _UNBOUNDED,
    softcap: float = 0.0,
    *,
    sink: torch.Tensor | None = None,
    deterministic: bool = False,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    fp8: Fp8Recipe | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    **absent: object,
) -> _Result:
    """softmax(softmax_scale q k^T + mask) v, exact, differentiable in q, k, v and sink.

    FlashAttention (Dao et al. 2022, Dao 2023; on Hopper, Shah et al. 2024).

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16 or bfloat16 on the Hopper kernels, float32 and float64 too on
            the tiled engine. Any strides; the kernels read tensors whose last dimension is contiguous and whose other
            strides and address are multiples of 16 bytes where they lie, and explain() names the ones that they copy.
        k: (batch, seqlen_k, kv_heads, head_dim); heads must be a multiple of kv_heads (GQA, MQA).
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        softmax_scale: factor of the scores; default 1 / sqrt(head_dim).
        causal: bottom-right aligned; query i sees keys j <= i + seqlen_k - seqlen_q.
        window_size: (left, right) in keys, -1 unbounded; query i sees keys from i + seqlen_k - seqlen_q - left to
            i + seqlen_k - seqlen_q + right. With causal, right is 0.
        softcap: softcap * tanh(score / softcap) before the mask; 0.0 is off.
        sink: (heads,) logits that join each row's denominator and have no value.
        deterministic: bit-equal gradients in every run. The Hopper backward then adds to dq in a fixed order, at some
            cost in time (docs/benchmarks.md) and four bytes for each query block; the tiled engine's gradients always
            are.
        num_splits: must be 1 in this version.
        pack_gqa: whether the query heads of a KV head share tiles of the forward kernel, whose keys are then read once
            for them: True, False, or None, where the tiles then compute fewer key blocks (short queries, and most
            causal and window masks; explain() tells). No bit of the result depends on it. True is refused with fp8 and
            where heads / kv_heads has no divisor from 2 to 64. The tiled engine has no such tiles and ignores it, and
            so does the backward.
        sm_margin: multiprocessors that the kernels leave free.
        fp8: a recipe for attention in 8 bits, such as flashhopper.Fp8Recipe(); None is the inputs' own precision. q, k
            and v are then float16 or bfloat16, quantised in the call, and out is of their dtype; softcap and sink are
            refused. The gradient is straight-through: that of 16-bit attention on q, k, v, taken with the 8-bit out and
            lse (docs/numerics.md).
        return_lse: also return lse, which is differentiable too.
        out: memory for the result, contiguous, of its shape and dtype and apart from the inputs', for calls without
            gradients. The Hopper kernels write to it in eager calls in 16 bits, whose address must then be a multiple
            of 16 bytes; elsewhere the result is copied there.
        absent: dropout_p, alibi_slopes, attn_bias and attn_mask, which are refused unless they ask for nothing.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) of q's dtype, contiguous. With return_lse, (out, lse): lse (batch,
        heads, seqlen_q) float32 (float64 for float64 inputs), natural logarithm of the softmax denominator, sink
        included. A row that sees nothing gives out 0 and lse -inf (the sink's logit, with a sink).

    Raises:
        ValueError: an argument breaks a rule; the message names it, its value, the rule and the way out.
        NotImplementedError: an option that this version does not have.
        RuntimeError: the "hopper" backend was asked for and cannot serve the call, or a CUDA call failed.
    """
    if absent:
        checks.absent("flash_attn_func", absent)
    if num_splits != 1 or fp8 is not None:
        checks.not_built(num_splits)
        checks.no_packing(pack_gqa, "8-bit calls")
        recipe = fp8_attention.check_recipe(fp8)
        fp8_attention.check_options(softcap, sink, out)
        result, exact_lse = fp8_attention.dense(
            q, k, v, recipe, softmax_scale, causal, window_size, sm_margin, deterministic
        )
        return (result, exact_lse) if return_lse else result
    backend = backends.backend()
    key = None
    is_plain = ops.is_plain(q, k, v, sink)
    if not is_plain or ops.any_autocast():
        q, k, v, sink = ops.autocast(q, k, v, sink)
    elif sink is None and window_size is _UNBOUNDED and softcap == 0.0 and not ops.wants_gradient(q, k, v, sink):
        # The checks below cost more than the launch, and a call that passed them once will pass them again.
        key = ops.call_key(q, k, v, softmax_scale, causal, sm_margin, pack_gqa, backend)
        prepared = hopper.remembered.get(key) if key is not None else None
        if prepared is not None:
            if out is not None:
                ops.check_output(out, q, k, v)
            result, lse = prepared.run(q, k, v, return_lse, out)
            return (result, lse) if return_lse and lse is not None else result
    sizes = checks.dense(q, k, v)
    checks.pack_gqa(pack_gqa, sizes[2], sizes[5])
    if sink is not None:
        checks.sink(sink, sizes[2], q.device)
    if softmax_scale is not None or softcap != 0.0 or sm_margin != 0:
        checks.scalars(softmax_scale, softcap, sm_margin)
    if softmax_scale is None:
        softmax_scale = sizes[3] ** -0.5
    if window_size is _UNBOUNDED:
        left, right = -1, 0 if causal else -1
    else:
        left, right = checks.normalize_window(causal, window_size)
        left, right = checks.widen_window(left, right, sizes[1], sizes[4])
    if out is not None:
        ops.check_output(out, q, k, v, sink)
    result, lse = ops.dense_attention(
        q,
        k,
        v,
        sink,
        softmax_scale,
        left,
        right,
        softcap,
        sm_margin,
        deterministic,
        backend,
        pack_gqa,
        is_plain,
        sizes,
        return_lse,
        key,
        out,
    )
    if out is not None and result is not out:
        result = out.copy_(result)
    return (result, lse) if return_lse and lse is not None else result


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _UNBOUNDED,
    softcap: float = 0.0,
    *,
    num_heads_q: int | None = None,
    sink: torch.Tensor | None = None,
    deterministic: bool = False,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    fp8: Fp8Recipe | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    **absent: object,
) -> _Result:
    """flash_attn_func on the fused result of a QKV projection; q, k and v are read where they lie.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim); or, with num_heads_q, (batch, seqlen, num_heads_q + 2 * kv_heads,
            head_dim): the query heads, then the key heads, then the value heads.
        num_heads_q: number of query heads of the second layout.

    The other arguments, the result and the errors are flash_attn_func's. The gradient of qkv is written once, not
    summed from three.
    """
    q, k, v = checks.split_qkv(qkv, num_heads_q)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size,
        softcap,
        sink=sink,
        deterministic=deterministic,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
        fp8=fp8,
        return_lse=return_lse,
        out=out,
        **absent,
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _UNBOUNDED,
    softcap: float = 0.0,
    *,
    sink: torch.Tensor | None = None,
    deterministic: bool = False,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    fp8: Fp8Recipe | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    **absent: object,
) -> _Result:
    """Attention of sequences packed one behind the other, each on its own; differentiable.

    Args:
        q: (total_q, heads, head_dim); k: (total_k, kv_heads, head_dim); v: (total_k, kv_heads, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,) on q's device; sequence b is rows [cu_seqlens[b], cu_seqlens[b +
            1]).
        max_seqlen_q, max_seqlen_k: at least the longest sequence.
        seqused_q, seqused_k: int32 (batch,), how many leading rows of each sequence exist. Rows beyond are never read
            into a result; as queries they give out 0 and lse -inf.

    The other arguments and the errors are flash_attn_func's; masks are aligned with each sequence's own (used)
    lengths. The Hopper kernels read the lengths on the device: nothing waits for them, and a captured CUDA graph takes
    those of its replay. So they cannot refuse wrong ones; offsets are cut off at the ends of the tensors. The tiled
    engine reads them on the host. With fp8 each sequence has its own means and scales; the kernels take recipes with
    scales of 128 keys, and of 1 or 128 queries.

    Returns:
        out (total_q, heads, head_dim_v); with return_lse, (out, lse) with lse (heads, total_q).
    """
    if absent:
        checks.absent("flash_attn_varlen_func", absent)
    checks.not_built(num_splits)
    checks.no_packing(pack_gqa, "flash_attn_varlen_func")
    packing = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    if fp8 is not None:
        recipe = fp8_attention.check_recipe(fp8)
        fp8_attention.check_options(softcap, sink, out)
        result, lse = fp8_attention.packed(
            q, k, v, packing, recipe, softmax_scale, causal, window_size, sm_margin, deterministic
        )
        return (result, lse) if return_lse else result
    q, k, v, sink = ops.autocast(q, k, v, sink)
    sizes = checks.packed(q, k, v, *packing)
    if sink is not None:
        checks.sink(sink, sizes[2], q.device)
    checks.scalars(softmax_scale, softcap, sm_margin)
    if softmax_scale is None:
        softmax_scale = sizes[3] ** -0.5
    left, right = checks.normalize_window(causal, window_size)
    left, right = checks.widen_window(left, right, max_seqlen_q, max_seqlen_k)
    if out is not None:
        offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        ops.check_output(out, q, k, v, sink, **offsets, seqused_q=seqused_q, seqused_k=seqused_k)
    result, lse = ops.packed_attention(
        q, k, v, sink, *packing, softmax_scale, left, right, softcap, sm_margin, deterministic, backends.backend(), out
    )
    if out is not None and result is not out:
        result = out.copy_(result)
    return (result, lse) if return_lse else result
