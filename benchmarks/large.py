"""A forward over a million tokens: time, memory beyond inputs and outputs, and sampled rows against float64."""

from __future__ import annotations

import faulthandler
import importlib
from typing import Any

import torch

from benchmarks.cells import Cell
from benchmarks.oracle import attend_rows
from benchmarks.timing import tflops

TOKENS = (1 << 18, 1 << 19, 1 << 20)  # memory must double with the tokens, not quadruple
HEADS, HEAD_DIM, ROWS = 8, 128, 32
SECONDS = 120


def _sampled_errors(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[int, float, float]:
    """Rows compared, their max error, and that of same-dtype attention on the same rows; first and last head."""
    tokens = q.size(1)
    generator = torch.Generator(device="cuda").manual_seed(1)
    inner = torch.randint(tokens, (ROWS,), generator=generator, device="cuda")
    edges = torch.tensor([0, 1, 127, 128, tokens // 2, tokens - 129, tokens - 128, tokens - 1], device="cuda")
    rows = torch.cat([edges, inner]).sort().values
    error, plain_error = 0.0, 0.0
    for head in (0, HEADS - 1):
        for part in rows.split(8):  # a few rows at a time: their float64 scores take 8 bytes a token each
            one = (q[0, part, head], k[0, :, head], v[0, :, head], part, tokens, True)
            exact, _ = attend_rows(*one)
            plain, _ = attend_rows(*one, dtype=q.dtype)
            error = max(error, (out[0, part, head].double() - exact).abs().max().item())
            plain_error = max(plain_error, (plain.double() - exact).abs().max().item())
    return 2 * rows.numel(), error, plain_error


def _one(tokens: int) -> dict[str, Any]:
    package = importlib.import_module("flashhopper")
    package.set_backend("hopper")
    cell = Cell("bf16", HEAD_DIM, HEAD_DIM, True, 1, HEADS, HEADS, tokens, tokens)
    generator = torch.Generator(device="cuda").manual_seed(tokens)
    shape = (1, tokens, HEADS, HEAD_DIM)
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=generator) for _ in range(3))
    small = tuple(x[:, :256] for x in (q, k, v))
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.no_grad():
        package.flash_attn_func(*small, causal=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start.record()
        out, lse = package.flash_attn_func(q, k, v, causal=True, return_lse=True)
        stop.record()
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    results = out.numel() * out.element_size() + lse.numel() * lse.element_size()
    rows, error, plain_error = _sampled_errors(out, q, k, v)
    milliseconds = start.elapsed_time(stop)
    return {
        **cell.as_row(),
        "op": "fwd",
        "seconds": round(milliseconds / 1e3, 4),
        "tflops": round(tflops(cell.flops, milliseconds), 1),
        "input_bytes": 3 * q.numel() * q.element_size(),
        "output_bytes": results,
        "extra_bytes": peak - before - results,
        "rows_checked": rows,
        "max_error": error,
        "allowed_error": 2 * plain_error + 1e-5,
        "unwritten": int(out.isnan().sum().item()),
    }


def measure(rounds: int) -> list[dict[str, Any]]:
    """One row a length; `rounds` is not used, one launch takes seconds."""
    results = []
    for tokens in TOKENS:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        results.append(_one(tokens))
        faulthandler.cancel_dump_traceback_later()
        print(line(results[-1]), flush=True)
        torch.cuda.empty_cache()
    return results


def line(row: dict[str, Any]) -> str:
    verdict = "ok" if row["max_error"] <= row["allowed_error"] and row["unwritten"] == 0 else "WRONG"
    return (
        f"{row['seqlen_q']} tokens causal, {row['heads']} heads, d{row['head_dim']}: {row['seconds']:.2f} s,"
        f" {row['tflops']:.0f} TFLOP/s, {row['extra_bytes'] / 2**20:.1f} MiB beyond inputs and outputs;"
        f" {row['rows_checked']} rows: max error {row['max_error']:.2e} ({row['allowed_error']:.2e} allowed), {verdict}"
    )
