"""What each engine would launch for a checked call, in numbers and words. Before it: plan.py; after it:
engine/hopper.py, engine/tiles.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from . import backends, checks
from .engine import hopper, hopper_fp8, tiles
from .engine.tiled import Packing
from .fp8 import Fp8Recipe, formats
from .fp8.recipe import TILE_KEYS

# Sequences that the kernel which lists a packed batch's blocks can sort (cpp/packed/list.hpp: one of its threads each,
# and one for the rows of none).
_MOST_SORTED_SEQUENCES = 1023


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
    scheduler: str  # in which order the tiles are taken
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
    cluster: int = 1  # thread blocks that load keys and values for one another
    packed_heads: int = 1  # query heads that share a tile of the Hopper forward
    packing: str = ""  # the same in words, and why; of grouped heads on the Hopper kernels
    is_bound: bool = False  # whether `tiles` and `grid` are upper bounds: the kernels read lengths on the device
    recipe: str = ""  # of an 8-bit call, in words
    quantizer: str = ""  # what quantises, and why

    def __str__(self) -> str:
        tiles = f"{'at most ' if self.is_bound else ''}{self.tiles} tiles"
        shape = f"{self.tile_m} x {self.tile_n}, head_dim {self.head_dim}/{self.head_dim_v}"
        lines = [
            f"backend    {self.backend} (set_backend: {self.requested}): {self.why}",
            f"problem    {self.problem}",
            f"config     {self.config}: tile {shape}, {tiles}, {self.splits} split(s)",
        ]
        if self.backend == "hopper":
            clusters = f", in clusters of {self.cluster} that share keys and values" if self.cluster > 1 else ""
            launch = f"{self.grid} thread blocks of {self.threads} threads{clusters}, {self.stages} stages"
            lines.append(
                f"launch     {launch}, {self.smem_bytes} bytes of shared memory, {self.workspace_bytes} of workspace"
            )
        lines.append(f"scheduler  {self.scheduler}")
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


class Call(NamedTuple):
    """A checked call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sizes: checks.DenseShape  # of a packed batch the longest sequences
    packing: Packing | None
    lengths: list[tuple[int, int]]  # queries and keys of each sequence
    left: int
    right: int
    scale: float
    softcap: float
    has_sink: bool
    sm_margin: int
    deterministic: bool
    pack_gqa: bool | None

    @property
    def totals(self) -> tuple[int, int]:
        """Rows of q and k of a packed batch, as the compiled module wants them."""
        return (0, 0) if self.packing is None else (self.q.shape[0], self.k.shape[0])

    @property
    def has_rows(self) -> bool:
        """Whether there is any output element."""
        return self.q.shape[:-1].numel() > 0

    def refusal(self, is_backward: bool = False) -> tuple[str | None, bool]:
        """As backends.refusal."""
        options = (self.softcap, self.has_sink, self.packing is not None, self.scale, is_backward)
        return backends.refusal(self.q, self.sizes[3], self.sizes[6], self.left, self.right, *options)


def notes() -> tuple[str, ...]:
    """What the reader of any plan must know."""
    if hopper.module is None:
        return (f"THE COMPILED MODULE DID NOT LOAD: {hopper.load_error}; run `python -m flashhopper doctor`",)
    return ()


def quantizer_text(call: Call, recipe: Fp8Recipe, requested: str, reason: str | None) -> str:
    """What quantises an 8-bit call; reason: why the attention kernel does not serve it."""
    if requested == "tiled":
        return "torch ops: asked for by name"
    if call.packing is None:  # packed sequences take both kernels or neither
        dims = (call.sizes[3], call.sizes[6])
        reason = hopper_fp8.quantize_refusal(call.q.device, call.q.dtype, dims, recipe)
    return "the Hopper quantiser" if reason is None else f"torch ops: {reason}"


def _hopper_scheduler(call: Call, cluster: int) -> str:
    """In words, what core/scheduler.hpp does."""
    takers = "thread blocks" if cluster == 1 else f"clusters of {cluster} thread blocks"
    is_uneven = call.left >= 0 or call.right >= 0
    heads = "as many KV heads at a time as L2 holds, last queries first" if is_uneven else "one KV head at a time"
    if call.packing is None:
        return f"{takers} take tiles from a counter; {heads}"
    is_sorted = call.sizes[0] <= _MOST_SORTED_SEQUENCES
    order = "sequences of the longest tiles first" if is_sorted else "sequences in their own order"
    return f"{takers} take tiles from a counter, by a list made on the device; {order}, in each {heads}"


def _packing_text(call: Call, recipe: Fp8Recipe | None, packed_heads: int) -> str:
    """Which query heads share tiles, and why."""
    heads, kv_heads = call.sizes[2], call.sizes[5]
    if heads == kv_heads:
        return ""
    if recipe is not None or call.packing is not None:
        kind = "8-bit calls" if recipe is not None else "packed sequences"
        return f"each query head has tiles of its own, as in all {kind}"
    chosen = f"{packed_heads} of the {heads // kv_heads} query heads of a KV head share a tile"
    why = "fewer key blocks to compute"
    if packed_heads == 1:
        chosen, why = "each query head has tiles of its own", "no sharing saves key blocks"
    return f"{chosen}: {why if call.pack_gqa is None else f'pack_gqa={call.pack_gqa}'}"


def hopper_plan(call: Call, recipe: Fp8Recipe | None, common: dict[str, object]) -> Plan:
    """On the kernels, in 16 bits or with a recipe."""
    sizes, totals = call.sizes, call.totals
    if not call.has_rows:
        # Nothing is launched; what would be is the plan of a single query.
        batch, seqlen_q, heads, head_dim, seqlen_k, kv_heads, head_dim_v = (max(size, 1) for size in sizes)
        sizes = (batch, seqlen_q, heads, head_dim, seqlen_k, kv_heads, head_dim_v)
        common = {**common, "notes": (*notes(), "the problem is empty: nothing is launched")}
    launch, device = (call.q.dtype, call.left, call.right, call.sm_margin), call.q.device
    if recipe is None:
        row = hopper.forward_plan(sizes, *launch, call.pack_gqa, device, totals)
    else:
        row = hopper_fp8.forward_plan(sizes, recipe, *launch, device, None if call.packing is None else totals[0])
    workspace = hopper.module.workspace_bytes()
    if call.packing is not None:
        workspace += hopper.module.packed_workspace_bytes(sizes[0], totals[0])
    return Plan(
        backend="hopper",
        config=row["config"],
        tile_m=row["tile_m"],
        tile_n=row["tile_n"],
        head_dim=row["head_dim"],
        head_dim_v=row["head_dim_v"],
        grid=row["grid"],
        tiles=row["tiles"],
        scheduler=_hopper_scheduler(call, row["cluster"]),
        splits=1,
        threads=row["threads"],
        stages=row["stages"],
        cluster=row["cluster"],
        packed_heads=row["packed_heads"],
        packing=_packing_text(call, recipe, row["packed_heads"]),
        smem_bytes=row["smem_bytes"],
        workspace_bytes=workspace,
        copies=_copies(call, recipe),
        is_bound=call.packing is not None,
        **common,  # type: ignore[arg-type]
    )


def _copies(call: Call, recipe: Fp8Recipe | None) -> tuple[str, ...]:
    """What the engine copies before a launch, and why; the quantiser copies only what is not contiguous in the last
    dimension.
    """
    tensors = {"q": call.q, "k": call.k, "v": call.v}
    if recipe is not None:
        tensors = {name: x for name, x in tensors.items() if x.stride(-1) != 1 and x.size(-1) > 1}
    if call.packing is not None:
        tensors = {name: x[None] for name, x in tensors.items()}
    copies = [f"{name} ({reason})" for name, x in tensors.items() if (reason := hopper.copy_reason(x)) is not None]
    for name, x in zip(Packing._fields[:4], call.packing or (), strict=False):
        if isinstance(x, torch.Tensor) and not x.is_contiguous():
            copies.append(f"{name} (its stride is not 1)")
    return tuple(copies)


def _tiled_steps(call: Call, most_keys: int | None = None) -> tuple[tiles.Blocks, int]:
    """How the tiled engine walks a batch, all of a dense one at once, a packed one sequence by sequence: its blocks of
    the longest sequences, and how many there are. most_keys: of a tile, where that is not the engine's choice.
    """
    batch, seqlen_q, heads, _, seqlen_k, kv_heads, _ = call.sizes
    group = max(heads // max(kv_heads, 1), 1)
    lengths, folded_heads = [(seqlen_q, seqlen_k)], batch * kv_heads
    if call.packing is not None:
        lengths, folded_heads = call.lengths, kv_heads
    count = 0
    for sq, sk in lengths:
        blocks = tiles.choose_blocks(folded_heads, group, sq, most_keys or sk, call.q.device)
        count += -(-folded_heads // blocks.heads) * -(-sq // blocks.q)
    longest_q, longest_k = (max((x[side] for x in lengths), default=0) for side in (0, 1))
    return tiles.choose_blocks(folded_heads, group, longest_q, most_keys or longest_k, call.q.device), count


def _tiled_scheduler(call: Call) -> str:
    if call.packing is None:
        return "block after block of folded heads and queries"
    return "sequence after sequence, their lengths read on the host; in each, block after block of heads and queries"


def tiled_plan(call: Call, recipe: Fp8Recipe | None, backend: str, common: dict[str, object]) -> Plan:
    """On the tiled engine; of backend "hopper", a call that would raise."""
    dims, most_keys = (call.sizes[3], call.sizes[6]), None
    if recipe is not None:
        dims, most_keys = formats.computed_head_dims(*dims), TILE_KEYS
    blocks, count = _tiled_steps(call, most_keys)
    operands = str(tiles.operand_dtype(call.q.dtype, call.q.device)).removeprefix("torch.")
    heads = f"{blocks.heads} KV head(s) of the {'batch' if call.packing is None else 'sequence'} at a time"
    config = f"torch ops, {heads}, {operands} products"
    if recipe is not None:
        config = f"8-bit attention emulated in torch ops, {heads}, last keys first"
    return Plan(
        backend=backend,
        config="none" if backend == "hopper" else config,
        tile_m=blocks.q,
        tile_n=blocks.k if most_keys is None else most_keys,
        head_dim=dims[0],
        head_dim_v=dims[1],
        grid=0,
        tiles=count,
        scheduler="none" if backend == "hopper" else _tiled_scheduler(call),
        splits=1,
        threads=0,
        stages=0,
        smem_bytes=0,
        workspace_bytes=0,
        **common,  # type: ignore[arg-type]
    )
