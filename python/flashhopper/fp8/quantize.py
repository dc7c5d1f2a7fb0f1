"""The quantiser in torch operations, any device: 16-bit q, k, v to Fp8QKV. Before it: attention.py, raw.py; after it:
formats.py, rotation.py.

It is the specification of the Hopper quantiser kernel and serves where that one does not. Arithmetic is float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import formats, rotation
from .recipe import Fp8Recipe

INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Fp8QKV:
    """Quantised queries, keys and values; value = data * scale. D and Dv are the computed head dimensions, which hold
    head_dim and head_dim_v.
    """

    q: torch.Tensor  # (batch, seqlen_q, heads, D), e4m3 or int8, rotated where the recipe says so
    k: torch.Tensor  # (batch, seqlen_k, kv_heads, D), as q; smoothed, then rotated
    v: torch.Tensor  # (batch, kv_heads, Dv, keys) e4m3, keys rounded up to 128 and permuted (formats.permute_keys)
    q_scale: torch.Tensor  # float32 (batch, heads, blocks of recipe.q_block rows)
    k_scale: torch.Tensor  # float32 (batch, kv_heads, blocks of recipe.k_block keys)
    v_scale: torch.Tensor  # float32 (batch, kv_heads, blocks of recipe.v_block keys)
    lse_shift: torch.Tensor | None  # float32 (batch, heads, seqlen_q): q . k_mean, before softmax_scale; if smoothed
    k_mean: torch.Tensor | None  # float32 (batch, kv_heads, D), not rotated; if smoothed
    v_mean: torch.Tensor | None  # float32 (batch, kv_heads, Dv), added to every output row that sees a key; if centred
    recipe: Fp8Recipe
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype  # of the outputs of attention

    @property
    def seqlen_k(self) -> int:
        """Keys that exist."""
        return self.k.shape[1]

    def to_reference(self, keep_padding: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """float64 q, k, v (batch, seqlen, heads, head_dim) that the 8-bit data stand for: scales applied, rotation
        undone, means added.

        Their exact attention, at the softmax_scale of the call, is what 8-bit attention approximates. Where head_dim is
        below D and the recipe rotates, padded columns carry rounding errors too; keep_padding=True returns D and Dv
        columns.
        """
        recipe = self.recipe
        q = self.q.double() * _per_row(self.q_scale, recipe.q_block, self.q.shape[1])
        k = self.k.double() * _per_row(self.k_scale, recipe.k_block, self.seqlen_k)
        v = formats.restore_keys(self.v.double()).permute(0, 3, 1, 2)[:, : self.seqlen_k]
        v = v * _per_row(self.v_scale, recipe.v_block, self.seqlen_k)
        if recipe.rotate:
            q, k = (rotation.unrotate(x, recipe.seed, recipe.rotate_block) for x in (q, k))
        if self.k_mean is not None:
            k = k + self.k_mean[:, None]
        if self.v_mean is not None:
            v = v + self.v_mean[:, None]
        if keep_padding:
            return q, k, v
        return q[..., : self.head_dim], k[..., : self.head_dim], v[..., : self.head_dim_v]


def _per_row(scale: torch.Tensor, block: int, rows: int) -> torch.Tensor:
    """(batch, heads, blocks) -> float64 (batch, rows, heads, 1)."""
    return spread(scale, block, rows).double().transpose(1, 2)[..., None]


def spread(scale: torch.Tensor, block: int, rows: int) -> torch.Tensor:
    """(batch, heads, blocks) -> (batch, heads, rows): each row's own scale."""
    if block == 1:
        return scale
    if block == 0:
        return scale.expand(*scale.shape[:2], rows)
    return scale.repeat_interleave(block, dim=2)[..., :rows]


def quantize(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: Fp8Recipe) -> Fp8QKV:
    """Checked q (batch, seqlen_q, heads, head_dim), k and v of INPUT_DTYPES, any strides, to 8 bits."""
    head_dim, head_dim_v = q.shape[3], v.shape[3]
    columns, columns_v = formats.computed_head_dims(head_dim, head_dim_v)
    wide_q, wide_k, wide_v = _wide(q, columns), _wide(k, columns), _wide(v, columns_v)
    lse_shift = k_mean = v_mean = None
    if recipe.smooth_k:
        k_mean = _mean(wide_k)
        wide_k = wide_k - k_mean[:, None]
        lse_shift = _products(wide_q, k_mean)
    if recipe.center_v:
        v_mean = _mean(wide_v)
        wide_v = wide_v - v_mean[:, None]
    if recipe.rotate:
        wide_q, wide_k = (rotation.rotate(x, recipe.seed, recipe.rotate_block) for x in (wide_q, wide_k))
    q8, q_scale = _quantize_rows(wide_q, recipe.q_block, recipe.qk_format)
    k8, k_scale = _quantize_rows(wide_k, recipe.k_block, recipe.qk_format, recipe.power_scales)
    v8, v_scale = _quantize_rows(wide_v, recipe.v_block, "e4m3")
    dtype = torch.bfloat16 if q.dtype == torch.float32 else q.dtype
    means = (lse_shift, k_mean, v_mean)
    return Fp8QKV(q8, k8, k_major(v8), q_scale, k_scale, v_scale, *means, recipe, head_dim, head_dim_v, dtype)


def k_major(v8: torch.Tensor) -> torch.Tensor:
    """e4m3 values (batch, seqlen_k, kv_heads, Dv) -> (batch, kv_heads, Dv, keys): padded with zeros, permuted."""
    batch, seqlen_k, kv_heads, columns = v8.shape
    raw = torch.zeros(
        batch, kv_heads, columns, formats.padded_keys(seqlen_k), dtype=torch.uint8, device=v8.device
    )  # bytes: not every operation below exists for 8-bit floats
    raw[..., :seqlen_k] = v8.view(torch.uint8).permute(0, 2, 3, 1)
    return formats.permute_keys(raw).contiguous().view(formats.E4M3)


def _wide(x: torch.Tensor, columns: int) -> torch.Tensor:
    """float32 with zeros in the columns that the head dimension lacks."""
    return torch.nn.functional.pad(x.float(), (0, columns - x.shape[-1]))


def _packed(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, also in the strides of dimensions of extent 1, which contiguous() leaves as they are."""
    return x if x.stride() == _strides(x.shape) else x.clone(memory_format=torch.contiguous_format)


def _strides(shape: torch.Size) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


def _mean(x: torch.Tensor) -> torch.Tensor:
    """Mean over the sequence, or over rows spread over it: (batch, heads, columns); zeros where there is no row."""
    seqlen = x.shape[1]
    rows = x if seqlen <= formats.MEAN_ROWS else x[:, formats.sampled_rows(seqlen, x.device)]
    return rows.sum(dim=1) / max(rows.shape[1], 1)


def _products(q: torch.Tensor, k_mean: torch.Tensor) -> torch.Tensor:
    """q . k_mean of each query with its own KV head, (batch, heads, seqlen_q) float32."""
    batch, seqlen_q, heads, columns = q.shape
    kv_heads = k_mean.shape[1]
    grouped = q.reshape(batch, seqlen_q, kv_heads, heads // max(kv_heads, 1), columns)
    # Not a matrix product: those may round to TF32 where the process allows it.
    shift = (grouped * k_mean[:, None, :, None]).sum(-1)
    return _packed(shift.reshape(batch, seqlen_q, heads).transpose(1, 2))


def _is_even(amax: torch.Tensor, rows: int) -> torch.Tensor:
    """Of the largest magnitudes of rows (batch, blocks, block, heads), `rows` of which exist in each batch and head:
    which blocks have no outliers, (batch, blocks, heads). The largest of the block and of any 16 neighbours are then
    much the same.
    """
    batch, blocks, size, heads = amax.shape
    groups = amax.view(batch, blocks, size // formats.GROUP_ROWS, formats.GROUP_ROWS, heads).amax(3)
    first = torch.arange(0, blocks * size, formats.GROUP_ROWS, device=amax.device).view(blocks, -1, 1)
    least = groups.masked_fill(first >= rows, torch.inf).amin(2)
    return groups.amax(2) <= formats.MOST_UNEVEN * least


def _quantize_rows(
    x: torch.Tensor, block: int, qk_format: str, power_scales: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 (batch, rows, heads, columns) -> 8-bit data of its shape and float32 scales (batch, heads, blocks)."""
    batch, rows, heads, _ = x.shape
    blocks = formats.block_count(rows, block)
    amax = x.abs().amax(-1) if x.numel() else x.new_zeros(batch, rows, heads)
    is_even = None
    if block != 1 and blocks > 0:
        size = rows if block == 0 else block
        of_rows = torch.nn.functional.pad(amax, (0, 0, 0, blocks * size - rows)).view(batch, blocks, size, heads)
        amax = of_rows.amax(2)
        is_even = _is_even(of_rows, rows).transpose(1, 2) if power_scales else None
    most = formats.INT8_MAX if qk_format == "int8" else formats.E4M3_MAX
    scale = _packed((amax.clamp_(min=formats.LEAST_AMAX) / most).transpose(1, 2))
    if power_scales:
        power = formats.next_power_of_two(scale)
        scale = power if is_even is None else _packed(torch.where(is_even, power, scale))
    per_row = spread(scale, block, rows).transpose(1, 2)[..., None]
    return _packed(formats.to_8bit(x / per_row, qk_format)), scale
