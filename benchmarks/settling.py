"""How long the rate of a kernel still moves after another one has run: what SETTLE_MS of timing.py is chosen by.

    python -m benchmarks.settling bf16:64:full:16384 bf16:128:causal:8192 [--peers flashhopper,fa3,cudnn]

For each pair of contenders one runs for BEFORE_MS, the other right behind it for AFTER_MS; the rate of the second is
printed by the time since the change. Before it: nothing; after it: harness.py, peers.py.
"""

from __future__ import annotations

import itertools
from typing import Annotated

import torch
import typer

from benchmarks.cells import Cell, parse_cells
from benchmarks.harness import build_contenders, inputs
from benchmarks.markdown import grid
from benchmarks.peers import load_all
from benchmarks.timing import Call, Contender, describe, elapsed_ms, tflops

BEFORE_MS, AFTER_MS = 1500.0, 2500.0
EDGES_MS = (0.0, 50.0, 100.0, 200.0, 400.0, 800.0, 1600.0, AFTER_MS)


def rates(times_ms: list[float], flops: float, edges_ms: tuple[float, ...] = EDGES_MS) -> list[float]:
    """TFLOP/s between the edges. times_ms: when each launch ended, from the end of the one before the first."""
    found = []
    for begin, end in itertools.pairwise(edges_ms):
        inside = [time for time in (0.0, *times_ms) if begin <= time <= end]
        found.append(tflops(flops * (len(inside) - 1), inside[-1] - inside[0]) if len(inside) > 1 else float("nan"))
    return found


def _follow(first: Call, second: Call) -> list[float]:
    """When each launch of `second` ended, behind launches of `first`."""
    spans = ((first, BEFORE_MS), (second, AFTER_MS))
    counts = [max(2, round(ms / elapsed_ms(call, 4, 1, 0.0))) for call, ms in spans]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(counts[1] + 1)]
    for _ in range(counts[0]):
        first()
    events[0].record()
    for event in events[1:]:
        second()
        event.record()
    torch.cuda.synchronize()
    return [events[0].elapsed_time(event) for event in events[1:]]


def measure(cell: Cell, contenders: list[Contender]) -> str:
    """A table: who ran before, who runs, its rate by the time since."""
    body = []
    with torch.no_grad():
        for first, second in itertools.product(contenders, repeat=2):
            times = _follow(first.call, second.call)
            body.append([first.name, second.name, *(f"{rate:.0f}" for rate in rates(times, cell.flops))])
    spans = [f"{begin:.0f} to {end:.0f} ms" for begin, end in itertools.pairwise(EDGES_MS)]
    return f"{cell.name}, TFLOP/s\n\n" + grid(["before", "now", *spans], body)


def main(
    cells: Annotated[list[str], typer.Argument(help="as of `python -m benchmarks`")],
    peers: Annotated[str, typer.Option(help="comma-separated")] = "flashhopper,cudnn,fa3,fa4",
) -> None:
    """Print how the rate of every contender moves behind every other."""
    found = parse_cells(",".join(cells))
    for cell in found:
        if cell.op == "bwd":
            raise typer.BadParameter(f"cell {cell.name} is a backward: must be a forward, leave out bwd:")
    loaded = load_all(peers.split(","))
    for cell in found:
        contenders = []
        for contender in build_contenders(loaded, cell, inputs(cell, 0)):
            try:
                if contender.error is None:
                    with torch.no_grad():
                        contender.call()
            except Exception as error:
                contender.error = describe(error)
            if contender.error is None:
                contenders.append(contender)
            else:
                print(f"{contender.name}: {contender.error}")
        print(measure(cell, contenders), flush=True)


if __name__ == "__main__":
    typer.run(main)
