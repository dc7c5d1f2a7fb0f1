"""The Hopper engine's 8-bit attention: what its kernels take, and the calls of the compiled module. Before it:
fp8/operators.py, plan.py; after it: cpp/bindings/module.cpp.

quantize_refusal() and forward_refusal() are the one place that says what the kernels serve. What the quantiser does not
take is quantised by torch operations (fp8/quantize.py); what the attention kernel does not take is emulated
(fp8/emulate.py), or refused where the "hopper" backend is asked for.
"""

from __future__ import annotations

from typing import Any

import torch

from ..checks import DenseShape
from ..fp8 import formats, rotation
from ..fp8.quantize import Fp8QKV
from ..fp8.recipe import TILE_KEYS, Fp8Recipe
from . import hopper, hopper_quantize

PACKED_REFUSAL = "packed sequences are not in the Hopper kernels yet"
NO_KERNEL = "the compiled library has no 8-bit kernel"
LEAST_SCALE, MOST_SCALE = 1e-30, 1e30  # of the softmax, as in backends.py


def _device_refusal(device: torch.device, function: str) -> tuple[str | None, bool]:
    """Why the compiled module's function cannot run on a device, and whether a broken installation is the reason."""
    if device.type != "cuda":
        return f"q is on {device}, not on a CUDA device", False
    capability = hopper.capability(device)
    if capability is None:
        return f"no CUDA device answers for {device}", False
    if capability != (9, 0):
        have = f"{capability[0]}.{capability[1]}"
        return f"{device} has compute capability {have}, the kernels need 9.0 (H100, H200)", False
    if hopper.module is None:
        return f"the compiled module flashhopper._C did not load: {hopper.load_error}", True
    return (None, False) if hasattr(hopper.module, function) else (NO_KERNEL, False)


def _size_refusal(dims: tuple[int, int]) -> str | None:
    for name, size in zip(("head_dim", "head_dim_v"), dims, strict=True):
        if size % 8 != 0:
            return f"{name} is {size}, the kernels take multiples of 8"
    return None


def quantize_refusal(device: torch.device, dtype: torch.dtype, dims: tuple[int, int], recipe: Fp8Recipe) -> str | None:
    """Why the quantiser kernel does not serve a recipe on a device; None: it does. dims are head_dim and head_dim_v."""
    if recipe.q_block not in (1, TILE_KEYS):
        return f"q_block is {recipe.q_block}, the quantiser kernel takes 1 and {TILE_KEYS}"
    for name in ("k_block", "v_block"):
        if getattr(recipe, name) != TILE_KEYS:
            return f"{name} is {getattr(recipe, name)}, the quantiser kernel takes {TILE_KEYS}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"q has dtype {dtype}, the quantiser kernel takes float16 and bfloat16"
    return _size_refusal(dims) or _device_refusal(device, "quantize")[0]


def transpose_refusal(v8: torch.Tensor) -> str | None:
    """Why the kernel that transposes e4m3 values does not serve them; None: it does."""
    return _device_refusal(v8.device, "transpose_values")[0]


def forward_refusal(
    device: torch.device,
    dims: tuple[int, int],
    recipe: Fp8Recipe,
    softmax_scale: float,
) -> tuple[str | None, bool]:
    """Why the 8-bit attention kernel does not serve a call (None: it does), and whether a broken installation is the
    only reason.
    """
    feature = None
    if not recipe.two_level:
        feature = "two_level is False, the kernel always sums in two levels"
    elif recipe.k_block not in (0, TILE_KEYS) or recipe.v_block not in (0, TILE_KEYS):
        blocks = f"k_block is {recipe.k_block}, v_block is {recipe.v_block}"
        feature = f"{blocks}, the kernel takes 0 (one scale a head) and {TILE_KEYS}"
    elif not LEAST_SCALE <= softmax_scale <= MOST_SCALE:
        feature = f"softmax_scale is {softmax_scale}, the kernels take {LEAST_SCALE} to {MOST_SCALE}"
    feature = feature or _size_refusal(dims)
    reason, is_broken = _device_refusal(device, "forward8")
    if feature is not None and (reason is None or is_broken):
        return feature, False
    return reason, is_broken


def quantize(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: Fp8Recipe) -> Fp8QKV:
    """Quantise 16-bit q, k, v (batch, seqlen, heads, head_dim), any strides, on the current stream of q's device."""
    columns, _ = formats.computed_head_dims(q.shape[3], v.shape[3])
    signs = rotation.signs(recipe.seed, columns, q.device) if recipe.rotate else None
    result = hopper_quantize.quantize(
        q,
        k,
        v,
        qk_format=recipe.qk_format,
        signs=signs,
        smooth_k=recipe.smooth_k,
        center_v=recipe.center_v,
        q_block=recipe.q_block,
    )
    return Fp8QKV(*result, recipe, q.shape[3], v.shape[3], q.dtype)


def forward(
    qkv: Fp8QKV, softmax_scale: float, window_left: int, window_right: int, sm_margin: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch 8-bit attention on the current stream of qkv's device.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) of qkv.dtype, contiguous; lse float32 (batch, heads, seqlen_q).
    """
    index = qkv.q.get_device()
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            return forward(qkv, softmax_scale, window_left, window_right, sm_margin)
    batch, seqlen_q, heads, columns = qkv.q.shape
    out = torch.empty((batch, seqlen_q, heads, qkv.head_dim_v), dtype=qkv.dtype, device=qkv.q.device)
    lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=qkv.q.device)
    if lse.numel() == 0:
        return out, lse
    out_row = heads * qkv.head_dim_v
    sizes = (batch, seqlen_q, heads, qkv.head_dim, qkv.seqlen_k, qkv.k.shape[2], qkv.head_dim_v)
    stream = torch._C._cuda_getCurrentRawStream(index)
    _held, workspace, *_ = hopper.borrow_workspace(index, stream)  # held until the launch
    hopper.module.forward8(
        _addresses(qkv.q, qkv.k, qkv.v, qkv.q_scale, qkv.k_scale, qkv.v_scale, qkv.lse_shift, qkv.v_mean),
        (out.data_ptr(), seqlen_q * out_row, out_row, qkv.head_dim_v),
        lse.data_ptr(),
        workspace,
        hopper.problem(sizes, window_left, window_right),
        (columns, qkv.v.shape[2]),
        (qkv.recipe.q_block, qkv.recipe.k_block, qkv.recipe.v_block),
        _format_code(qkv.recipe),
        hopper.dtype_code(qkv.dtype),
        softmax_scale,
        sm_margin,
        stream,
    )
    return out, lse


def empty(q: torch.Tensor, sizes: DenseShape, recipe: Fp8Recipe) -> Fp8QKV:
    """What quantisation of a problem fills, not filled: also the shapes that fake tensors get."""
    batch, seqlen_q, heads, head_dim, seqlen_k, kv_heads, head_dim_v = sizes
    columns, columns_v = formats.computed_head_dims(head_dim, head_dim_v)
    qk = torch.int8 if recipe.qk_format == "int8" else formats.E4M3

    def floats(*shape: int) -> torch.Tensor:
        return q.new_empty(shape, dtype=torch.float32)

    return Fp8QKV(
        q.new_empty((batch, seqlen_q, heads, columns), dtype=qk),
        q.new_empty((batch, seqlen_k, kv_heads, columns), dtype=qk),
        q.new_empty((batch, kv_heads, columns_v, formats.padded_keys(seqlen_k)), dtype=formats.E4M3),
        floats(batch, heads, formats.block_count(seqlen_q, recipe.q_block)),
        floats(batch, kv_heads, formats.block_count(seqlen_k, recipe.k_block)),
        floats(batch, kv_heads, formats.block_count(seqlen_k, recipe.v_block)),
        floats(batch, heads, seqlen_q) if recipe.smooth_k else None,
        floats(batch, kv_heads, columns) if recipe.smooth_k else None,
        floats(batch, kv_heads, columns_v) if recipe.center_v else None,
        recipe,
        head_dim,
        head_dim_v,
        torch.bfloat16 if q.dtype == torch.float32 else q.dtype,
    )


def _format_code(recipe: Fp8Recipe) -> Any:
    return hopper.module.INT8 if recipe.qk_format == "int8" else hopper.module.E4M3


def _addresses(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    """Of contiguous tensors; 0 for those that a recipe does not have."""
    return tuple(0 if x is None else x.data_ptr() for x in tensors)
