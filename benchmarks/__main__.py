"""`python -m benchmarks`: times attention of flashhopper and every peer that imports, in one interleaved run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks import harness
from benchmarks.cells import PRESETS, parse_cells
from benchmarks.peers import NAMES, load_all


def main(
    preset: Annotated[str, typer.Option(help=f"one of {', '.join(PRESETS)}")] = "issue2",
    cells: Annotated[
        str, typer.Option(help="cells instead of a preset, e.g. bf16:128:causal:8192,bwd:bf16:64:full:2048")
    ] = "",
    only: Annotated[
        str, typer.Option(help="keep the cells whose name contains one of these, e.g. bf16:128,causal")
    ] = "",
    ops: Annotated[str, typer.Option(help="fwd, bwd, host: which to time")] = "fwd,bwd,host",
    peers: Annotated[str, typer.Option(help=f"comma-separated: {', '.join(NAMES)}")] = ",".join(NAMES),
    rounds: Annotated[int, typer.Option(min=3, help="interleaved rounds; the median counts")] = 5,
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file, rewritten after every cell")] = None,
) -> None:
    """Prints a table of TFLOP/s (host: microseconds a call) with the ratio to the best peer; JSON with --out."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device: the harness needs a GPU")
    begin = time.monotonic()
    chosen = parse_cells(cells or preset)
    wanted = [part for part in only.split(",") if part]
    if wanted:
        chosen = [cell for cell in chosen if any(part in cell.name for part in wanted)]
    contenders = load_all([name for name in peers.split(",") if name])
    report = {**harness.environment(), "peers": {p.name: p.unavailable or p.version for p in contenders}, "bench": []}
    for peer in contenders:
        print(f"{peer.name}: {'UNAVAILABLE ' + peer.unavailable if peer.unavailable else peer.version}", flush=True)

    def keep(row: harness.Row) -> None:
        report["bench"].append(row)
        values = " ".join(f"{name} {value:.0f}" for name, value in row["value"].items())
        print(f"{time.monotonic() - begin:5.0f} s {row['op']} {harness.cell_of(row).name}: {values}", flush=True)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(report, indent=1) + "\n")

    if "host" in ops.split(","):
        for row in harness.time_host(contenders, rounds, seed):
            keep(row)
    for op, time_cells in (("fwd", harness.time_forward), ("bwd", harness.time_backward)):
        if op in ops.split(","):
            time_cells([cell for cell in chosen if cell.op == op], contenders, rounds, seed, keep)
    print("\n".join(harness.error_lines(report["bench"])))
    print(f"{report['gpu']}, torch {report['torch']}, {time.monotonic() - begin:.0f} s")
    print(harness.table(report["bench"]), flush=True)


if __name__ == "__main__":
    typer.run(main)
