"""Accuracy rows of the backward pass: errors of dq, dk and dv against float64 autograd for every input family, beside
PyTorch autograd in the same dtype and cuDNN.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.accuracy import ACTIVATIONS, ROW_SECONDS, Attend, Problem, contenders
from benchmarks.oracle import GRADIENTS, Tensors, head_gradients
from benchmarks.peers import TORCH_DTYPES
from benchmarks.timing import describe

SEQLEN = 2048
OURS, PEERS = "flashhopper", ("cudnn",)
METRICS = ("rmse", "relative_rmse", "max_error")
Errors = dict[str, dict[str, float]]  # gradient -> metric -> value


def _problems() -> Iterator[Problem]:
    """One head each; of the real activations one kv head with its query heads."""
    from flashhopper.testing import FAMILIES, load_llm_layers, make_inputs

    for family in FAMILIES:
        for dtype in TORCH_DTYPES.values():
            for head_dim in (64, 128, 256):
                sizes = {"seqlen_q": SEQLEN, "heads": 1, "head_dim": head_dim}
                q, k, v = make_inputs(family, **sizes, dtype=dtype, device="cuda", seed=SEQLEN + head_dim)
                for causal in (False, True):
                    yield Problem(family, q, k, v, causal, head_dim**-0.5)
    if not ACTIVATIONS.is_file():
        print(f"llm: no {ACTIVATIONS.name}", flush=True)
        return
    for dtype in TORCH_DTYPES.values():
        for layer in load_llm_layers(ACTIVATIONS, dtype=dtype, device="cuda"):
            q, k, v = layer.inputs
            group = q.size(2) // k.size(2)
            one = (q[:1, :, :group], k[:1, :, :1], v[:1, :, :1])
            yield Problem("llm", *one, True, layer.softmax_scale, layer.name)


def _materialised(problem: Problem, dout: torch.Tensor, dtype: torch.dtype) -> Tensors:
    """Gradients of the problem's own shapes, computed in dtype."""
    one = (problem.q[0].transpose(0, 1), problem.k[0, :, 0], problem.v[0, :, 0], dout[0].transpose(0, 1))
    dq, dk, dv = head_gradients(*one, problem.causal, dtype, problem.scale)
    return dq.transpose(0, 1)[None], dk[None, :, None], dv[None, :, None]


def _through(attend: Attend, problem: Problem, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
        return torch.autograd.grad(attend(*leaves, problem.causal, problem.scale), leaves, dout)


def _errors(gradients: tuple[torch.Tensor, ...], reference: Tensors) -> Errors:
    from flashhopper.testing import error_metrics

    result = {}
    for name, mine, right in zip(GRADIENTS, gradients, reference, strict=True):
        metrics = error_metrics(mine, right)
        result[name] = {metric: float(getattr(metrics, metric)) for metric in METRICS}
    return result


def _row(problem: Problem, attends: dict[str, Attend]) -> dict[str, Any]:
    generator = torch.Generator(device="cuda").manual_seed(problem.q.size(3))
    shape = (*problem.q.shape[:3], problem.v.size(3))
    dout = torch.randn(shape, generator=generator, device="cuda").to(problem.q.dtype)
    reference = _materialised(problem, dout, torch.float64)
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    row: dict[str, Any] = {
        "family": problem.family,
        "op": "bwd",
        "dtype": names[problem.q.dtype],
        "recipe": None,
        "head_dim": problem.q.size(3),
        "causal": problem.causal,
        "seqlen_q": problem.q.size(1),
        "seqlen_k": problem.k.size(1),
        "plain": _errors(_materialised(problem, dout, problem.q.dtype), reference),
        "peers": {},
        "errors": {},
    }
    if problem.layer is not None:
        row["layer"] = problem.layer
    for name, attend in attends.items():
        try:
            errors = _errors(_through(attend, problem, dout), reference)
        except Exception as error:
            row["errors"][name] = describe(error)
            continue
        if name == OURS:
            row["gradients"] = errors
        else:
            row["peers"][name] = errors
    return row


def measure(rounds: int) -> list[dict[str, Any]]:
    """All rows; `rounds` is not used, errors hardly vary from run to run."""
    attends = contenders((OURS, *PEERS))
    rows = []
    for problem in _problems():
        faulthandler.dump_traceback_later(ROW_SECONDS, exit=True)
        rows.append(_row(problem, attends))
        faulthandler.cancel_dump_traceback_later()
    print(table(rows), flush=True)
    for name, error in sorted({(name, error) for row in rows for name, error in row["errors"].items()}):
        print(f"{name}: {error}")
    if not any("gradients" in row for row in rows):
        raise RuntimeError("flashhopper computed none of the rows")
    return rows


def kept(row: dict[str, Any]) -> bool:
    """Whether the 16-bit rule held for all three gradients."""
    limits = {name: 2 * row["plain"][name]["max_error"] + 1e-5 for name in GRADIENTS}
    return all(row["gradients"][name]["max_error"] <= limit for name, limit in limits.items())


def table(rows: list[dict[str, Any]]) -> str:
    """For each family and dtype: the worst relative rmse of each gradient, the worst ratio of an rmse to PyTorch's and
    to cuDNN's, and how often the 16-bit rule held."""
    columns = [*GRADIENTS, "ours/torch", "ours/cudnn", "max error rule"]
    lines = [f"{'family':10}{'dtype':6}{'rows':>5}" + "".join(f"{c:>15}" for c in columns)]
    for family, dtype in dict.fromkeys((row["family"], row["dtype"]) for row in rows):
        every = [row for row in rows if (row["family"], row["dtype"]) == (family, dtype)]
        mine = [row for row in every if "gradients" in row]
        cells = [
            f"{max((r['gradients'][n]['relative_rmse'] for r in mine), default=float('nan')):.2e}" for n in GRADIENTS
        ]
        for others in ([row["plain"] for row in mine], [row["peers"].get("cudnn") for row in mine]):
            ratios = [
                row["gradients"][name]["rmse"] / other[name]["rmse"]
                for row, other in zip(mine, others, strict=True)
                for name in GRADIENTS
                if other and other[name]["rmse"] > 0
            ]
            cells.append(f"{max(ratios):.3f}" if ratios else "-")
        cells.append(f"{sum(map(kept, mine))}/{len(every)}")
        lines.append(f"{family:10}{dtype:6}{len(every):5}" + "".join(f"{c:>15}" for c in cells))
    return "\n".join(lines)
