"""The Hopper engine's 8-bit attention: what its kernels take, and the calls of the compiled module. Before it:
fp8/operators.py, plan.py; after it: cpp/bindings/module.cpp.

quantize_refusal() and forward_refusal() are the one place that says what the kernels serve. What the quantiser does not
take is quantised by torch operations (fp8/quantize.py); what the attention kernel does not take is emulated
(fp8/emulate.py), or refused where the "hopper" backend is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..checks import DenseShape, PackedShape
from ..fp8 import formats, rotation
from ..fp8.quantize import Fp8QKV
from ..fp8.recipe import TILE_KEYS, Fp8Recipe
from . import hopper, hopper_quantize
from .hopper_quantize import NO_OFFSETS, Numbers, Quantized, addresses
from .tiled import Packing

if TYPE_CHECKING:
    from .. import _C

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


def _quantize_feature(dtype: torch.dtype, dims: tuple[int, int], recipe: Fp8Recipe) -> str | None:
    """What of a call the quantiser kernel lacks."""
    if recipe.q_block not in (1, TILE_KEYS):
        return f"q_block is {recipe.q_block}, the quantiser kernel takes 1 and {TILE_KEYS}"
    for name in ("k_block", "v_block"):
        if getattr(recipe, name) != TILE_KEYS:
            return f"{name} is {getattr(recipe, name)}, the quantiser kernel takes {TILE_KEYS}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"q has dtype {dtype}, the quantiser kernel takes float16 and bfloat16"
    return _size_refusal(dims)


def quantize_refusal(device: torch.device, dtype: torch.dtype, dims: tuple[int, int], recipe: Fp8Recipe) -> str | None:
    """Why the quantiser kernel does not serve a recipe on a device; None: it does. dims are head_dim and head_dim_v."""
    return _quantize_feature(dtype, dims, recipe) or _device_refusal(device, "quantize")[0]


def transpose_refusal(v8: torch.Tensor) -> str | None:
    """Why the kernel that transposes e4m3 values does not serve them; None: it does."""
    return _device_refusal(v8.device, "transpose_values")[0]


def _forward_feature(dims: tuple[int, int], recipe: Fp8Recipe, softmax_scale: float) -> str | None:
    """What of a call the attention kernel lacks."""
    if not recipe.two_level:
        return "two_level is False, the kernel always sums in two levels"
    if recipe.k_block not in (0, TILE_KEYS) or recipe.v_block not in (0, TILE_KEYS):
        blocks = f"k_block is {recipe.k_block}, v_block is {recipe.v_block}"
        return f"{blocks}, the kernel takes 0 (one scale a head) and {TILE_KEYS}"
    if not LEAST_SCALE <= softmax_scale <= MOST_SCALE:
        return f"softmax_scale is {softmax_scale}, the kernels take {LEAST_SCALE} to {MOST_SCALE}"
    return _size_refusal(dims)


def forward_refusal(
    device: torch.device,
    dims: tuple[int, int],
    recipe: Fp8Recipe,
    softmax_scale: float,
) -> tuple[str | None, bool]:
    """Why the 8-bit attention kernel does not serve a call (None: it does), and whether a broken installation is the
    only reason.
    """
    return _with_device(_forward_feature(dims, recipe, softmax_scale), device)


def packed_refusal(
    device: torch.device, dtype: torch.dtype, dims: tuple[int, int], recipe: Fp8Recipe, softmax_scale: float
) -> tuple[str | None, bool]:
    """The same of packed sequences, which the kernels must quantise too: torch operations would need their lengths on
    the host.
    """
    feature = _quantize_feature(dtype, dims, recipe) or _forward_feature(dims, recipe, softmax_scale)
    return _with_device(feature, device)


def _with_device(feature: str | None, device: torch.device) -> tuple[str | None, bool]:
    """A device that has no kernels is the first reason, a broken installation the last."""
    reason, is_broken = _device_refusal(device, "forward8")
    if feature is not None and (reason is None or is_broken):
        return feature, False
    return reason, is_broken


def _numbers(recipe: Fp8Recipe, head_dim: int, device: torch.device) -> Numbers:
    columns, _ = formats.computed_head_dims(head_dim, head_dim)
    signs = rotation.signs(recipe.seed, columns, device) if recipe.rotate else None
    flags = recipe.smooth_k, recipe.center_v
    return Numbers(recipe.qk_format, signs, *flags, recipe.q_block, recipe.rotate_block, recipe.power_scales)


def forward_plan(
    sizes: DenseShape,
    recipe: Fp8Recipe,
    dtype: torch.dtype,
    window_left: int,
    window_right: int,
    sm_margin: int,
    device: torch.device,
    total_q: int | None = None,
) -> _C.Plan:
    """What the compiled module would launch; total_q: rows of q of a packed batch, whose tiles are then counted as
    cpp/core/seqlen.hpp (most_packed_blocks) does.
    """
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    problem = hopper.problem(sizes, window_left, window_right)
    plan: _C.Plan = hopper.module.forward8_plan(problem, _format(recipe), hopper.dtype_code(dtype), sm_margin, num_sms)
    if total_q is None:
        return plan
    tiles = (total_q // plan["tile_m"] + sizes[0] + 1) * sizes[2]
    return {**plan, "tiles": tiles, "grid": min(tiles, num_sms - sm_margin), "cluster": 1}


def _format(recipe: Fp8Recipe) -> int:
    return int(hopper.module.INT8 if recipe.qk_format == "int8" else hopper.module.E4M3)


def quantize(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: Fp8Recipe) -> Fp8QKV:
    """Quantise 16-bit q, k, v (batch, seqlen, heads, head_dim), any strides, on the current stream of q's device."""
    result = hopper_quantize.quantize(q, k, v, _numbers(recipe, q.shape[3], q.device))
    return Fp8QKV(*result, recipe, q.shape[3], v.shape[3], q.dtype)


def forward(
    qkv: Fp8QKV, softmax_scale: float, window_left: int, window_right: int, sm_margin: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch 8-bit attention on the current stream of qkv's device.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) of qkv.dtype, contiguous; lse float32 (batch, heads, seqlen_q).
    """
    batch, seqlen_q, heads, _ = qkv.q.shape
    out = torch.empty((batch, seqlen_q, heads, qkv.head_dim_v), dtype=qkv.dtype, device=qkv.q.device)
    lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=qkv.q.device)
    if lse.numel() > 0:
        sizes = (batch, seqlen_q, heads, qkv.head_dim, qkv.seqlen_k, qkv.k.shape[2], qkv.head_dim_v)
        data = Quantized(
            qkv.q, qkv.k, qkv.v, qkv.q_scale, qkv.k_scale, qkv.v_scale, qkv.lse_shift, qkv.k_mean, qkv.v_mean
        )
        problem = hopper.problem(sizes, window_left, window_right)
        _launch(data, qkv.recipe, out, lse, problem, softmax_scale, sm_margin, None)
    return out, lse


def packed_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    recipe: Fp8Recipe,
    packing: Packing,
    sizes: PackedShape,
    numbers: tuple[float, int, int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise 16-bit packed q, k, v and attend, on the current stream of q's device. Lengths are read there, when the
    call runs.

    Args:
        sizes: what checks.packed returned.
        numbers: softmax_scale, window_left, window_right, sm_margin.

    Returns:
        out (total_q, heads, head_dim_v) of q's dtype, contiguous; lse float32 (heads, total_q).
    """
    batch, total_q, heads, head_dim, _, kv_heads, head_dim_v = sizes
    out = torch.empty((total_q, heads, head_dim_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, total_q), dtype=torch.float32, device=q.device)
    if lse.numel() > 0:
        data = hopper_quantize.quantize_packed(q, k, v, _numbers(recipe, head_dim, q.device), packing, sizes)
        longest = (batch, packing.max_seqlen_q, heads, head_dim, packing.max_seqlen_k, kv_heads, head_dim_v)
        softmax_scale, window_left, window_right, sm_margin = numbers
        problem = hopper.problem(longest, window_left, window_right)
        _launch(data, recipe, out, lse, problem, softmax_scale, sm_margin, packing)
    return out, lse


def _launch(
    data: Quantized,
    recipe: Fp8Recipe,
    out: torch.Tensor,
    lse: torch.Tensor,
    problem: tuple[int, ...],
    softmax_scale: float,
    sm_margin: int,
    packing: Packing | None,
) -> None:
    """problem: of the compiled module, of a packed batch with its longest sequences."""
    index = out.get_device()
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            _launch(data, recipe, out, lse, problem, softmax_scale, sm_margin, packing)
        return
    stream = torch._C._cuda_getCurrentRawStream(index)
    _held, workspace, *_ = hopper.borrow_workspace(index, stream)  # held until the launch
    offsets, totals = NO_OFFSETS, (0, 0)
    if packing is not None:
        totals = (data.q.shape[0], data.k.shape[0])
        memory = torch.empty(
            (hopper.module.packed_workspace_bytes(problem[0], totals[0]),), dtype=torch.uint8, device=out.device
        )
        tensors = [None if x is None else x.contiguous() for x in packing[:4]]  # held as the workspace is
        offsets = addresses(*tensors, memory)
    out_row, out_head = out.stride()[-3:-1]
    hopper.module.forward8(
        addresses(data.q, data.k, data.v, data.q_scale, data.k_scale, data.v_scale, data.lse_shift, data.v_mean),
        (out.data_ptr(), out.shape[-3] * out_row, out_row, out_head),
        lse.data_ptr(),
        workspace,
        problem,
        (data.q.shape[-1], data.v.shape[-2]),
        data.v.shape[-1],
        (recipe.q_block, recipe.k_block, recipe.v_block),
        _format(recipe),
        hopper.dtype_code(out.dtype),
        softmax_scale,
        sm_margin,
        offsets,
        totals,
        stream,
    )


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
