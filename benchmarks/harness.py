"""What `python -m benchmarks` and the record share: timing rows, host cost rows, the environment and the text table."""

from __future__ import annotations

import faulthandler
import gc
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cells import Cell, parse_cell
from benchmarks.oracle import attend_rows, gradient_errors, sampled_rows
from benchmarks.peers import TORCH_DTYPES, Peer, inputs, load_deterministic, output_gradient
from benchmarks.timing import Contender, describe, measure, tflops

Row = dict[str, Any]
OURS = "flashhopper"
DETERMINISTIC = "flashhopper_det"
DETERMINISTIC_CELL = parse_cell("bwd:bf16:128:causal:8192")  # where a row says what bit-equal gradients cost
CELL_SECONDS = 120  # a cell that takes longer hangs: the process ends with a traceback, earlier rows are on disk
HOST_BATCHES, HOST_BATCH = 4, 250  # 1000 calls, waited for so rarely that the launch queue neither drains nor fills


def environment() -> dict[str, Any]:
    """The fields of a record that say where it was measured."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = (
            subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0].strip()
        )
    except (OSError, subprocess.SubprocessError) as error:
        driver = f"unknown ({type(error).__name__})"
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }


def make_row(
    op: str, cell: Cell, unit: str, contenders: Iterable[Contender], value: Callable[[Contender], float]
) -> Row:
    row: Row = {"op": op, "recipe": None, **cell.as_row(), "unit": unit, "value": {}, "spread": {}, "errors": {}}
    for contender in contenders:
        if contender.error is not None or not contender.times_ms:
            row["errors"][contender.name] = contender.error or "not measured"
        else:
            row["value"][contender.name] = float(f"{value(contender):.5g}")
            row["spread"][contender.name] = round(contender.spread, 4)
    return row


def build_contenders(peers: Sequence[Peer], cell: Cell, tensors: tuple[torch.Tensor, ...]) -> list[Contender]:
    """One a peer, with its call or the reason why it has none. tensors: q, k, v, and dout for a backward cell."""
    contenders = []
    for peer in peers:
        contender = Contender(peer.name, lambda: None, error=peer.unavailable)
        if peer.unavailable is None:
            try:
                contender.call = peer.call(cell, *tensors)
            except Exception as error:  # a peer that refuses the shape is reported, not fatal
                contender.error = describe(error)
        contenders.append(contender)
    return contenders


def wrong_result(out: torch.Tensor, cell: Cell, tensors: tuple[torch.Tensor, ...]) -> str | None:
    """Why `out` is not attention of the inputs, or None: a kernel that computes something else must not be timed."""
    q, k, v = tensors
    rows = sampled_rows(cell.seqlen_q)
    head, batch = cell.heads - 1, cell.batch - 1
    one = (q[batch, rows, head], k[batch, :, cell.kv_heads - 1], v[batch, :, cell.kv_heads - 1], rows)
    exact, _ = attend_rows(*one, cell.seqlen_q, cell.causal)
    plain, _ = attend_rows(*one, cell.seqlen_q, cell.causal, TORCH_DTYPES[cell.dtype])
    error = (out[batch, rows, head].double() - exact).abs().max().item()
    bound = 2 * (plain.double() - exact).abs().max().item() + 1e-5
    return None if error <= bound else f"wrong result: max error {error:.2e}, allowed {bound:.2e}"


def time_forward(
    cells: Sequence[Cell],
    peers: Sequence[Peer],
    rounds: int,
    seed: int = 0,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """One row a cell, in TFLOP/s; on_row sees each as soon as it is measured."""
    rows = []
    for index, cell in enumerate(cells):
        faulthandler.dump_traceback_later(CELL_SECONDS, exit=True)
        tensors = inputs(cell, seed + index)
        contenders = build_contenders(peers, cell, tensors)
        for contender in contenders:
            if contender.name == OURS and contender.error is None:
                try:
                    with torch.no_grad():
                        contender.error = wrong_result(contender.call(), cell, tensors)  # type: ignore[arg-type]
                except Exception as error:
                    contender.error = describe(error)
        measure([c for c in contenders if c.error is None], rounds)
        row = make_row("fwd", cell, "TFLOP/s", contenders, lambda c, flops=cell.flops: tflops(flops, c.median_ms))  # type: ignore[misc]
        faulthandler.cancel_dump_traceback_later()
        rows.append(row)
        if on_row is not None:
            on_row(row)
    return rows


def _check_gradients(contender: Contender, cell: Cell, tensors: tuple[torch.Tensor, ...]) -> None:
    """Gives the contender an error where its gradients are not those of the inputs."""
    try:
        gradients: Any = contender.call()
        wrong = gradient_errors(gradients, *tensors, cell.causal).wrong
        contender.error = "wrong result: " + "; ".join(wrong) if wrong else None
    except Exception as error:
        contender.error = describe(error)


def time_backward(
    cells: Sequence[Cell],
    peers: Sequence[Peer],
    rounds: int,
    seed: int = 0,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """One row a backward cell, in TFLOP/s: autograd.grad over the graph of one forward, alike for every contender."""
    rows = []
    for index, cell in enumerate(cells):
        faulthandler.dump_traceback_later(CELL_SECONDS, exit=True)
        tensors = (*inputs(cell, seed + index), output_gradient(cell, seed + index))
        taking_part = list(peers)
        if cell == DETERMINISTIC_CELL and any(peer.name == OURS for peer in peers):
            taking_part.append(load_deterministic())
        contenders = build_contenders(taking_part, cell, tensors)
        for contender in contenders:
            if contender.name in (OURS, DETERMINISTIC) and contender.error is None:
                _check_gradients(contender, cell, tensors)
        torch.cuda.empty_cache()  # gives back the score matrices of the check: up to 15 GB
        measure([c for c in contenders if c.error is None], rounds)
        row = make_row("bwd", cell, "TFLOP/s", contenders, lambda c, flops=cell.flops: tflops(flops, c.median_ms))  # type: ignore[misc]
        faulthandler.cancel_dump_traceback_later()
        rows.append(row)
        del contenders  # they hold this cell's graphs
        if on_row is not None:
            on_row(row)
    return rows


def _host_microseconds(call: Callable[[], object]) -> float:
    """Time the host spends on a call, over a thousand calls that nothing waits for."""
    elapsed = 0.0
    for _ in range(HOST_BATCHES):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(HOST_BATCH):
            call()
        elapsed += time.perf_counter() - begin
    torch.cuda.synchronize()
    return elapsed * 1e6 / (HOST_BATCHES * HOST_BATCH)


def time_host(peers: Sequence[Peer], rounds: int = 5, seed: int = 0) -> list[Row]:
    """Host cost of a no-grad call at batch 1, 512 tokens, 16 heads of 128: microseconds, smaller is better."""
    rows = []
    for causal in (False, True):
        cell = Cell("bf16", 128, 128, causal, 1, 16, 16, 512, 512)
        tensors = inputs(cell, seed)
        # SDPA as users call it: backend selection belongs to its cost, a context manager around it would not.
        contenders = build_contenders([p for p in peers if p.name not in ("cudnn", "sdpa")], cell, tensors)
        qt, kt, vt = (t.transpose(1, 2) for t in tensors)
        contenders.append(
            Contender("sdpa", lambda a=qt, b=kt, c=vt, m=causal: scaled_dot_product_attention(a, b, c, is_causal=m))  # type: ignore[misc]
        )
        faulthandler.dump_traceback_later(CELL_SECONDS, exit=True)
        gc.disable()  # a collection in one contender's thousand calls would be charged to it
        with torch.no_grad():
            for turn in range(rounds + 1):
                for contender in contenders:
                    if contender.error is not None:
                        continue
                    try:
                        microseconds = _host_microseconds(contender.call)
                    except Exception as error:
                        contender.error = describe(error)
                        continue
                    if turn > 0:  # the first round warms up
                        contender.times_ms.append(microseconds / 1e3)
        gc.enable()
        faulthandler.cancel_dump_traceback_later()
        rows.append(make_row("host", cell, "us", contenders, lambda c: c.median_ms * 1e3))
    return rows


def cell_of(row: Row) -> Cell:
    """The shape of a row; its op is the row's."""
    return Cell(**{name: row[name] for name in Cell.__dataclass_fields__ if name != "op"})


def best_peer(row: Row, names: Sequence[str] = ("fa3", "fa4", "cudnn", "sdpa")) -> tuple[str, float] | None:
    """The fastest peer of a row and its value."""
    values = {name: row["value"][name] for name in names if name in row["value"]}
    if not values:
        return None
    pick = min if row["unit"] == "us" else max
    name = pick(values, key=lambda n: values[n])
    return name, values[name]


def ratio(row: Row) -> float:
    """Ours against the best peer, above 1 is faster; NaN where either is missing."""
    best, ours = best_peer(row), row["value"].get(OURS)
    if best is None or not ours or not best[1]:
        return math.nan
    return best[1] / ours if row["unit"] == "us" else ours / best[1]


def table(rows: Sequence[Row]) -> str:
    """Compact text: one line a cell, one column a contender, ours over the best peer last."""
    names = list(dict.fromkeys(n for row in rows for n in (*row["value"], *row["errors"])))
    label = {id(row): f"{row['op']} {cell_of(row).name}" for row in rows}
    width = max([len(text) for text in label.values()] + [4])
    column = max([12, *(len(name) + 1 for name in names)])
    lines = ["cell".ljust(width) + "".join(n.rjust(column) for n in names) + "   ours/best  spread"]
    for row in rows:
        numbers = "".join((f"{row['value'][n]:.1f}" if n in row["value"] else "-").rjust(column) for n in names)
        best, relative = best_peer(row), ratio(row)
        verdict = f"{relative:.3f} {best[0]}" if best is not None and not math.isnan(relative) else "-"
        spread = max(row["spread"].values(), default=math.nan)
        lines.append(label[id(row)].ljust(width) + numbers + verdict.rjust(15) + f"{spread:8.1%}")
    ratios = [r for r in (ratio(row) for row in rows if row["unit"] == "TFLOP/s") if not math.isnan(r)]
    if ratios:
        lines.append(
            f"ours/best over {len(ratios)} cells: min {min(ratios):.3f}, median {statistics.median(ratios):.3f}; "
            f"{sum(r >= 1 for r in ratios)} at or above the best peer"
        )
    return "\n".join(lines)


def error_lines(rows: Sequence[Row]) -> list[str]:
    """Each distinct reason why a contender has no value, with the number of cells it concerns."""
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        for name, error in row["errors"].items():
            counts[name, error] = counts.get((name, error), 0) + 1
    return [f"{name}: {error} ({count} cells)" for (name, error), count in counts.items()]


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
