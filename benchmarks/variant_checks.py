"""Correctness of one build of the library on benchmark cells, over the C ABI: what `benchmarks.variants` asks first."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from benchmarks.abi import Library, UnsupportedError
from benchmarks.cells import Cell
from benchmarks.oracle import GRADIENTS, attend, attend_rows, gradient_errors, sampled_rows
from benchmarks.peers import TORCH_DTYPES, inputs, output_gradient
from benchmarks.timing import describe

LSE_TOLERANCE = 1e-3


def check_forward(library: Library, cell: Cell, seed: int) -> dict[str, Any]:
    """Errors of one build on one cell: sampled rows of the first and last head against float64, NaN, repeatability."""
    q, k, v = inputs(cell, seed)
    out, lse = library.forward(q, k, v, causal=cell.causal)
    again, _ = library.forward(q, k, v, causal=cell.causal)
    torch.cuda.synchronize()
    rows = sampled_rows(cell.seqlen_q)
    worst, yardstick, lse_error, where = 0.0, 0.0, 0.0, ""
    for batch, head in {(0, 0), (cell.batch - 1, cell.heads - 1)}:
        kv_head = head * cell.kv_heads // cell.heads
        one = (q[batch, rows, head], k[batch, :, kv_head], v[batch, :, kv_head], rows, cell.seqlen_q, cell.causal)
        exact, exact_lse = attend_rows(*one, torch.float64)
        plain, _ = attend_rows(*one, TORCH_DTYPES[cell.dtype])
        error, index = (out[batch, rows, head].double() - exact).abs().nan_to_num(math.inf).amax(1).max(0)
        if error.item() > worst:
            worst, where = error.item(), f"row {rows[index].item()} of head {head}, batch {batch}"
        yardstick = max(yardstick, (plain.double() - exact).abs().max().item())
        mine = lse[batch, head, rows].double()
        difference = torch.where(mine == exact_lse, 0.0, mine - exact_lse)  # -inf on both sides is equal
        lse_error = max(lse_error, difference.abs().max().item())
    unwritten = int(out.isnan().sum().item() + lse.isnan().sum().item())
    repeatable = bool(torch.equal(out, again))
    ok = unwritten == 0 and worst <= 2 * yardstick + 1e-5 and lse_error < LSE_TOLERANCE and repeatable
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    text = f"max error {worst:.2e} (plain {yardstick:.2e}), lse {lse_error:.1e}, worst {where}"
    return {
        "ok": ok,
        "text": text,
        "nan": unwritten,
        "repeatable": repeatable,
        "plan": library.plan(library.params(q, k, v, out, lse, causal=cell.causal), sms),
    }


def forward_results(
    library: Library, cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """out and lse that the backward of a cell starts from, and who made them: a build under development may hold no
    forward kernel, or no right one yet."""
    try:
        return (*library.forward(q, k, v, causal=cell.causal), "its own forward")
    except UnsupportedError:
        return (*attend(q, k, v, cell.causal), "torch's forward")


def check_backward(library: Library, cell: Cell, seed: int, deterministic: bool) -> dict[str, Any]:
    """All rows of dq, dk and dv of the first and the last kv head against float64 autograd, NaN, repeatability."""
    q, k, v = inputs(cell, seed)
    dout = output_gradient(cell, seed)
    out, lse, source = forward_results(library, cell, q, k, v)
    calls = [
        library.prepare_backward(dout, q, k, v, out, lse, causal=cell.causal, deterministic=deterministic)
        for _ in range(2)
    ]
    for call in calls:
        library.launch_backward(call)
    torch.cuda.synchronize()
    errors = gradient_errors(calls[0].gradients, q, k, v, dout, cell.causal)
    same = [bool(torch.equal(a, b)) for a, b in zip(calls[0].gradients, calls[1].gradients, strict=True)]
    numbers = ", ".join(f"{n} {errors.error[n]:.2e} (plain {errors.plain[n]:.2e})" for n in GRADIENTS)
    differing = " ".join(name for name, equal in zip(GRADIENTS, same, strict=True) if not equal)
    return {
        # Sums by atomic additions differ from run to run, and may.
        "ok": not errors.wrong and (all(same) or not deterministic),
        "text": f"max error {numbers}; from {source}" + (f"; runs differ in {differing}" if differing else ""),
        "nan": errors.nan,
        "repeatable": all(same),
        "plan": calls[0].plan,
    }


def check_build(path: str, cells: list[Cell], seed: int, deterministic: bool = False) -> dict[str, Any]:
    """All cells of one build; an exception on one cell is that cell's result."""
    library = Library(path)
    report: dict[str, Any] = {"version": library.version, "cells": {}}
    for index, cell in enumerate(cells):
        print(f"checking {cell.name}", file=sys.stderr, flush=True)
        try:
            if cell.op == "bwd":
                entry = check_backward(library, cell, seed + index, deterministic)
            else:
                entry = check_forward(library, cell, seed + index)
        except Exception as error:
            entry = {"ok": False, "error": describe(error)}
        report["cells"][cell.name] = entry
    return report


def lines(label: str, report: dict[str, Any]) -> list[str]:
    """What a reader of the terminal sees of one build's checks."""
    if "failed" in report:
        return [f"{label}: FAILED {report['failed']}"]
    text = []
    for name, entry in report["cells"].items():
        if "error" in entry:
            text.append(f"{label} {name}: FAILED {entry['error']}")
            continue
        plan = entry["plan"]
        text.append(
            f"{label} {name}: {'ok' if entry['ok'] else 'WRONG'} {entry['text']}; nan {entry['nan']},"
            f" repeatable {entry['repeatable']}; {plan['config']}, smem {plan['smem_bytes']}, grid {plan['grid']},"
            f" workspace {plan['workspace_bytes'] / 2**20:.1f} MiB"
        )
    return text
