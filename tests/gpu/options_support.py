"""What the tests of packed sequences, windows, softcap and sinks share: attention with all options in any dtype, the
16-bit rule over a whole packed batch, raw calls into poisoned memory.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_support import DTYPES, GUARD, LSE_TOLERANCE, NAN, Tensors, judged, workspace

from flashhopper.engine import hopper

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Options:
    """Of one call; windows are (left, right), -1 unbounded."""

    left: int = -1
    right: int = -1
    softcap: float = 0.0
    sink: torch.Tensor | None = None
    scale: float | None = None
    pack_gqa: bool | None = None

    def public(self) -> dict[str, object]:
        """As the public functions' keywords."""
        window = (self.left, self.right)
        numbers = {"softcap": self.softcap, "softmax_scale": self.scale, "pack_gqa": self.pack_gqa}
        return {"window_size": window, "sink": self.sink, **numbers}


PLAIN, CAUSAL = Options(), Options(right=0)


def offsets(lengths: Sequence[int]) -> torch.Tensor:
    """int32 (batch + 1,) on the GPU."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")


@dataclass
class Packed:
    """A packed batch. used: leading rows that exist, None for all; behind: rows of no sequence."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths_q: list[int]
    lengths_k: list[int]
    used_q: list[int] | None = None
    used_k: list[int] | None = None
    cu_q: torch.Tensor = field(init=False)
    cu_k: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.cu_q, self.cu_k = offsets(self.lengths_q), offsets(self.lengths_k)

    def slices(self) -> list[tuple[slice, slice]]:
        """The existing rows of q and of k of each sequence."""
        result, q_begin, k_begin = [], 0, 0
        for b, (q_length, k_length) in enumerate(zip(self.lengths_q, self.lengths_k, strict=True)):
            q_used = q_length if self.used_q is None else self.used_q[b]
            k_used = k_length if self.used_k is None else self.used_k[b]
            result.append((slice(q_begin, q_begin + q_used), slice(k_begin, k_begin + k_used)))
            q_begin, k_begin = q_begin + q_length, k_begin + k_length
        return result

    def used(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        q, k = (None if x is None else torch.tensor(x).int().cuda() for x in (self.used_q, self.used_k))
        return q, k

    def longest(self) -> tuple[int, int]:
        return max([0, *self.lengths_q]), max([0, *self.lengths_k])


def draw_packed(
    seed: int,
    lengths_q: list[int],
    lengths_k: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    used_q: list[int] | None = None,
    used_k: list[int] | None = None,
    behind: int = 0,
) -> Packed:
    """Normal inputs; every row that does not exist is NaN."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    total_q, total_k = sum(lengths_q) + behind, sum(lengths_k) + behind
    shapes = (total_q, heads, head_dim), (total_k, kv_heads, head_dim), (total_k, kv_heads, head_dim_v or head_dim)
    q, k, v = (torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes)
    batch = Packed(q, k, v, lengths_q, lengths_k, used_q, used_k)
    missing_q, missing_k = (torch.ones(n, dtype=torch.bool) for n in (total_q, total_k))
    for rows, keys in batch.slices():
        missing_q[rows] = missing_k[keys] = False
    q[missing_q.cuda()] = NAN
    k[missing_k.cuda()] = v[missing_k.cuda()] = NAN
    return batch


def random_batch(
    rng: random.Random, dims: Sequence[tuple[int, int]], least_outputs: int = 0
) -> tuple[dict[str, Any], tuple[int, int]]:
    """What draw_packed takes, by name, with its lengths and heads as "shape" and head sizes as "dims"; and a window.
    Where there would be fewer outputs than that, the first sequence becomes longer.
    """
    count = rng.choice([1, 2, 5, 17])
    lengths_q, lengths_k = (
        [rng.choice([0, 1, 64, 127, 128, 129, rng.randint(1, 700)]) for _ in range(count)] for _ in range(2)
    )
    used_q, used_k = (
        [rng.randint(0, n) for n in lengths] if rng.random() < 0.3 else None for lengths in (lengths_q, lengths_k)
    )
    kv_heads = rng.choice([1, 2, 3])
    heads, chosen = kv_heads * rng.choice([1, 2, 4]), rng.choice(dims)
    if sum(lengths_q) * heads * chosen[1] < least_outputs:
        lengths_q[0], used_q = 500, None
    left, right = (rng.choice([-1, -1, 0, 1, 63, 64, 100, rng.randint(0, 900)]) for _ in range(2))
    sizes = {
        "seed": rng.randrange(2**31),
        "shape": (lengths_q, lengths_k, heads, kv_heads),
        "dims": chosen,
        "dtype": rng.choice(DTYPES),
        "used_q": used_q,
        "used_k": used_k,
        "behind": rng.choice([0, 0, 1, 200]),
    }
    return sizes, (left, right)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, dtype: torch.dtype) -> Pair:
    """Attention of (batch, seqlen, heads, head_dim) with the whole score matrix in `dtype`."""
    scale = q.size(3) ** -0.5 if options.scale is None else options.scale
    group = q.size(2) // k.size(2)
    kt, vt = (x.to(dtype).repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    scores = q.to(dtype).transpose(1, 2) @ kt.transpose(2, 3) * scale
    if options.softcap > 0:
        scores = (scores / options.softcap).tanh() * options.softcap
    seqlen_q, seqlen_k = scores.shape[2:]
    diagonal = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k, device=q.device)[None]
    hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    if options.left >= 0:
        hidden |= key < diagonal - options.left
    if options.right >= 0:
        hidden |= key > diagonal + options.right
    scores = scores.masked_fill(hidden, -math.inf)
    sink = torch.full((q.size(2),), -math.inf, device=q.device) if options.sink is None else options.sink
    column = sink.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    scores = torch.cat([scores, column], 3)
    lse = scores.logsumexp(3)
    dead = (lse == -math.inf)[..., None]
    weights = scores.masked_fill(dead, 0.0).softmax(3).masked_fill(dead, 0.0)
    return (weights[..., :-1] @ vt).transpose(1, 2), lse


def packed_attention(batch: Packed, options: Options, dtype: torch.dtype) -> Pair:
    """The same, sequence by sequence; rows that do not exist give 0 and -inf."""
    out = torch.zeros(*batch.q.shape[:2], batch.v.size(2), dtype=dtype, device="cuda")
    lse = torch.full((batch.q.size(1), batch.q.size(0)), -math.inf, dtype=dtype, device="cuda")
    for rows, keys in batch.slices():
        one, one_lse = attention(batch.q[None, rows], batch.k[None, keys], batch.v[None, keys], options, dtype)
        out[rows], lse[:, rows] = one[0], one_lse[0]
    return out, lse


def judge(found: Pair, exact: Pair, plain: torch.Tensor) -> str | None:
    """The 16-bit rule; what breaks it, or None."""
    judged.count += 1
    (out, lse), (right, right_lse) = found, exact
    if out.isnan().any() or lse.isnan().any():
        return f"{int(out.isnan().sum())} of out, {int(lse.isnan().sum())} of lse are NaN or were never written"
    error = (out.double() - right).abs().max().item()
    allowed = 2 * (plain.double() - right).abs().max().item() + 1e-5
    if not error <= allowed:
        return f"max error {error:.3e}, allowed {allowed:.3e}"
    same = lse.double() == right_lse
    lse_error = torch.where(same, 0.0, lse.double() - right_lse).abs().max().item()
    return None if lse_error <= LSE_TOLERANCE else f"lse error {lse_error:.3e}, allowed {LSE_TOLERANCE:.0e}"


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN memory with a guard on both sides, and the tensor between them."""
    store = torch.full((math.prod(shape) + 2 * GUARD,), NAN, dtype=dtype, device="cuda")
    return store, store[GUARD : GUARD + math.prod(shape)].view(shape)


def launch(tensors: Tensors, options: Options, batch: Packed | None = None) -> Pair:
    """The compiled module's general forward into NaN between guards; batch: whose offsets a packed call has."""
    from flashhopper import _C

    q, k, v = (x[None] for x in tensors) if batch is not None else tensors
    out_store, out = poisoned((*q.shape[:3], v.size(3)), q.dtype)
    lse_store, lse = poisoned((q.size(0), q.size(2), q.size(1)), torch.float32)
    views = [(x.data_ptr(), *x.stride()[:3]) for x in (q, k, v, out)]
    lengths, totals, count = (q.size(1), k.size(1)), (0, 0), q.size(0)
    offset_tensors: list[torch.Tensor | None] = [None] * 4
    memory = None
    if batch is not None:
        lengths, totals, count = batch.longest(), (q.size(1), k.size(1)), len(batch.lengths_q)
        offset_tensors = [batch.cu_q, batch.cu_k, *batch.used()]
        memory = poisoned((_C.packed_workspace_bytes(count, totals[0]) // 4,), torch.float32)
    sink = None if options.sink is None else options.sink.float()
    listed = None if memory is None else memory[1]
    addresses = [0 if x is None else x.data_ptr() for x in (sink, *offset_tensors, listed)]
    sizes = (count, q.size(2), k.size(2), *lengths, q.size(3), v.size(3), options.left, options.right)
    scale = q.size(3) ** -0.5 if options.scale is None else options.scale
    code = _C.BF16 if q.dtype == torch.bfloat16 else _C.FP16
    stream = torch.cuda.current_stream().cuda_stream
    places = [lse.data_ptr(), workspace().data_ptr(), *addresses]
    pack_gqa = hopper.pack_code(options.pack_gqa)
    _C.forward(views, places, sizes, totals, scale, options.softcap, code, 0, pack_gqa, stream)
    stores = [out_store, lse_store] if memory is None else [out_store, lse_store, memory[0]]
    written = torch.stack([(~x[side]).sum() for y in stores for x in [y.isnan()] for side in _SIDES])
    assert not written.any(), f"wrote outside out, lse or the list: {written.tolist()} elements"
    assert not workspace().any(), "the workspace was not left zero"
    return (out[0], lse[0]) if batch is not None else (out, lse)


_SIDES = (slice(GUARD), slice(-GUARD, None))


def packed_problem(batch: Packed, options: Options) -> str | None:
    """One raw packed launch held to the rule."""
    found = launch((batch.q, batch.k, batch.v), options, batch)
    plain, _ = packed_attention(batch, options, batch.q.dtype)
    return judge(found, packed_attention(batch, options, torch.float64), plain)


def dense_problem(tensors: Tensors, options: Options) -> str | None:
    """One raw dense launch held to the rule."""
    found = launch(tensors, options)
    plain, _ = attention(*tensors, options, tensors[0].dtype)
    return judge(found, attention(*tensors, options, torch.float64), plain)
