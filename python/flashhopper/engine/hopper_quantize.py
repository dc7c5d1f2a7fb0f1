"""The Hopper engine's quantiser: from 16-bit tensors and the numbers of a recipe to one call of the compiled module.
Before it: the 8-bit operators; after it: cpp/bindings/module.cpp, cpp/quantize/.

Inputs may have any strides with a contiguous last dimension; nothing is copied for the sake of alignment.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..checks import PackedShape
from ..fp8 import formats
from . import hopper
from .tiled import Packing

BLOCK_ROWS = 128  # rows of K and V that share a scale; keys are padded to a multiple of it
# Flags of the compiled module.
ROTATE, SMOOTH_K, CENTER_V, POWER_SCALES = 1, 2, 4, 8


NO_OFFSETS: tuple[int, ...] = (0, 0, 0, 0, 0)  # of a dense batch


class Quantized(NamedTuple):
    """value = data * scale; D and Dv are the computed head dimensions. See flashhopper_quantize_params.

    Of a packed batch all but the means are without the batch dimension, seqlen is the total, and blocks are chunks():
    sequence b's begin at number cu_seqlens[b] // 128 + b.
    """

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


class Numbers(NamedTuple):
    """Of a recipe."""

    qk_format: str = "e4m3"  # or "int8", of q and k; v is always e4m3
    # float32 (D,) on q's device, +1 or -1: q and k are rotated by them and a Hadamard matrix. None: no rotation.
    signs: torch.Tensor | None = None
    smooth_k: bool = False  # subtract the mean of the keys over the sequence
    center_v: bool = False  # the same of the values
    q_block: int = BLOCK_ROWS  # rows of q that share a scale, 1 or 128
    rotate_block: int = 0  # columns of the Hadamard matrix: 4, or 0 for as many as divide D
    power_scales: bool = False  # of keys


PLAIN = Numbers()


def chunks(batch: int, total: int) -> int:
    """Blocks of 128 rows for which a packed batch has memory: whatever its lengths, no two sequences share one."""
    return total // BLOCK_ROWS + batch + 1


def quantize(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, numbers: Numbers = PLAIN) -> Quantized:
    """Quantise on the current stream of q's device.

    Args:
        q: float16 or bfloat16 (batch, seqlen_q, heads, head_dim), head_dim a multiple of 8 up to 256, any strides.
        k, v: of q's dtype, (batch, seqlen_k, kv_heads, head_dim) and (batch, seqlen_k, kv_heads, head_dim_v).

    Raises:
        ValueError: the library refuses an argument; the message names it.
        RuntimeError: a CUDA call failed, or the build lacks a head dimension.
    """
    (batch, seqlen_q, heads, _), (_, seqlen_k, kv_heads, _) = q.shape, v.shape
    columns, columns_v = _check(q, v, numbers)
    blocks = -(-seqlen_k // BLOCK_ROWS)
    shapes = [
        *((batch, seqlen_q, heads, columns), (batch, seqlen_k, kv_heads, columns)),
        (batch, kv_heads, columns_v, blocks * BLOCK_ROWS),
        *((batch, heads, -(-seqlen_q // numbers.q_block)), (batch, kv_heads, blocks), (batch, kv_heads, blocks)),
        *((batch, heads, seqlen_q), (2, batch, kv_heads, columns), (batch, kv_heads, columns_v)),
    ]
    result = _empty(q.device, shapes, numbers)
    _launch(q, k, v, result, numbers, (batch, seqlen_q, seqlen_k), NO_OFFSETS, (0, 0))
    return result


def quantize_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, numbers: Numbers, packing: Packing, sizes: PackedShape
) -> Quantized:
    """The same of packed sequences, each with its own blocks and means: q (total_q, heads, head_dim), k and v likewise.
    Lengths are read on the device, when the call runs there; rows that do not exist are neither read nor written.

    Args:
        sizes: what checks.packed returned for the tensors.
    """
    batch, total_q, heads, _, total_k, kv_heads, _ = sizes
    columns, columns_v = _check(q, v, numbers)
    q_scales = total_q if numbers.q_block == 1 else chunks(batch, total_q)
    blocks = chunks(batch, total_k)
    shapes = [
        *((total_q, heads, columns), (total_k, kv_heads, columns), (kv_heads, columns_v, blocks * BLOCK_ROWS)),
        *((heads, q_scales), (kv_heads, blocks), (kv_heads, blocks)),
        *((heads, total_q), (2, batch, kv_heads, columns), (batch, kv_heads, columns_v)),
    ]
    result = _empty(q.device, shapes, numbers)
    offsets = [None if x is None else x.contiguous() for x in packing[:4]]  # held until the launch
    longest = (batch, packing.max_seqlen_q, packing.max_seqlen_k)
    _launch(q[None], k[None], v[None], result, numbers, longest, addresses(*offsets, None), (total_q, total_k))
    return result


def addresses(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    """Of contiguous tensors; 0 for those that a call does not have."""
    return tuple(0 if x is None else x.data_ptr() for x in tensors)


def _check(q: torch.Tensor, v: torch.Tensor, numbers: Numbers) -> tuple[int, int]:
    """The computed head dimensions, if the quantiser takes the numbers."""
    columns, columns_v = formats.computed_head_dims(q.shape[-1], v.shape[-1])
    if numbers.qk_format not in ("e4m3", "int8"):
        raise ValueError(f'qk_format is {numbers.qk_format!r}: it must be "e4m3" or "int8"')
    if numbers.q_block not in (1, BLOCK_ROWS):
        raise ValueError(f"q_block is {numbers.q_block}: the quantiser kernel takes 1 and {BLOCK_ROWS}")
    signs = numbers.signs
    if signs is not None and (signs.shape != (columns,) or signs.dtype != torch.float32 or not signs.is_contiguous()):
        raise ValueError(f"signs is {signs.dtype} {tuple(signs.shape)}: it must be float32 ({columns},), contiguous")
    return columns, columns_v


def _empty(device: torch.device, shapes: list[tuple[int, ...]], numbers: Numbers) -> Quantized:
    qk, e4m3, f32 = (
        torch.int8 if numbers.qk_format == "int8" else torch.float8_e4m3fn,
        torch.float8_e4m3fn,
        torch.float32,
    )
    dtypes = (qk, qk, e4m3, f32, f32, f32, f32, f32, f32)
    wanted = (*(True,) * 6, numbers.smooth_k, numbers.smooth_k, numbers.center_v)
    made = [
        torch.empty(shape, dtype=dtype, device=device) if is_wanted else None
        for shape, dtype, is_wanted in zip(shapes, dtypes, wanted, strict=True)
    ]
    place = Quantized._fields.index("k_mean")
    if (mean := made[place]) is not None:
        made[place] = mean[0]  # behind it the library keeps the same, rotated
    return Quantized(*made)  # type: ignore[arg-type]


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    result: Quantized,
    numbers: Numbers,
    longest: tuple[int, int, int],
    offsets: tuple[int, ...],
    totals: tuple[int, int],
) -> None:
    """Tensors are (batch, seqlen, heads, head_dim), packed ones batch 1; longest: batch, seqlen_q, seqlen_k."""
    index = q.get_device()
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            _launch(q, k, v, result, numbers, longest, offsets, totals)
        return
    batch, seqlen_q, seqlen_k = longest
    signs, dims = numbers.signs, (q.shape[3], v.shape[3])
    tensors = [view(x) for x in (q, k, v)]  # copies, if any, live until the launch is enqueued
    hopper.module.quantize(
        [address_and_strides for _, address_and_strides in tensors],
        addresses(*result),
        0 if signs is None else signs.data_ptr(),
        (batch, q.shape[2], k.shape[2], seqlen_q, seqlen_k, *dims, -1, -1),
        formats.computed_head_dims(*dims),
        hopper.dtype_code(q.dtype),
        hopper.module.INT8 if numbers.qk_format == "int8" else hopper.module.E4M3,
        _flags(numbers),
        (numbers.q_block, numbers.rotate_block),
        offsets,
        totals,
        torch._C._cuda_getCurrentRawStream(index),
    )


def _flags(numbers: Numbers) -> int:
    rotates = ROTATE * (numbers.signs is not None)
    means = SMOOTH_K * numbers.smooth_k + CENTER_V * numbers.center_v
    return rotates + means + POWER_SCALES * numbers.power_scales


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
