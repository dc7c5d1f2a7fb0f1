"""Bytes per second of the quantiser beside a device copy, in one run:  python -m benchmarks.quantize_bandwidth

Bytes are those that must move: 16-bit tensors read once (of K and V the rows of each mean once more), 8-bit tensors,
scales, means and lse shifts written. The copy reads and writes as many bytes as q, k and v hold. The record's part
bench:quantize is made of the same rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import timing
from benchmarks.cells import Cell
from benchmarks.harness import Row, make_row
from benchmarks.peers import inputs
from benchmarks.peers_fp8 import recipes
from flashhopper.engine import hopper_fp8
from flashhopper.fp8 import Fp8QKV, Fp8Recipe, formats

OP, COPY = "quantize", "copy"
HEAD_DIMS = (64, 96, 128, 192, 256)
TOKENS, WIDTH, SEQLEN = 32768, 2048, 8192  # batch * seqlen, heads * head_dim
Quantize = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Fp8Recipe], Fp8QKV]
Measure = Callable[[Sequence[timing.Contender], int], None]


def named() -> dict[str, Fp8Recipe]:
    """The recipes, and casts with block scales alone."""
    return {"plain": Fp8Recipe("e4m3", rotate=False, smooth_k=False, center_v=False, q_block=128), **recipes()}


def on_hopper(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: Fp8Recipe) -> Fp8QKV:
    """The quantiser kernel, never the torch operations that stand in for it."""
    refusal = hopper_fp8.quantize_refusal(q.device, q.dtype, (q.shape[3], v.shape[3]), recipe)
    if refusal is not None:
        raise NotImplementedError(refusal)
    return hopper_fp8.quantize(q, k, v, recipe)


def bytes_moved(tensors: Sequence[torch.Tensor], result: Fp8QKV) -> int:
    read = sum(x.nbytes for x in tensors)
    sampled = min(1.0, formats.MEAN_ROWS / max(tensors[1].shape[1], 1))
    for x, mean in ((tensors[1], result.k_mean), (tensors[2], result.v_mean)):
        read += int(x.nbytes * sampled) if mean is not None else 0
    written = (result.q, result.k, result.v, result.q_scale, result.k_scale, result.v_scale)
    means = (result.lse_shift, result.k_mean, result.v_mean)
    return read + sum(x.nbytes for x in (*written, *means) if x is not None)


def cell_for(head_dim: int, seqlen: int = SEQLEN, tokens: int = TOKENS) -> Cell:
    heads = max(1, WIDTH // head_dim)
    return Cell("bf16", head_dim, head_dim, False, max(1, tokens // seqlen), heads, heads, seqlen, seqlen)


def row_for(
    cell: Cell, rounds: int, *, device: str = "cuda", run: Quantize = on_hopper, timer: Measure = timing.measure
) -> Row:
    """One head dimension: TB/s of a copy and of each recipe, the share of the copy's, microseconds, megabytes."""
    tensors = inputs(cell, cell.head_dim, device)
    source = torch.stack([x.flatten() for x in tensors])
    target = torch.empty_like(source)
    contenders, sizes = [timing.Contender(COPY, lambda: target.copy_(source))], {COPY: 2 * source.nbytes}
    for name, recipe in named().items():
        contender = timing.Contender(name, lambda recipe=recipe: run(*tensors, recipe))  # type: ignore[misc]
        try:
            sizes[name] = bytes_moved(tensors, run(*tensors, recipe))
        except Exception as error:
            contender.error = timing.describe(error)
        contenders.append(contender)
    timer([one for one in contenders if one.error is None], rounds)
    row = make_row(OP, cell, "TB/s", contenders, lambda one: sizes[one.name] / one.median_ms / 1e9)
    done = [one for one in contenders if one.name in row["value"]]
    row["microseconds"] = {one.name: float(f"{one.median_ms * 1e3:.5g}") for one in done}
    row["megabytes"] = {one.name: round(sizes[one.name] / 1e6, 1) for one in done}
    copy = row["value"].get(COPY)
    row["share"] = {one.name: round(row["value"][one.name] / copy, 4) for one in done if copy and one.name != COPY}
    return row


def measure(rounds: int) -> list[Row]:
    """The rows of the record."""
    rows = []
    for head_dim in HEAD_DIMS:
        rows.append(row_for(cell_for(head_dim), rounds))
        print("\n".join(lines(rows[-1])), flush=True)
    if not any(row["share"] for row in rows):
        raise RuntimeError(f"the quantiser ran none of the rows: {rows[0]['errors']}")
    return rows


def lines(row: Row) -> list[str]:
    """A line of text a recipe, and one a failure."""
    copy = row["value"].get(COPY, float("nan"))
    found = [
        f"{row['head_dim']:8} {name:14} {row['megabytes'][name]:8.1f} {row['microseconds'][name]:8.1f} "
        f"{row['value'][name]:6.2f} {copy:6.2f} {share:6.2f}"
        for name, share in row["share"].items()
    ]
    return found + [f"{row['head_dim']:8} {name:14} {error}" for name, error in row["errors"].items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS))
    parser.add_argument("--seqlen", type=int, default=SEQLEN)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"{'head_dim':>8} {'recipe':14} {'MB':>8} {'us':>8} {'TB/s':>6} {'copy':>6} {'share':>6}")
    rows = []
    for head_dim in arguments.head_dims:
        rows.append(row_for(cell_for(head_dim, arguments.seqlen), arguments.rounds))
        print("\n".join(lines(rows[-1])), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
