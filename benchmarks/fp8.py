"""8-bit timing rows of the record (bench:fp8): attention alone, the whole call with its quantisation, the 16-bit
forward and the peers' 8-bit ones, interleaved. Before it: parts.py; after it: peers_fp8.py, timing.py.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Sequence

import torch

from benchmarks.cells import Cell
from benchmarks.harness import CELL_SECONDS, Row, make_row
from benchmarks.oracle import attend_rows, sampled_rows
from benchmarks.peers import inputs
from benchmarks.peers_fp8 import BF16, Peer8, Prepared
from benchmarks.timing import Contender, describe, measure, tflops

OP = "fwd_fp8"
# Relative rmse of sampled rows: 8 bits lose 0.05 of normal inputs, attention of anything else 1. 16 bits lose 0.003.
LOOSE, TIGHT = 0.15, 0.02
Measure = Callable[[Sequence[Contender], int], None]


def wrong_result(out: torch.Tensor, cell: Cell, tensors: tuple[torch.Tensor, ...], bound: float) -> str | None:
    """Why `out` is not attention of the inputs, or None: what computes something else must not be timed."""
    q, k, v = tensors
    rows = sampled_rows(cell.seqlen_q, device=q.device.type)
    head, batch = cell.heads - 1, cell.batch - 1
    one = (q[batch, rows, head], k[batch, :, cell.kv_heads - 1], v[batch, :, cell.kv_heads - 1], rows)
    exact, _ = attend_rows(*one, cell.seqlen_q, cell.causal)
    difference = out[batch, rows, head].double() - exact
    error = (difference.square().mean().sqrt() / exact.square().mean().sqrt()).item()
    return None if error <= bound else f"wrong result: relative rmse {error:.2e}, allowed {bound:.2e}"


def _contender(peer: Peer8, cell: Cell, tensors: tuple[torch.Tensor, ...]) -> Contender:
    """Ready to be timed, its output compared once; or with the reason why not."""
    contender = Contender(peer.name, lambda: None, error=peer.unavailable)
    if peer.prepare is None:
        contender.error = contender.error or "unavailable"
        return contender
    try:
        with torch.no_grad():
            prepared: Prepared = peer.prepare(cell, *tensors)
            out = prepared.output(prepared.call())
            contender.error = wrong_result(out, cell, tensors, TIGHT if peer.name == BF16 else LOOSE)
        contender.call = prepared.call
    except Exception as error:  # a contender that refuses the shape is reported, not fatal
        contender.error = describe(error)
    return contender


def time_cells(
    cells: Sequence[Cell],
    peers: Sequence[Peer8],
    rounds: int,
    seed: int = 0,
    on_row: Callable[[Row], None] | None = None,
    *,
    device: str = "cuda",
    timer: Measure = measure,
) -> list[Row]:
    """One row a cell, in TFLOP/s of the attention alone, whatever else a contender does in its call."""
    rows = []
    for index, cell in enumerate(cells):
        faulthandler.dump_traceback_later(CELL_SECONDS, exit=True)
        try:
            tensors = inputs(cell, seed + index, device)
            contenders = [_contender(peer, cell, tensors) for peer in peers]
            timer([c for c in contenders if c.error is None], rounds)
        except Exception as error:  # a broken device breaks the cells that follow, not those that are measured
            contenders = [Contender(peer.name, lambda: None, error=describe(error)) for peer in peers]
        row = make_row(OP, cell, "TFLOP/s", contenders, lambda c, flops=cell.flops: tflops(flops, c.median_ms))  # type: ignore[misc]
        faulthandler.cancel_dump_traceback_later()
        row["dtype"] = "e4m3"  # of what the kernels read; q and k are int8 with the accurate recipe
        rows.append(row)
        del contenders  # they hold this cell's tensors
        if on_row is not None:
            on_row(row)
    return rows
