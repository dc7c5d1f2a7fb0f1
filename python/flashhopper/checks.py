"""Argument validation shared by eager calls, registered ops and fake tensors. Before it: interface.py; after it:
ops.py.

Every check costs next to nothing when it passes; messages are built only on failure and name the argument, what it is,
the rule and the way out. Nothing here reads a tensor's values.
"""

from __future__ import annotations

import itertools
import numbers
from typing import NoReturn

import torch

FLOAT_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))

DenseShape = tuple[
    int, int, int, int, int, int, int
]  # batch, seqlen_q, heads, head_dim, seqlen_k, kv_heads, head_dim_v
PackedShape = tuple[int, int, int, int, int, int, int]  # batch, total_q, heads, head_dim, total_k, kv_heads, head_dim_v


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> DenseShape:
    """Check q, k, v of dense attention; return their sizes."""
    try:
        batch, seqlen_q, heads, head_dim = q.shape
        k_batch, seqlen_k, kv_heads, k_head_dim = k.shape
        v_batch, v_seqlen, v_heads, head_dim_v = v.shape
    except (ValueError, AttributeError, TypeError):
        _fail_rank(q, k, v, 4, "(batch, seqlen, heads, head_dim)")
    if batch != k_batch or batch != v_batch:
        raise ValueError(f"q, k, v have batch sizes {batch}, {k_batch}, {v_batch}: must be equal (dimension 0)")
    if seqlen_k != v_seqlen:
        raise ValueError(f"v has seqlen {v_seqlen}, k has {seqlen_k}: must be equal (dimension 1)")
    _heads_and_kinds(q, k, v, heads, kv_heads, v_heads, head_dim, k_head_dim)
    return batch, seqlen_q, heads, head_dim, seqlen_k, kv_heads, head_dim_v


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> PackedShape:
    """Check the tensors of attention over packed sequences; return their sizes."""
    try:
        total_q, heads, head_dim = q.shape
        total_k, kv_heads, k_head_dim = k.shape
        total_v, v_heads, head_dim_v = v.shape
    except (ValueError, AttributeError, TypeError):
        _fail_rank(q, k, v, 3, "(total_tokens, heads, head_dim)")
    if total_k != total_v:
        raise ValueError(f"v has {total_v} tokens, k has {total_k}: must be equal (dimension 0)")
    _heads_and_kinds(q, k, v, heads, kv_heads, v_heads, head_dim, k_head_dim)
    offsets(cu_seqlens_q, "cu_seqlens_q", q.device)
    offsets(cu_seqlens_k, "cu_seqlens_k", q.device)
    batch = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k.shape[0] - 1 != batch:
        raise ValueError(
            f"cu_seqlens_k has {cu_seqlens_k.shape[0]} entries, cu_seqlens_q has {batch + 1}: "
            "both must hold batch + 1 offsets"
        )
    for name, used in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if used is not None:
            lengths(used, name, batch, q.device)
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if value < 0:
            raise ValueError(f"{name} is {value}: must be the length of the longest sequence, 0 or more")
    return batch, total_q, heads, head_dim, total_k, kv_heads, head_dim_v


def _heads_and_kinds(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    kv_heads: int,
    v_heads: int,
    head_dim: int,
    k_head_dim: int,
) -> None:
    device = q.get_device()
    if (
        kv_heads == v_heads
        and head_dim == k_head_dim
        and (heads == kv_heads or (kv_heads != 0 and heads % kv_heads == 0))
        and head_dim != 0
        and q.dtype is k.dtype
        and q.dtype is v.dtype
        and q.dtype in FLOAT_DTYPES
        and (
            (device >= 0 and k.get_device() == device and v.get_device() == device) or q.device == k.device == v.device
        )
    ):
        return
    _fail_heads_and_kinds(q, k, v, heads, kv_heads, v_heads, head_dim, k_head_dim)


def _fail_heads_and_kinds(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    kv_heads: int,
    v_heads: int,
    head_dim: int,
    k_head_dim: int,
) -> NoReturn:
    if kv_heads != v_heads:
        raise ValueError(f"v has {v_heads} heads, k has {kv_heads}: must be equal")
    if head_dim != k_head_dim:
        raise ValueError(f"k has head_dim {k_head_dim}, q has {head_dim}: must be equal (only v's head_dim may differ)")
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads != 0):
        raise ValueError(
            f"k has {kv_heads} heads, q has {heads}: heads_q must be a multiple of heads_kv "
            "(repeat or drop heads so that it is)"
        )
    if head_dim == 0:
        raise ValueError("q has head_dim 0: must be at least 1")
    dtype = q.dtype
    if k.dtype != dtype or v.dtype != dtype:
        raise ValueError(f"q, k, v have dtypes {dtype}, {k.dtype}, {v.dtype}: must be equal; cast with .to({dtype})")
    if dtype not in FLOAT_DTYPES:
        _fail_dtype(dtype)
    raise ValueError(f"q, k, v are on {q.device}, {k.device}, {v.device}: must be on one device")


def _fail_rank(q: object, k: object, v: object, rank: int, layout: str) -> NoReturn:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} is a {type(x).__name__}: must be a torch.Tensor of shape {layout}")
        if x.dim() != rank:
            other = " (packed sequences go to flash_attn_varlen_func)" if rank == 4 and x.dim() == 3 else ""
            other = " (padded batches go to flash_attn_func)" if rank == 3 and x.dim() == 4 else other
            raise ValueError(f"{name} has shape {tuple(x.shape)}: must have {rank} dimensions, {layout}{other}")
    raise ValueError(f"q, k, v: must be torch.Tensors of shape {layout}")


def _fail_dtype(dtype: torch.dtype) -> NoReturn:
    if "float8" in str(dtype):
        raise ValueError(
            f"q has dtype {dtype}: 8-bit inputs need their scales, which this function does not take; "
            "pass float16 or bfloat16, or go to flash_attn_fp8_func"
        )
    raise ValueError(
        f"q has dtype {dtype}: must be float16, bfloat16, float32 or float64; cast with .to(torch.bfloat16)"
    )


def offsets(cu_seqlens: torch.Tensor, name: str, device: torch.device) -> None:
    """Check a tensor of batch + 1 offsets."""
    if not isinstance(cu_seqlens, torch.Tensor):
        raise ValueError(f"{name} is a {type(cu_seqlens).__name__}: must be an int32 tensor of batch + 1 offsets")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{name} has shape {tuple(cu_seqlens.shape)}: must be (batch + 1,), offsets that start at 0")
    _int32(cu_seqlens, name, device)


def lengths(used: torch.Tensor, name: str, batch: int, device: torch.device) -> None:
    """Check a tensor of batch sequence lengths."""
    if not isinstance(used, torch.Tensor):
        raise ValueError(f"{name} is a {type(used).__name__}: must be an int32 tensor of shape (batch,)")
    if used.dim() != 1 or used.shape[0] != batch:
        raise ValueError(f"{name} has shape {tuple(used.shape)}: must be ({batch},), one length a sequence")
    _int32(used, name, device)


def _int32(x: torch.Tensor, name: str, device: torch.device) -> None:
    if x.dtype != torch.int32:
        raise ValueError(f"{name} has dtype {x.dtype}: must be int32; cast with .to(torch.int32)")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, q on {device}: must be on one device")


def sequence_lengths(offsets: list[int], used: list[int] | None, total: int, longest: int, side: str) -> list[int]:
    """Check offsets that are at hand as numbers; return each sequence's length. side is "q" or "k"."""
    name = f"cu_seqlens_{side}"
    if offsets[0] != 0:
        raise ValueError(f"{name} starts at {offsets[0]}: must start at 0")
    if offsets[-1] > total:
        raise ValueError(f"{name} ends at {offsets[-1]}, {side} has {total} tokens: must not exceed them")
    result = []
    for b, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if end < begin:
            raise ValueError(f"{name} falls from {begin} to {end} at sequence {b}: must not decrease")
        length = end - begin
        if used is not None:
            if not 0 <= used[b] <= length:
                raise ValueError(
                    f"seqused_{side} is {used[b]} for sequence {b} of length {length}: must be between 0 and its length"
                )
            length = used[b]
        if length > longest:
            raise ValueError(
                f"max_seqlen_{side} is {longest}, sequence {b} has {length} tokens: "
                "must be at least the longest sequence"
            )
        result.append(length)
    return result


def sink(x: torch.Tensor, heads: int, device: torch.device) -> None:
    """Check the sink: one logit per query head."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(
            f"sink is a {type(x).__name__}: must be a tensor of shape ({heads},), one logit per query head"
        )
    if x.dim() != 1 or x.shape[0] != heads:
        raise ValueError(f"sink has shape {tuple(x.shape)}: must be ({heads},), one logit per query head")
    if x.dtype not in FLOAT_DTYPES:
        raise ValueError(f"sink has dtype {x.dtype}: must be a floating-point dtype; cast with .to(torch.float32)")
    if x.device != device:
        raise ValueError(f"sink is on {x.device}, q on {device}: must be on one device")


def normalize_window(causal: bool, window_size: tuple[int, int]) -> tuple[int, int]:
    """(causal, window_size) as one (left, right) pair; -1 is unbounded, causal is right = 0."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size is {window_size!r}: must be a pair (left, right), -1 for unbounded") from None
    if left < -1 or right < -1:
        raise ValueError(f"window_size is ({left}, {right}): each side must be 0 or more, or -1 for unbounded")
    return left, 0 if causal else right


def widen_window(left: int, right: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """Bounds that hide nothing at these lengths become -1, so that (seqlen, 0) and causal are one and the same call."""
    if left >= 0 and left >= seqlen_k - 1:
        left = -1
    # A right bound of 0 is causal attention, which the kernels have: it stays.
    if right > 0 and right >= seqlen_q - 1:
        right = -1
    return left, right


def split_qkv(qkv: torch.Tensor, num_heads_q: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of q, k and v in a fused tensor."""
    if not isinstance(qkv, torch.Tensor):
        raise ValueError(f"qkv is a {type(qkv).__name__}: must be a torch.Tensor")
    if num_heads_q is None:
        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise ValueError(
                f"qkv has shape {tuple(qkv.shape)}: must be (batch, seqlen, 3, heads, head_dim), "
                "or give num_heads_q for (batch, seqlen, num_heads_q + 2 * kv_heads, head_dim)"
            )
        q, k, v = qkv.unbind(2)
        return q, k, v
    if qkv.dim() != 4:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}: with num_heads_q it must be "
            "(batch, seqlen, num_heads_q + 2 * kv_heads, head_dim)"
        )
    rest = qkv.shape[2] - num_heads_q
    if num_heads_q < 0 or rest < 0 or rest % 2 != 0:
        raise ValueError(
            f"num_heads_q is {num_heads_q}, qkv has {qkv.shape[2]} heads: "
            "what is left beside the query heads must split evenly into key and value heads"
        )
    q, k, v = torch.split(qkv, [num_heads_q, rest // 2, rest // 2], dim=2)
    return q, k, v


def scalars(softmax_scale: float | None, softcap: float, sm_margin: int) -> None:
    """Check the numbers of a call; None takes the default 1 / sqrt(head_dim)."""
    if softmax_scale is not None:
        _finite(softmax_scale, "softmax_scale", "None takes 1 / sqrt(head_dim)")
    _finite(softcap, "softcap", "0.0 turns it off")
    if softcap < 0.0:
        raise ValueError(f"softcap is {softcap}: must be 0 or more; 0.0 turns it off")
    if sm_margin < 0:
        raise ValueError(f"sm_margin is {sm_margin}: must be 0 or more multiprocessors left free")


def _finite(value: object, name: str, way_out: str) -> None:
    if not isinstance(value, numbers.Real):
        raise ValueError(f"{name} is a {type(value).__name__}: must be a Python float; {way_out}")
    if value - value != 0:  # NaN for infinities and NaN; math.isfinite does not trace
        raise ValueError(f"{name} is {value}: must be finite; {way_out}")


def not_built(num_splits: int) -> None:
    """Refuse by name what these functions will take in a later version."""
    if num_splits != 1:
        raise NotImplementedError(f"num_splits={num_splits} is not available in this version: pass num_splits=1")


MOST_PACKED_HEADS = 64  # rows of a consumer warpgroup, kWarpgroupRows in cpp/core/config.hpp


def pack_gqa(packs: bool | None, heads: int, kv_heads: int) -> None:
    """Whether query heads may share tiles as asked: where a group of them has a divisor that fits a warpgroup."""
    if packs is None or packs is False:
        return
    if packs is not True:
        raise ValueError(f"pack_gqa is {packs!r}: must be None (where it pays), True or False")
    group = heads // kv_heads if kv_heads > 0 else 1
    if group > 1 and all(group % n for n in range(2, min(group, MOST_PACKED_HEADS) + 1)):
        raise ValueError(
            f"pack_gqa is True, q has {heads} heads, k has {kv_heads}: heads / kv_heads must have a divisor from 2 to "
            f"{MOST_PACKED_HEADS}; pass pack_gqa=None"
        )


def no_packing(packs: bool | None, call: str) -> None:
    """Refuse pack_gqa=True by name where no kernel has it."""
    if packs is not None and packs is not False:
        raise NotImplementedError(f"pack_gqa={packs} is not available in {call}: pass pack_gqa=None")


_ELSEWHERE = "torch.nn.functional.scaled_dot_product_attention has it"
# What other attention functions take and this library does not compute.
_ABSENT = {
    "dropout_p": f"drop elements of out instead, or: {_ELSEWHERE}",
    "alibi_slopes": f"{_ELSEWHERE}, as attn_mask",
    "attn_bias": f"{_ELSEWHERE}, as attn_mask",
    "attn_mask": f"causal, window_size, seqused_k and packed sequences say most masks; {_ELSEWHERE}",
}


def absent(function: str, options: dict[str, object]) -> None:
    """Refuse by name what this library does not compute; values that ask for nothing (None, 0) pass."""
    for name, value in options.items():
        if name not in _ABSENT:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if value is not None and not (isinstance(value, (int, float)) and value == 0):
            what = value if isinstance(value, (int, float)) else f"a {type(value).__name__}"
            raise NotImplementedError(f"{name} is {what}: not computed here; {_ABSENT[name]}")


def output(out: torch.Tensor, shape: tuple[int, ...], q: torch.Tensor, wants_gradient: bool) -> None:
    """Check memory that a caller gives for the result."""
    if not isinstance(out, torch.Tensor):
        raise ValueError(f"out is a {type(out).__name__}: must be a tensor of shape {shape}, or None")
    if wants_gradient or out.requires_grad:
        raise ValueError(
            "out is given and a gradient is wanted: results in memory of the caller have none; "
            "call under torch.no_grad(), or leave out=None"
        )
    if out.shape != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}: must be {shape}, q's with v's head_dim")
    if out.dtype != q.dtype:
        raise ValueError(f"out has dtype {out.dtype}: must be the result's, {q.dtype}")
    if out.device != q.device:
        raise ValueError(f"out is on {out.device}, q on {q.device}: must be on one device")
    if not out.is_contiguous():
        raise ValueError(f"out has strides {out.stride()}: must be contiguous; copy the result where it is not")


def apart(out: torch.Tensor, **inputs: torch.Tensor | None) -> None:
    """Check that memory for the result is not that of an input, which would be overwritten while it is read."""
    begin, end = _extent(out)
    for name, x in inputs.items():
        if x is None:
            continue
        other_begin, other_end = _extent(x)
        if begin < other_end and other_begin < end:
            raise ValueError(f"out shares memory with {name}: must have its own")


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor and the one behind its last."""
    if x.numel() == 0:
        return 0, 0
    begin = x.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (last + 1) * x.element_size()


def output_gradient(dout: torch.Tensor, out: torch.Tensor, name: str = "dout") -> None:
    """Check the gradient that a backward op gets against the forward's output."""
    if dout.shape != out.shape:
        raise ValueError(f"{name} has shape {tuple(dout.shape)}, must have the output's {tuple(out.shape)}")
    if dout.device != out.device:
        raise ValueError(f"{name} is on {dout.device}, the output on {out.device}: must be on one device")
