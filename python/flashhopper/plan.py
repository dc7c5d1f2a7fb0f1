"""explain(): what a call would do, without doing it. Before it: your code; after it: backends.py, engine/hopper.py,
engine/tiles.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from . import backends, checks, flops
from .engine import hopper, hopper_backward, hopper_fp8, tiles
from .engine.mask import Mask
from .fp8 import Fp8Recipe, formats
from .fp8 import attention as fp8_attention
from .fp8.recipe import TILE_KEYS

_TILED_GRADIENTS = "tiled engine, recomputed from the saved (q, k, v, out, lse); bit-reproducible"


@dataclass(frozen=True)
class Plan:
    """The plan of one attention call; str() gives it as text."""

    backend: str  # "hopper" or "tiled"
    requested: str  # what set_backend chose
    why: str
    problem: str  # sizes and mask in words
    config: str  # row of the kernels' config table, or the tiled engine's blocks
    tile_m: int  # queries a tile
    tile_n: int  # keys a tile
    head_dim: int  # as computed: padded by the kernels
    head_dim_v: int
    grid: int  # thread blocks launched; 0 on the tiled engine
    tiles: int
    splits: int
    threads: int
    stages: int
    smem_bytes: int
    workspace_bytes: int
    flops: float  # of kept scores, both products
    bytes: float  # of q, k, v, out and lse
    gradients: str  # where they come from
    copies: tuple[str, ...] = field(default=())  # inputs that are copied first, and why
    notes: tuple[str, ...] = field(default=())
    recipe: str = ""  # of an 8-bit call, in words
    quantizer: str = ""  # what quantises, and why
    packed_heads: int = 1  # query heads that share a tile of the Hopper forward
    packing: str = ""  # the same in words, and why; of grouped heads on the Hopper kernels

    def __str__(self) -> str:
        shape = f"{self.tile_m} x {self.tile_n}, head_dim {self.head_dim}/{self.head_dim_v}"
        lines = [
            f"backend    {self.backend} (set_backend: {self.requested}): {self.why}",
            f"problem    {self.problem}",
            f"config     {self.config}: tile {shape}, {self.tiles} tiles, {self.splits} split(s)",
        ]
        if self.backend == "hopper":
            launch = f"{self.grid} thread blocks of {self.threads} threads, {self.stages} stages"
            lines.append(
                f"launch     {launch}, {self.smem_bytes} bytes of shared memory, {self.workspace_bytes} of workspace"
            )
        if self.packing:
            lines.append(f"packing    {self.packing}")
        lines.append(f"work       {self.flops / 1e9:.3f} GFLOP, {self.bytes / 1e6:.3f} MB of inputs and outputs")
        lines.append(f"gradients  {self.gradients}")
        if self.recipe:
            lines.append(f"recipe     {self.recipe}")
            lines.append(f"quantises  {self.quantizer}")
        lines.append(f"copies     {'; '.join(self.copies) or 'none'}")
        lines.extend(f"note       {note}" for note in self.notes)
        return "\n".join(lines)


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
) -> Plan:
    """What flash_attn_func would do with these arguments here and now; launches nothing.

    Returns:
        A Plan: engine and why, tile config, grid, shared memory, flops, bytes, copies, and where gradients come from.
        When set_backend demands what cannot run, `why` says what the call would raise.

    Raises:
        ValueError, NotImplementedError: as flash_attn_func.
    """
    checks.not_built(num_splits)
    sizes = checks.dense(q, k, v)
    checks.pack_gqa(pack_gqa, sizes[2], sizes[5])
    batch, seqlen_q, heads, head_dim, seqlen_k, kv_heads, head_dim_v = sizes
    if sink is not None:
        checks.sink(sink, heads, q.device)
    checks.scalars(softmax_scale, softcap, sm_margin)
    if fp8 is not None:
        fp8_attention.check_recipe(fp8)
        fp8_attention.check_options(softcap, sink)
        checks.no_packing(pack_gqa, "8-bit calls")
        fp8_attention.check_inputs(q, head_dim, head_dim_v)
    left, right = checks.normalize_window(causal, window_size)
    left, right = checks.widen_window(left, right, seqlen_q, seqlen_k)
    mask = Mask(seqlen_q, seqlen_k, left, right)
    requested = backends.backend()
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    options = (softcap, sink is not None, False, scale)
    if fp8 is None:
        reason, is_broken = backends.refusal(q, head_dim, head_dim_v, left, right, *options)
    else:
        reason, is_broken = hopper_fp8.forward_refusal(q.device, (head_dim, head_dim_v), fp8, scale)
    runs_hopper = requested != "tiled" and (reason is None or requested == "hopper" or is_broken)
    problem = (
        f"batch {batch}, {heads} heads on {kv_heads} KV heads, seqlen_q {seqlen_q}, seqlen_k {seqlen_k}, "
        f"head_dim {head_dim}/{head_dim_v}, "
        f"{_mask_text(left, right)}, {str(q.dtype).removeprefix('torch.')} on {q.device}"
    )
    elements = q.numel() + k.numel() + v.numel() + batch * seqlen_q * heads * head_dim_v
    lse_bytes = batch * heads * seqlen_q * tiles.accumulator_dtype(q.dtype).itemsize
    common = {
        "requested": requested,
        "why": _why(requested, reason, runs_hopper),
        "problem": problem,
        "flops": float(flops.forward_flops(batch * mask.kept(), heads, head_dim, head_dim_v)),
        "bytes": float(elements * q.element_size() + lse_bytes),
        "gradients": ("straight-through; " if fp8 is not None else "")
        + _gradients(requested, q, sizes, (left, right), sm_margin, deterministic, options),
        "notes": _notes(),
    }
    if fp8 is not None:
        return _fp8_plan(q, sizes, fp8, runs_hopper, common)
    if runs_hopper and reason is None:
        return _hopper_plan(q, k, v, sizes, left, right, sm_margin, pack_gqa, common)
    return _tiled_plan(q, sizes, "hopper" if runs_hopper else "tiled", common)


def _why(requested: str, reason: str | None, runs_hopper: bool) -> str:
    if requested == "tiled":
        return "asked for by name"
    if reason is None:
        return "a Hopper GPU, dtype, head sizes and options that the kernels have"
    return f"the call would raise RuntimeError, {reason}" if runs_hopper else reason


def _gradients(
    requested: str,
    q: torch.Tensor,
    sizes: checks.DenseShape,
    window: tuple[int, int],
    sm_margin: int,
    deterministic: bool,
    options: tuple[float, bool, bool, float],
) -> str:
    softcap, has_sink, is_packed, scale = options
    reason, _ = backends.refusal(q, sizes[3], sizes[6], *window, softcap, has_sink, is_packed, scale, is_backward=True)
    if requested == "hopper" and reason is not None:
        return f"none: backward would raise RuntimeError, {reason}"
    if requested == "tiled" or reason is not None:
        return _TILED_GRADIENTS
    if hopper_backward.is_empty(sizes, has_sink):
        return "hopper, zeros: the problem has no queries or no keys"
    row = hopper_backward.backward_plan(sizes, q.dtype, *window, sm_margin, deterministic, q.device)
    order = "in a fixed order, bit-reproducible" if deterministic else "in the order of arrival"
    return (
        f"hopper, {row['config']}: {row['tiles']} tiles of {row['tile_n']} keys, {row['grid']} thread blocks, "
        f"{row['smem_bytes']} bytes of shared memory, {row['workspace_bytes']} of workspace; dq summed {order}"
    )


def _notes() -> tuple[str, ...]:
    if hopper.module is None:
        return (f"THE COMPILED MODULE DID NOT LOAD: {hopper.load_error}; run `python -m flashhopper doctor`",)
    return ()


def _mask_text(left: int, right: int) -> str:
    if left < 0 and right == 0:
        return "causal"
    return "full" if left < 0 and right < 0 else f"window ({left}, {right})"


def _packing_text(packed_heads: int, sizes: checks.DenseShape, pack_gqa: bool | None) -> str:
    heads, kv_heads = sizes[2], sizes[5]
    if heads == kv_heads:
        return ""
    chosen = f"{packed_heads} of the {heads // kv_heads} query heads of a KV head share a tile"
    if packed_heads == 1:
        chosen = "each query head has tiles of its own"
    why = "fewer tiles" if packed_heads > 1 else "no sharing saves an eighth of the tiles"
    return f"{chosen}: {why if pack_gqa is None else f'pack_gqa={pack_gqa}'}"


def _hopper_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sizes: checks.DenseShape,
    left: int,
    right: int,
    sm_margin: int,
    pack_gqa: bool | None,
    common: dict[str, object],
) -> Plan:
    if hopper.is_empty(sizes):
        # Nothing is launched; what would be is the plan of a single query.
        batch, seqlen_q, heads, head_dim, seqlen_k, kv_heads, head_dim_v = (max(size, 1) for size in sizes)
        sizes = (batch, seqlen_q, heads, head_dim, seqlen_k, kv_heads, head_dim_v)
        common = {**common, "notes": (*_notes(), "the problem is empty: nothing is launched")}
    row = hopper.forward_plan(sizes, q.dtype, left, right, sm_margin, pack_gqa, q.device)
    reasons = ((name, hopper.copy_reason(x)) for name, x in (("q", q), ("k", k), ("v", v)))
    return Plan(
        backend="hopper",
        config=row["config"],
        tile_m=row["tile_m"],
        tile_n=row["tile_n"],
        head_dim=row["head_dim"],
        head_dim_v=row["head_dim_v"],
        grid=row["grid"],
        tiles=row["tiles"],
        splits=1,
        threads=row["threads"],
        stages=row["stages"],
        smem_bytes=row["smem_bytes"],
        workspace_bytes=hopper.module.workspace_bytes(),
        packed_heads=row["packed_heads"],
        packing=_packing_text(row["packed_heads"], sizes, pack_gqa),
        copies=tuple(f"{name} ({reason})" for name, reason in reasons if reason is not None),
        **common,  # type: ignore[arg-type]
    )


def _fp8_plan(
    q: torch.Tensor, sizes: checks.DenseShape, recipe: Fp8Recipe, runs_hopper: bool, common: dict[str, object]
) -> Plan:
    batch, seqlen_q, heads, head_dim, _, kv_heads, head_dim_v = sizes
    columns, columns_v = formats.computed_head_dims(head_dim, head_dim_v)
    group, folded_heads = max(heads // max(kv_heads, 1), 1), batch * kv_heads
    blocks = tiles.choose_blocks(folded_heads, group, seqlen_q, TILE_KEYS, q.device)
    reason = "asked for by name" if common["requested"] == "tiled" else None
    reason = reason or hopper_fp8.quantize_refusal(q.device, q.dtype, (head_dim, head_dim_v), recipe)
    return Plan(
        backend="hopper" if runs_hopper else "tiled",
        config="8-bit kernel" if runs_hopper else "8-bit attention emulated in torch ops, last keys first",
        tile_m=blocks.q,
        tile_n=TILE_KEYS,
        head_dim=columns,
        head_dim_v=columns_v,
        grid=0,
        tiles=-(-folded_heads // blocks.heads) * -(-seqlen_q // blocks.q),
        splits=1,
        threads=0,
        stages=0,
        smem_bytes=0,
        workspace_bytes=0,
        recipe=str(recipe),
        quantizer="the Hopper quantiser" if reason is None else f"torch ops: {reason}",
        **common,  # type: ignore[arg-type]
    )


def _tiled_plan(q: torch.Tensor, sizes: checks.DenseShape, backend: str, common: dict[str, object]) -> Plan:
    batch, seqlen_q, heads, head_dim, seqlen_k, kv_heads, head_dim_v = sizes
    group = heads // max(kv_heads, 1)
    blocks = tiles.choose_blocks(batch * kv_heads, max(group, 1), seqlen_q, seqlen_k, q.device)
    steps = -(-(batch * kv_heads) // blocks.heads) * -(-seqlen_q // blocks.q)
    operands = str(tiles.operand_dtype(q.dtype, q.device)).removeprefix("torch.")
    return Plan(
        backend=backend,
        config="none"
        if backend == "hopper"
        else f"torch ops, {blocks.heads} KV head(s) of the batch at a time, {operands} products",
        tile_m=blocks.q,
        tile_n=blocks.k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        grid=0,
        tiles=steps,
        splits=1,
        threads=0,
        stages=0,
        smem_bytes=0,
        workspace_bytes=0,
        **common,  # type: ignore[arg-type]
    )
