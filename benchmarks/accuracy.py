"""Accuracy rows of the record: error against float64 for every input family, flashhopper beside its peers."""

from __future__ import annotations

import faulthandler
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.digest import ROOT
from benchmarks.oracle import attend_rows
from benchmarks.peers import TORCH_DTYPES
from benchmarks.timing import describe

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], torch.Tensor]
HEADS = 4
# (keys, queries): all queries where the float64 scores fit easily, a block of them at long context.
SIZES = ((2048, 2048), (16384, 512), (131072, 128))
ACTIVATIONS = ROOT / "tests" / "data" / "gemma3_270m_qkv_slice.safetensors"
ROW_SECONDS = 60


@dataclass
class Problem:
    """One set of inputs, (1, seqlen, heads, head_dim) each."""

    family: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool
    scale: float
    layer: str | None = None


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    if causal and q.size(1) != k.size(1):
        raise ValueError("top-left aligned")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        gqa = q.size(2) != k.size(2)
        return scaled_dot_product_attention(*heads_first, is_causal=causal, scale=scale, enable_gqa=gqa).transpose(1, 2)


def _function(module: str) -> Attend:
    function = importlib.import_module(module).flash_attn_func

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
        out = function(q, k, v, softmax_scale=scale, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return attend


LOADERS: dict[str, Callable[[], Attend]] = {
    "flashhopper": lambda: _function("flashhopper"),
    "cudnn": lambda: _cudnn,
    "fa3": lambda: _function("fa3_fwd_interface"),
}


def contenders(names: Sequence[str] = tuple(LOADERS)) -> dict[str, Attend]:
    """flashhopper on its kernels, and the peers of these names that import."""
    importlib.import_module("flashhopper").set_backend("hopper")
    found = {}
    for name in names:
        try:
            found[name] = LOADERS[name]()
        except Exception as error:  # a peer that does not import is missing from the rows, and said to be
            print(f"{name}: UNAVAILABLE {describe(error)}", flush=True)
    return found


def _problems() -> Iterator[Problem]:
    from flashhopper.testing import FAMILIES, load_llm_layers, make_inputs

    for family in FAMILIES:
        for dtype in TORCH_DTYPES.values():
            for head_dim in (64, 128, 256):
                for seqlen_k, seqlen_q in SIZES:
                    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads": HEADS, "head_dim": head_dim}
                    q, k, v = make_inputs(family, **sizes, dtype=dtype, device="cuda", seed=seqlen_k + head_dim)
                    for causal in (False, True):
                        yield Problem(family, q, k, v, causal, head_dim**-0.5)
    if not ACTIVATIONS.is_file():
        print(f"llm: no {Path(ACTIVATIONS).name}", flush=True)
        return
    for dtype in TORCH_DTYPES.values():
        for layer in load_llm_layers(ACTIVATIONS, dtype=dtype, device="cuda"):
            yield Problem("llm", *layer.inputs, True, layer.softmax_scale, layer.name)


def exact(problem: Problem, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Materialised attention of the whole problem in `dtype`, one head at a time."""
    q, k, v = problem.q, problem.k, problem.v
    rows = torch.arange(q.size(1), device=q.device)
    group = q.size(2) // k.size(2)
    batches = []
    for b in range(q.size(0)):
        heads = [
            attend_rows(
                q[b, :, h],
                k[b, :, h // group],
                v[b, :, h // group],
                rows,
                q.size(1),
                problem.causal,
                dtype,
                problem.scale,
            )[0]
            for h in range(q.size(2))
        ]
        batches.append(torch.stack(heads, 1))
    return torch.stack(batches)


def _row(problem: Problem, attends: dict[str, Attend]) -> dict[str, Any]:
    from flashhopper.testing import error_metrics

    reference = exact(problem)
    plain = error_metrics(exact(problem, problem.q.dtype), reference)
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    row: dict[str, Any] = {
        "family": problem.family,
        "op": "fwd",
        "dtype": names[problem.q.dtype],
        "recipe": None,
        "head_dim": problem.q.size(3),
        "causal": problem.causal,
        "seqlen_q": problem.q.size(1),
        "seqlen_k": problem.k.size(1),
        "inputs_relative_rmse": 0.0,  # 16-bit inputs are the problem itself: nothing was quantised
        "plain": {"relative_rmse": plain.relative_rmse, "max_error": plain.max_error},
        "peers": {},
        "errors": {},
    }
    if problem.layer is not None:
        row["layer"] = problem.layer
    for name, attend in attends.items():
        try:
            with torch.no_grad():
                metrics = error_metrics(
                    attend(problem.q, problem.k, problem.v, problem.causal, problem.scale), reference
                )
        except Exception as error:
            row["errors"][name] = describe(error)
            continue
        if name == "flashhopper":
            row.update(rmse=metrics.rmse, relative_rmse=metrics.relative_rmse, max_error=metrics.max_error)
        else:
            row["peers"][name] = metrics.relative_rmse
    return row


def measure(rounds: int) -> list[dict[str, Any]]:
    """All rows; `rounds` is not used, errors do not vary from run to run."""
    attends = contenders()
    rows = []
    for problem in _problems():
        faulthandler.dump_traceback_later(ROW_SECONDS, exit=True)
        rows.append(_row(problem, attends))
        faulthandler.cancel_dump_traceback_later()
    print(table(rows), flush=True)
    for name, error in sorted({(name, error) for row in rows for name, error in row["errors"].items()}):
        print(f"{name}: {error}")
    if not any("relative_rmse" in row for row in rows):
        raise RuntimeError("flashhopper computed none of the rows")
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """For each family and dtype the worst relative rmse, the worst ratio to FA3, and how often the 16-bit rule held."""
    lines = [
        f"{'family':10}{'dtype':6}{'rows':>5}{'rel. rmse':>11}{'ours/fa3':>10}{'ours/cudnn':>11}{'max error rule':>16}"
    ]
    rows = [row for row in rows if row["op"] == "fwd"]
    for family, dtype in dict.fromkeys((row["family"], row["dtype"]) for row in rows):
        mine = [r for r in rows if (r["family"], r["dtype"]) == (family, dtype) and "relative_rmse" in r]
        total = sum((r["family"], r["dtype"]) == (family, dtype) for r in rows)
        kept = sum(r["max_error"] <= 2 * r["plain"]["max_error"] + 1e-5 for r in mine)
        worst = max((r["relative_rmse"] for r in mine), default=float("nan"))
        line = f"{family:10}{dtype:6}{total:5}{worst:11.2e}"
        for peer, width in (("fa3", 10), ("cudnn", 11)):
            ratios = [r["relative_rmse"] / r["peers"][peer] for r in mine if r["peers"].get(peer)]
            line += f"{max(ratios):{width}.3f}" if ratios else "-".rjust(width)
        lines.append(line + f"{kept}/{total}".rjust(16))
    return "\n".join(lines)
