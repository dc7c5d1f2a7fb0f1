"""Timing rows of windows, grouped heads, packed sequences, softcap and sink (bench:features, bench:features_bwd).
Before it: parts.py; after it: peers_features.py, oracle.py, timing.py.

FLOPs are those of the scores that the mask keeps. The first contender of a row is flashhopper: it is compared with
float64 attention, every other one with it, so that no library is timed at another problem. Softcap and sink are other
problems by design, which tests/gpu compare.
"""

from __future__ import annotations

import faulthandler
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.cells import BACKWARD_FLOPS, Cell
from benchmarks.harness import CELL_SECONDS, OURS, Row, build_contenders, make_row
from benchmarks.oracle import attend_rows, gradient_errors, sampled_rows
from benchmarks.peers import TORCH_DTYPES, Peer
from benchmarks.timing import Contender, describe, measure, tflops

Measure = Callable[[Sequence[Contender], int], None]
Tensors = tuple[torch.Tensor, ...]
SOFTCAP = 30.0
WINDOW = 4096  # keys that a query sees, itself included
AGREE = 0.02  # relative rmse of a contender against ours; 16-bit kernels differ by 0.003, other problems by 1


@dataclass(frozen=True)
class Case:
    """One row. The cell's seqlens are those of every sequence, or the longest of `lengths` where these are given."""

    feature: str  # window, gqa, varlen or options
    cell: Cell
    left: int = -1  # keys before its own that a query sees; -1: all
    lengths: tuple[int, ...] = ()  # of packed sequences, of each one batch entry

    @property
    def op(self) -> str:
        return f"{self.cell.op}_{self.feature}"

    @property
    def is_uniform(self) -> bool:
        return len(set(self.lengths)) == 1

    @property
    def is_short(self) -> bool:
        """Whether few queries meet many keys."""
        return self.cell.seqlen_q < self.cell.seqlen_k

    @property
    def flops(self) -> float:
        if self.is_short:
            kept = self.cell.batch * self.cell.kept_scores
        else:
            each = self.lengths or (self.cell.seqlen_q,) * self.cell.batch
            kept = sum(kept_scores(length, self.cell.causal, self.left) for length in each)
        forward = 2.0 * kept * self.cell.heads * (self.cell.head_dim + self.cell.head_dim_v)
        return forward * (BACKWARD_FLOPS if self.cell.op == "bwd" else 1.0)

    def last(self, x: torch.Tensor) -> torch.Tensor:
        """The last sequence of x, (batch, seqlen, heads, head_dim) or packed, as (seqlen, heads, head_dim)."""
        return x[-self.lengths[-1] :] if self.lengths else x[-1]


def kept_scores(seqlen: int, causal: bool, left: int) -> int:
    """Scores of one head and sequence that the mask keeps; a window (left, 0) where left is not -1."""
    if not causal:
        return seqlen * seqlen
    full = seqlen if left < 0 else min(seqlen, left + 1)  # rows that see one key more than the row before
    return full * (full + 1) // 2 + (seqlen - full) * full


def ragged_lengths(total: int = 32768, seed: int = 0) -> tuple[int, ...]:
    """Lengths from 200 to 4000 that sum up to `total`; the last is what remains."""
    draw = random.Random(seed)
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(min(draw.randrange(200, 4000), total - sum(lengths)))
    return tuple(lengths)


def _window(seqlen: int, batch: int) -> Case:
    return Case("window", Cell("bf16", 128, 128, True, batch, 16, 16, seqlen, seqlen), left=WINDOW - 1)


def _gqa(seqlen: int, batch: int) -> Case:
    return Case("gqa", Cell("bf16", 128, 128, True, batch, 64, 8, seqlen, seqlen))


def _short(seqlen_q: int) -> Case:
    """Grouped heads as in generation with a long context; not causal, which torch aligns top-left."""
    return Case("gqa", Cell("bf16", 128, 128, False, 16, 64, 8, seqlen_q, 8192))


def _varlen(head_dim: int, causal: bool, lengths: tuple[int, ...]) -> Case:
    heads, longest = 2048 // head_dim, max(lengths)
    cell = Cell("bf16", head_dim, head_dim, causal, len(lengths), heads, heads, longest, longest)
    return Case("varlen", cell, lengths=lengths)


def _backward(case: Case) -> Case:
    return replace(case, cell=replace(case.cell, op="bwd"))


FORWARD: tuple[Case, ...] = (
    *(_window(seqlen, 32768 // seqlen) for seqlen in (16384, 32768)),
    *(_gqa(seqlen, batch) for seqlen, batch in ((2048, 16), (8192, 2), (16384, 1), (32768, 1))),
    *(_short(seqlen_q) for seqlen_q in (1, 8, 64)),
    *(_varlen(128, causal, (2048,) * batch) for batch in (8, 16) for causal in (False, True)),
    *(_varlen(head_dim, True, (2048,) * 16) for head_dim in (64, 256)),
    _varlen(128, True, ragged_lengths()),
    Case("options", Cell("bf16", 128, 128, True, 2, 16, 16, 8192, 8192)),
)
BACKWARD: tuple[Case, ...] = tuple(
    _backward(case) for case in (_window(16384, 2), _gqa(8192, 2), _varlen(128, True, ragged_lengths()))
)


def inputs(case: Case, seed: int, device: str) -> Tensors:
    """Fresh normal q, k, v, and dout for a backward: (batch, seqlen, heads, head_dim), or packed without batch."""
    cell = case.cell
    generator = torch.Generator(device=device).manual_seed(seed)
    packed = (sum(case.lengths),)
    rows, keys = ((packed if case.lengths else (cell.batch, n)) for n in (cell.seqlen_q, cell.seqlen_k))
    shapes = [
        (*rows, cell.heads, cell.head_dim),
        (*keys, cell.kv_heads, cell.head_dim),
        (*keys, cell.kv_heads, cell.head_dim_v),
    ]
    if cell.op == "bwd":
        shapes.append((*rows, cell.heads, cell.head_dim_v))
    dtype = TORCH_DTYPES[cell.dtype]
    return tuple(torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)


def _wrong_output(case: Case, out: torch.Tensor, tensors: Tensors) -> str | None:
    """Compares rows of the last head of the last sequence, by the 16-bit rule."""
    q, k, v = (case.last(x)[:, -1] for x in tensors[:3])
    seqlen = q.size(0)
    rows = sampled_rows(seqlen, device=q.device.type)
    one = (q[rows], k, v, rows, seqlen, case.cell.causal)
    exact, _ = attend_rows(*one, left=case.left)
    plain, _ = attend_rows(*one, dtype=q.dtype, left=case.left)
    error = (case.last(out)[rows, -1].double() - exact).abs().max().item()
    allowed = 2 * (plain.double() - exact).abs().max().item() + 1e-5
    return None if error <= allowed else f"wrong result: max error {error:.2e}, allowed {allowed:.2e}"


def _wrong_gradients(case: Case, gradients: Sequence[torch.Tensor], tensors: Tensors) -> str | None:
    """Compares the first and last head of the last sequence."""
    mine, given = ([case.last(x)[None] for x in group] for group in (gradients, tensors))
    q, k, v, dout = given
    wrong = gradient_errors(mine, q, k, v, dout, case.cell.causal, left=case.left).wrong
    return "wrong result: " + "; ".join(wrong) if wrong else None


def _results(result: Any, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a contender computed, in the shapes of `like`: peers return tuples, heads first, or a batch of packed
    sequences."""
    found: list[torch.Tensor] = list(result) if isinstance(result, (tuple, list)) else [result]
    tensors = []
    for x, expected in zip(found, like, strict=False):
        if x.dim() == 4 and expected.dim() == 4 and x.shape != expected.shape:
            x = x.transpose(1, 2)
        tensors.append(x.reshape(expected.shape))
    return tensors


def _disagrees(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> str | None:
    for ours, other in zip(mine, theirs, strict=True):
        error = ((other.float() - ours.float()).norm() / ours.float().norm()).item()
        if not error <= AGREE:
            return f"wrong result: relative rmse {error:.2e} against flashhopper, allowed {AGREE}"
    return None


def check(case: Case, contenders: Sequence[Contender], tensors: Tensors) -> None:
    """Gives an error to each contender that computes something else. Where ours does, nobody is compared with it."""
    backward = case.cell.op == "bwd"
    like = tensors[:3] if backward else (tensors[0].new_empty((*tensors[0].shape[:-1], case.cell.head_dim_v)),)
    reference: list[torch.Tensor] | None = None
    for contender in contenders:
        if contender.error is not None:
            continue
        try:
            with torch.no_grad():
                found = _results(contender.call(), like)
                if contender.name == OURS:
                    if backward:
                        contender.error = _wrong_gradients(case, found, tensors)
                    else:
                        contender.error = _wrong_output(case, found[0], tensors)
                    reference = found if contender.error is None else None
                elif reference is not None and case.feature != "options":
                    contender.error = _disagrees(reference, found)
        except Exception as error:  # a contender that refuses the case is reported, not fatal
            contender.error = describe(error)


def row_of(case: Case, peers: Sequence[Peer], rounds: int, seed: int, device: str, timer: Measure) -> Row:
    """One row, in TFLOP/s of the kept scores."""
    try:
        tensors = inputs(case, seed, device)
        contenders = build_contenders(peers, case.cell, tensors)
        check(case, contenders, tensors)
        if device == "cuda":
            torch.cuda.empty_cache()  # gives back the score matrices of the check
        timer([c for c in contenders if c.error is None], rounds)
    except Exception as error:  # a broken device breaks the rows that follow, not those that are measured
        contenders = [Contender(peer.name, lambda: None, error=describe(error)) for peer in peers]
    row = make_row(case.op, case.cell, "TFLOP/s", contenders, lambda c: tflops(case.flops, c.median_ms))
    row["lengths"] = list(case.lengths)
    if case.left >= 0:
        row["window"] = [case.left, 0]
    return row


def time_cases(
    cases: Sequence[Case],
    load: Callable[[Case, str], list[Peer]],
    rounds: int,
    seed: int = 0,
    on_row: Callable[[Row], None] | None = None,
    *,
    device: str = "cuda",
    timer: Measure = measure,
) -> list[Row]:
    """One row a case; load(case, device) gives its contenders, flashhopper first."""
    rows = []
    for index, case in enumerate(cases):
        faulthandler.dump_traceback_later(CELL_SECONDS, exit=True)
        row = row_of(case, load(case, device), rounds, seed + index, device, timer)
        faulthandler.cancel_dump_traceback_later()
        rows.append(row)
        if on_row is not None:
            on_row(row)
    return rows
