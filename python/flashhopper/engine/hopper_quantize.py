"""The Hopper engine's quantiser: from 16-bit tensors and the numbers of a recipe to one call of the compiled module.
Before it: the 8-bit operators; after it: cpp/bindings/module.cpp, cpp/quantize/.

Inputs may have any strides with a contiguous last dimension; nothing is copied for the sake of alignment.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..fp8 import formats
from . import hopper

BLOCK_ROWS = 128  # rows of K and V that share a scale; keys are padded to a multiple of it
# Flags of the compiled module.
ROTATE, SMOOTH_K, CENTER_V = 1, 2, 4


class Quantized(NamedTuple):
    """value = data * scale; D and Dv are the computed head dimensions. See flashhopper_quantize_params."""

    q: torch.Tensor  # (batch, seqlen_q, heads, D), float8_e4m3fn or int8
    k: torch.Tensor  # (batch, seqlen_k, kv_heads, D)
    v: torch.Tensor  # (batch, kv_heads, Dv, keys) float8_e4m3fn, keys rounded up to 128 and permuted in groups of 16
    q_scale: torch.Tensor  # float32 (batch, heads, blocks of q_block rows)
    k_scale: torch.Tensor  # float32 (batch, kv_heads, blocks of 128 keys)
    v_scale: torch.Tensor  # float32 (batch, kv_heads, blocks of 128 keys)
    lse_shift: torch.Tensor | None  # float32 (batch, heads, seqlen_q): q . k_mean, if smooth_k
    k_mean: torch.Tensor | None  # float32 (batch, kv_heads, D), if smooth_k
    v_mean: torch.Tensor | None  # float32 (batch, kv_heads, Dv), if center_v


def view(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int, int]]:
    """x (batch, seqlen, heads, head_dim), or a copy where its last dimension is not contiguous; address and strides."""
    if x.stride(3) != 1 and x.size(3) > 1:
        x = x.contiguous()
    return x, (x.data_ptr(), x.stride(0), x.stride(1), x.stride(2))


def quantize(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    qk_format: str = "e4m3",
    signs: torch.Tensor | None = None,
    smooth_k: bool = False,
    center_v: bool = False,
    q_block: int = BLOCK_ROWS,
) -> Quantized:
    """Quantise on the current stream of q's device.

    Args:
        q: float16 or bfloat16 (batch, seqlen_q, heads, head_dim), head_dim a multiple of 8 up to 256, any strides.
        k, v: of q's dtype, (batch, seqlen_k, kv_heads, head_dim) and (batch, seqlen_k, kv_heads, head_dim_v).
        qk_format: "e4m3" or "int8", of q and k; v is always e4m3.
        signs: float32 (D,) on q's device, +1 or -1: rotate q and k by them and a Hadamard matrix. None: no rotation.
        smooth_k, center_v: subtract the mean of the keys, of the values, over the sequence.
        q_block: rows of q that share a scale, 1 or 128.

    Raises:
        ValueError: the library refuses an argument; the message names it.
        RuntimeError: a CUDA call failed, or the build lacks a head dimension.
    """
    index = q.get_device()
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            return quantize(
                q, k, v, qk_format=qk_format, signs=signs, smooth_k=smooth_k, center_v=center_v, q_block=q_block
            )
    (batch, seqlen_q, heads, head_dim), (_, seqlen_k, kv_heads, head_dim_v) = q.shape, v.shape
    columns, columns_v = formats.computed_head_dims(head_dim, head_dim_v)
    if qk_format not in ("e4m3", "int8"):
        raise ValueError(f'qk_format is {qk_format!r}: it must be "e4m3" or "int8"')
    if q_block not in (1, BLOCK_ROWS):
        raise ValueError(f"q_block is {q_block}: the quantiser kernel takes 1 and {BLOCK_ROWS}")
    if signs is not None and (signs.shape != (columns,) or signs.dtype != torch.float32 or not signs.is_contiguous()):
        raise ValueError(f"signs is {signs.dtype} {tuple(signs.shape)}: it must be float32 ({columns},), contiguous")
    qk = torch.int8 if qk_format == "int8" else torch.float8_e4m3fn
    blocks = -(-seqlen_k // BLOCK_ROWS)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    result = Quantized(
        empty(batch, seqlen_q, heads, columns, dtype=qk),
        empty(batch, seqlen_k, kv_heads, columns, dtype=qk),
        empty(batch, kv_heads, columns_v, blocks * BLOCK_ROWS, dtype=torch.float8_e4m3fn),
        empty(batch, heads, -(-seqlen_q // q_block)),
        empty(batch, kv_heads, blocks),
        empty(batch, kv_heads, blocks),
        empty(batch, heads, seqlen_q) if smooth_k else None,
        empty(batch, kv_heads, columns) if smooth_k else None,
        empty(batch, kv_heads, columns_v) if center_v else None,
    )
    tensors = [view(x) for x in (q, k, v)]  # copies, if any, live until the launch is enqueued
    hopper.module.quantize(
        [address_and_strides for _, address_and_strides in tensors],
        tuple(0 if x is None else x.data_ptr() for x in result),
        0 if signs is None else signs.data_ptr(),
        (batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v, -1, -1),
        (columns, columns_v),
        hopper.dtype_code(q.dtype),
        hopper.module.INT8 if qk_format == "int8" else hopper.module.E4M3,
        ROTATE * (signs is not None) + SMOOTH_K * smooth_k + CENTER_V * center_v,
        q_block,
        torch._C._cuda_getCurrentRawStream(index),
    )
    return result


def transpose_values(v: torch.Tensor) -> torch.Tensor:
    """e4m3 values (batch, seqlen_k, kv_heads, head_dim_v), any strides, into the layout of Quantized.v.

    Returns:
        float8_e4m3fn (batch, kv_heads, Dv, keys); zeros in columns and keys that v lacks.
    """
    index = v.get_device()
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            return transpose_values(v)
    batch, seqlen_k, kv_heads, head_dim_v = v.shape
    keys = -(-seqlen_k // BLOCK_ROWS) * BLOCK_ROWS
    _, columns = formats.computed_head_dims(head_dim_v, head_dim_v)
    v8 = torch.empty((batch, kv_heads, columns, keys), dtype=torch.float8_e4m3fn, device=v.device)
    v, address_and_strides = view(v)
    stream = torch._C._cuda_getCurrentRawStream(index)
    hopper.module.transpose_values(address_and_strides, v8.data_ptr(), batch, kv_heads, seqlen_k, head_dim_v, stream)
    return v8
