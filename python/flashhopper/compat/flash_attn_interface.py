"""FlashAttention-3's module with its names, argument order and defaults. Before it: your code; after it: interface.py.

    from flashhopper.compat import flash_attn_interface

    flash_attn_interface.install()  # from here on `import flash_attn_interface` is this module

What flashhopper does not have is refused by name. Unlike flash_attn_func here, return_attn_probs returns what it
returns there: (out, lse), not probabilities.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch

from .. import interface
from ..fp8.raw import flash_attn_fp8_func
from ..merge import merge_attention

_Tensor = torch.Tensor
_Result = _Tensor | tuple[_Tensor, ...]
_UNBOUNDED = (-1, -1)


def install() -> None:
    """Let `import flash_attn_interface` find this module; may be called again.

    Raises:
        RuntimeError: the module of that name is already imported from elsewhere.
    """
    here = sys.modules[__name__]
    found = sys.modules.setdefault("flash_attn_interface", here)
    if found is not here:
        raise RuntimeError(
            f"flash_attn_interface is already imported from {getattr(found, '__file__', None)}: "
            "call install() before the first import of it"
        )


def flash_attn_func(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: _Tensor | None = None,
    q_descale: _Tensor | None = None,
    k_descale: _Tensor | None = None,
    v_descale: _Tensor | None = None,
    window_size: tuple[int, int] = _UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> _Result:
    """flashhopper.flash_attn_func; float8_e4m3fn tensors go to flash_attn_fp8_func, where a missing descale means 1 and
    out is bfloat16.
    """
    _refuse(qv=qv, attention_chunk=attention_chunk)
    if q.dtype == torch.float8_e4m3fn:
        _refuse(num_splits=num_splits, pack_gqa=pack_gqa)
        descales = (q_descale, k_descale, v_descale)
        return flash_attn_fp8_func(
            q,
            k,
            v,
            *descales,
            softmax_scale,
            causal,
            window_size,
            softcap,
            scales=1.0,
            sm_margin=sm_margin,
            return_lse=return_attn_probs,
        )
    _refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return interface.flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic=deterministic,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
        return_lse=return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: _Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: _Tensor | None = None,
    k_descale: _Tensor | None = None,
    v_descale: _Tensor | None = None,
    window_size: tuple[int, int] = _UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> _Result:
    """flashhopper.flash_attn_qkvpacked_func."""
    _refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    return interface.flash_attn_qkvpacked_func(
        qkv,
        softmax_scale,
        causal,
        window_size,
        softcap,
        num_heads_q=num_heads_q,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_lse=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    cu_seqlens_q: _Tensor,
    cu_seqlens_k: _Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: _Tensor | None = None,
    seqused_k: _Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: _Tensor | None = None,
    q_descale: _Tensor | None = None,
    k_descale: _Tensor | None = None,
    v_descale: _Tensor | None = None,
    window_size: tuple[int, int] = _UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> _Result:
    """flashhopper.flash_attn_varlen_func."""
    _refuse(qv=qv, attention_chunk=attention_chunk, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return interface.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic=deterministic,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        return_lse=return_attn_probs,
    )


def flash_attn_combine(
    out_partial: _Tensor,
    lse_partial: _Tensor,
    out: _Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[_Tensor, _Tensor]:
    """Merge attention over disjoint sets of keys.

    Args:
        out_partial: (splits, batch, seqlen, heads, head_dim) float32.
        lse_partial: (splits, batch, seqlen, heads) float32.
        out: where to write (batch, seqlen, heads, head_dim).
        out_dtype: of the result; out_partial's by default.

    Returns:
        out and lse (batch, seqlen, heads).
    """
    merged, lse = merge_attention(out_partial, lse_partial.transpose(-1, -2))
    merged = merged if out_dtype is None else merged.to(out_dtype)
    return (merged if out is None else out.copy_(merged)), lse.transpose(-1, -2)


def flash_attn_with_kvcache(
    q: _Tensor,
    k_cache: _Tensor,
    v_cache: _Tensor,
    k: _Tensor | None = None,
    v: _Tensor | None = None,
    qv: _Tensor | None = None,
    rotary_cos: _Tensor | None = None,
    rotary_sin: _Tensor | None = None,
    cache_seqlens: int | _Tensor | None = None,
    cache_batch_idx: _Tensor | None = None,
    cache_leftpad: _Tensor | None = None,
    page_table: _Tensor | None = None,
    cu_seqlens_q: _Tensor | None = None,
    cu_seqlens_k_new: _Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: _Tensor | None = None,
    q_descale: _Tensor | None = None,
    k_descale: _Tensor | None = None,
    v_descale: _Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: _Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> NoReturn:
    """Refused by name: flashhopper has no kernel for a cache in this version."""
    raise NotImplementedError(
        "flash_attn_with_kvcache is not available in this version: pass the cache's valid keys to flash_attn_func, or "
        "their lengths as seqused_k to flash_attn_varlen_func"
    )


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: _Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: _Tensor | None = None,
    cu_seqlens_k_new: _Tensor | None = None,
    cache_leftpad: _Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = _UNBOUNDED,
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> NoReturn:
    """Refused by name: it prepares flash_attn_with_kvcache."""
    raise NotImplementedError("get_scheduler_metadata is not available in this version: nor is flash_attn_with_kvcache")


# What FlashAttention-3 takes and flashhopper does not: argument, the values that ask for nothing, the way out.
_MISSING: dict[str, tuple[tuple[Any, ...], str]] = {
    "qv": ((None,), "attention with a second query is not available"),
    "attention_chunk": ((0,), "pass window_size, or chunks as sequences to flash_attn_varlen_func"),
    "q_descale": ((None,), "scales go with float8_e4m3fn tensors in flash_attn_func; pass None"),
    "k_descale": ((None,), "scales go with float8_e4m3fn tensors in flash_attn_func; pass None"),
    "v_descale": ((None,), "scales go with float8_e4m3fn tensors in flash_attn_func; pass None"),
    "num_splits": ((1,), "pass num_splits=1 with 8-bit tensors"),
    "pack_gqa": ((None, False), "pass pack_gqa=None with 8-bit tensors"),
}


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        nothing, way_out = _MISSING[name]
        if isinstance(value, _Tensor) or value not in nothing:
            shown = f"of shape {tuple(value.shape)}" if isinstance(value, _Tensor) else repr(value)
            raise NotImplementedError(f"{name} is {shown}: not available in this version; {way_out}")
