"""flash_attn_fp8_func: attention on tensors that the caller quantised. Before it: your code; after it: operators.py.

The scales' shapes tell their blocks; data are brought into the layout of Fp8QKV, values K-major.
"""

from __future__ import annotations

import torch

from .. import backends, checks
from ..engine import hopper_fp8, hopper_quantize
from . import formats, operators
from .attention import OUTPUT_DTYPES
from .quantize import Fp8QKV, k_major
from .recipe import TILE_KEYS, Fp8Recipe

_Tensor = torch.Tensor
_Result = _Tensor | tuple[_Tensor, _Tensor]
_ROWS = {"q": "seqlen_q", "k": "seqlen_k", "v": "seqlen_k"}


def flash_attn_fp8_func(
    q8: _Tensor,
    k8: _Tensor,
    v8: _Tensor,
    q_descale: _Tensor | None = None,
    k_descale: _Tensor | None = None,
    v_descale: _Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    *,
    scales: float | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    sm_margin: int = 0,
    return_lse: bool = False,
) -> _Result:
    """Attention on 8-bit tensors with their scales: value = data * descale. No gradient.

    Args:
        q8: (batch, seqlen_q, heads, head_dim) float8_e4m3fn, or int8 with an int8 k8; any strides.
        k8: (batch, seqlen_k, kv_heads, head_dim) of q8's dtype; v8: (batch, seqlen_k, kv_heads, head_dim_v)
            float8_e4m3fn.
        q_descale, k_descale, v_descale: float32, of two or three dimensions. (batch, kv_heads) is FlashAttention-3's
            convention, for queries too: one scale for all heads of a group. Else (batch, heads, blocks) for queries and
            (batch, kv_heads, blocks) for keys and values, where blocks is 1, ceil(seqlen / 128), or, for queries and
            keys, seqlen (a scale a row).
        softmax_scale, causal, window_size, sm_margin: as in flash_attn_func.
        softcap: must be 0.0 in this version.
        scales: the one scale of every descale that is not given; missing scales are refused unless it says so. Pass
            1.0 where the data are meant as they are.
        out_dtype: float16 or bfloat16.
        return_lse: also return lse.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) of out_dtype; with return_lse, (out, lse): lse float32 (batch, heads,
        seqlen_q), natural logarithm. A row that sees nothing gives out 0 and lse -inf.

    Raises:
        ValueError: an argument breaks a rule; the message names it, its value, the rule and the way out.
        NotImplementedError: an option that this version does not have.
        RuntimeError: the "hopper" backend was asked for and cannot serve the call.
    """
    sizes = _check_data(q8, k8, v8)
    _, seqlen_q, _, head_dim, seqlen_k, _, head_dim_v = sizes
    if softcap != 0.0:
        raise NotImplementedError(f"softcap={softcap} is not available in 8 bits: pass softcap=0.0")
    if out_dtype not in OUTPUT_DTYPES:
        raise ValueError(f"out_dtype is {out_dtype}: must be torch.bfloat16 or torch.float16")
    checks.scalars(softmax_scale, 0.0, sm_margin)
    columns, columns_v = formats.computed_head_dims(head_dim, head_dim_v)
    rows = {"q": seqlen_q, "k": seqlen_k, "v": seqlen_k}
    given = {"q": q_descale, "k": k_descale, "v": v_descale}
    found = {side: _scale(side, given[side], scales, sizes, rows[side], q8.device) for side in "qkv"}
    blocks = {side: _block(side, found[side].shape[2], rows[side]) for side in "qkv"}
    qk_format = "int8" if q8.dtype == torch.int8 else "e4m3"
    recipe = Fp8Recipe(qk_format, False, False, False, blocks["q"], blocks["k"], blocks["v"])
    q_data, k_data, v_data = _padded(q8, columns), _padded(k8, columns), _k_major(v8, columns_v)
    dims = (head_dim, head_dim_v)
    data_and_scales = (q_data, k_data, v_data, found["q"], found["k"], found["v"])
    qkv = Fp8QKV(*data_and_scales, None, None, None, recipe, *dims, out_dtype)
    left, right = checks.normalize_window(causal, window_size)
    left, right = checks.widen_window(left, right, seqlen_q, seqlen_k)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    numbers = (recipe.code, head_dim, head_dim_v, out_dtype, scale, left, right, sm_margin, backends.backend())
    out, lse = operators.forward8_op(*operators.flatten(qkv), *numbers)
    return (out, lse) if return_lse else out


def _check_data(q8: _Tensor, k8: _Tensor, v8: _Tensor) -> checks.DenseShape:
    """Dtypes by name, then shapes by the rules of 16-bit attention."""
    for name, x in (("q8", q8), ("k8", k8), ("v8", v8)):
        if not isinstance(x, _Tensor):
            raise ValueError(f"{name} is a {type(x).__name__}: must be a torch.Tensor of dtype float8_e4m3fn")
        if x.dtype != formats.E4M3 and (name == "v8" or x.dtype != torch.int8):
            raise ValueError(
                f"{name} has dtype {x.dtype}: must be float8_e4m3fn; "
                "16-bit tensors go to flash_attn_func(q, k, v, fp8=flashhopper.Fp8Recipe())"
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires a gradient, which 8-bit tensors do not have here: pass {name}.detach(), "
                "or train through flash_attn_func(q, k, v, fp8=flashhopper.Fp8Recipe())"
            )
    if q8.dtype != k8.dtype:
        raise ValueError(f"k8 has dtype {k8.dtype}, q8 has {q8.dtype}: must be equal")
    if not q8.device == k8.device == v8.device:
        raise ValueError(f"q8, k8, v8 are on {q8.device}, {k8.device}, {v8.device}: must be on one device")
    # The checks of shapes know 16-bit dtypes: they get stand-ins of the same shapes without their memory.
    nothing = torch.empty((), dtype=torch.bfloat16)
    stand_ins = (nothing.expand(x.shape) for x in (q8, k8, v8))
    return checks.dense(*stand_ins)


def _scale(
    side: str, given: _Tensor | None, default: float | None, sizes: checks.DenseShape, rows: int, device: torch.device
) -> _Tensor:
    """(batch, heads, blocks) float32, contiguous, from what the caller gave for q, k or v."""
    batch, _, heads, _, _, kv_heads, _ = sizes
    own_heads = heads if side == "q" else kv_heads
    name = f"{side}_descale"
    if given is None:
        if default is None:
            raise ValueError(
                f"{name} is missing: 8-bit data mean nothing without their scale; pass a float32 tensor "
                f"({batch}, {kv_heads}), or scales=1.0 where the data are meant as they are"
            )
        if isinstance(default, bool) or not isinstance(default, (int, float)) or not 0.0 < default < float("inf"):
            raise ValueError(f"scales is {default!r}: must be a positive finite float; pass scales=1.0")
        return torch.full((batch, own_heads, min(rows, 1)), default, dtype=torch.float32, device=device)
    if not isinstance(given, _Tensor) or given.dtype != torch.float32:
        kind = given.dtype if isinstance(given, _Tensor) else type(given).__name__
        raise ValueError(f"{name} is of {kind}: must be a float32 tensor; cast with .to(torch.float32)")
    if given.device != device:
        raise ValueError(f"{name} is on {given.device}, q8 on {device}: must be on one device")
    if given.shape == (batch, kv_heads):
        each = given if side != "q" else given.repeat_interleave(heads // max(kv_heads, 1), dim=1)
        return each[..., None][..., : min(rows, 1)].contiguous()
    if given.dim() != 3 or given.shape[:2] != (batch, own_heads):
        which = "heads" if side == "q" else "kv_heads"
        raise ValueError(
            f"{name} has shape {tuple(given.shape)}: must be (batch, kv_heads) = ({batch}, {kv_heads}) or "
            f"(batch, {which}, blocks) = ({batch}, {own_heads}, blocks)"
        )
    return given.contiguous()


def _block(side: str, blocks: int, rows: int) -> int:
    """Rows that share a scale, from their number."""
    if blocks == min(rows, 1):
        return 0
    if blocks == -(-rows // TILE_KEYS):
        return TILE_KEYS
    if blocks == rows and side != "v":
        return 1
    row_scales = "" if side == "v" else f", or {rows} for a scale a row"
    raise ValueError(
        f"{side}_descale has {blocks} blocks for {_ROWS[side]} {rows}: must be {min(rows, 1)}, or "
        f"{-(-rows // TILE_KEYS)} for blocks of {TILE_KEYS}{row_scales}"
    )


def _k_major(v8: _Tensor, columns: int) -> _Tensor:
    """Values in the layout of Fp8QKV, by the Hopper kernel where it runs, else by torch operations; the same bytes."""
    is_plain = type(v8) is _Tensor and not torch.compiler.is_compiling()
    if is_plain and backends.backend() != "tiled" and hopper_fp8.transpose_refusal(v8) is None:
        return hopper_quantize.transpose_values(v8)
    return k_major(_padded(v8, columns))


def _padded(x: _Tensor, columns: int) -> _Tensor:
    """Contiguous, with zeros in the columns that the head dimension lacks."""
    if x.shape[-1] == columns:
        return x.contiguous()
    wide = torch.nn.functional.pad(x.view(torch.uint8), (0, columns - x.shape[-1]))  # 0 is 0 in either format
    return wide.view(x.dtype)
