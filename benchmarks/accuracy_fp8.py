"""Accuracy rows of the 8-bit recipes (accuracy:fp8): kernel outputs of every family, length and head dimension against
float64, beside FA3's e4m3 and beside the ideal on the same 8-bit inputs. Before it: parts.py; after it: targets.py.

All of it is causal. A row's metrics and targets are described in targets.py.
"""

from __future__ import annotations

import faulthandler
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import targets
from benchmarks.accuracy import ACTIVATIONS, ROW_SECONDS, Problem
from benchmarks.peers_fp8 import E4M3, PROBABILITY_SCALE, first, quantize_per_head, recipes
from benchmarks.timing import describe

HEAD_DIMS = (64, 128, 256)
# (keys, queries, heads). A few rows with sharp weights carry the error of `peaky`: few queries want many heads.
SIZES = ((2048, 2048, 2), (16384, 16384, 2), (131072, 128, 16))
PAPER = {"batch": 2, "seqlen_q": 2048, "heads": 8, "head_dim": 128}  # the FlashAttention-3 paper's Table 3: no mask
PAPER_DRAWS = 3
CHUNK_SCORES = 1 << 26  # float64 scores held at once: half a gigabyte
_Tensor = torch.Tensor


@dataclass
class Attended:
    """One contender's output, and what its 8-bit inputs stand for: inputs() is float64 q, k, v; v_mean the mean that v
    was centred by, (batch, kv_heads, head_dim_v)."""

    out: _Tensor
    inputs: Callable[[], tuple[_Tensor, _Tensor, _Tensor]]
    v_mean: _Tensor | None = None


Attend = Callable[[Problem], Attended]


def attend64(
    q: _Tensor, k: _Tensor, v: _Tensor, causal: bool, scale: float, v_mean: _Tensor | None = None, ideal: bool = False
) -> tuple[_Tensor, _Tensor | None]:
    """float64 attention, bottom-right causal, every query sees a key; a block of queries at a time.

    Args:
        q: (batch, seqlen_q, heads, head_dim); k, v: (batch, seqlen_k, kv_heads, ...), seqlen_q <= seqlen_k if causal.
        ideal: also with probabilities rounded to e4m3, times 2^8, the largest of a row 1, and centred values.

    Returns:
        out, and the ideal's (None unless asked for), (batch, seqlen_q, heads, head_dim_v).
    """
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, group = k.size(1), heads // k.size(2)
    out = torch.empty(batch, seqlen_q, heads, v.size(3), dtype=torch.float64, device=q.device)
    rounded = torch.empty_like(out) if ideal else None
    step = max(1, CHUNK_SCORES // seqlen_k)
    for b, h in ((b, h) for b in range(batch) for h in range(heads)):
        queries, keys, values = q[b, :, h].double(), k[b, :, h // group].double(), v[b, :, h // group].double()
        mean = 0.0 if v_mean is None else v_mean[b, h // group].double()
        for begin in range(0, seqlen_q, step):
            end = min(seqlen_q, begin + step)
            seen = end + seqlen_k - seqlen_q if causal else seqlen_k
            scores = queries[begin:end] @ keys[:seen].T * scale
            if causal:
                last = torch.arange(begin, end, device=q.device)[:, None] + seqlen_k - seqlen_q
                scores.masked_fill_(torch.arange(seen, device=q.device)[None] > last, -torch.inf)
            weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
            total = weights.sum(-1, keepdim=True)
            out[b, begin:end, h] = weights @ values[:seen] / total
            if rounded is not None:
                eight = (weights * PROBABILITY_SCALE).float().to(E4M3).float().double()
                rounded[b, begin:end, h] = eight @ (values[:seen] - mean) / (total * PROBABILITY_SCALE) + mean
    return out, rounded


def _flashhopper(recipe: Any, backend: str) -> Attend:
    package = importlib.import_module("flashhopper")
    operators = importlib.import_module("flashhopper.fp8.operators")

    def attend(problem: Problem) -> Attended:
        qkv = package.quantize_fp8(problem.q, problem.k, problem.v, recipe)
        out, _ = operators.run_attention(qkv, problem.scale, -1, 0 if problem.causal else -1, 0, backend)
        mean = None if qkv.v_mean is None else qkv.v_mean[..., : qkv.head_dim_v]
        return Attended(out, qkv.to_reference, mean)

    return attend


def _fa3() -> Attend:
    function = importlib.import_module("fa3_fwd_interface").flash_attn_func

    def attend(problem: Problem) -> Attended:
        kv_heads, group = problem.k.size(2), problem.q.size(2) // problem.k.size(2)
        pairs = [quantize_per_head(x, kv_heads) for x in (problem.q, problem.k, problem.v)]
        (q8, q_descale), (k8, k_descale), (v8, v_descale) = pairs
        scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
        out = function(q8, k8, v8, softmax_scale=problem.scale, causal=problem.causal, **scales)

        def inputs() -> tuple[_Tensor, _Tensor, _Tensor]:
            q64 = q8.float().double() * q_descale.repeat_interleave(group, 1)[:, None, :, None]
            k64, v64 = (x.float().double() * scale[:, None, :, None] for x, scale in pairs[1:])
            return q64, k64, v64

        return Attended(first(out), inputs)

    return attend


def contenders(backend: str = "hopper") -> dict[str, Attend]:
    """FA3 and the named recipes on `backend` alone, which is set; what does not import is said to be missing."""
    importlib.import_module("flashhopper").set_backend(backend)
    found = {name: _flashhopper(recipe, backend) for name, recipe in recipes().items()}
    try:
        found[targets.FA3] = _fa3()
    except Exception as error:
        print(f"{targets.FA3}: UNAVAILABLE {describe(error)}", flush=True)
    return found


def problems(
    tensors: Path | None = None,
    sizes: Iterable[tuple[int, int, int]] = SIZES,
    head_dims: Iterable[int] = HEAD_DIMS,
    device: str = "cuda",
) -> Iterator[Problem]:
    """Real layers of tests/data, of `tensors` if given, then the families. No layer has a window: the kernels have
    none, so all are plain causal, for every contender."""
    from flashhopper.testing import FAMILIES, load_llm_layers, make_inputs

    for path in (ACTIVATIONS, tensors):
        if path is None or not path.is_file():
            if path is not None:
                print(f"llm: no {path.name}", flush=True)
            continue
        for layer in load_llm_layers(path, dtype=torch.bfloat16, device=device):
            yield Problem("llm", *layer.inputs, True, layer.softmax_scale, layer.name)
    for family in FAMILIES:
        for keys, queries, heads in sizes:
            for head_dim in head_dims:
                shape: dict[str, Any] = {"seqlen_q": queries, "seqlen_k": keys, "heads": heads, "head_dim": head_dim}
                q, k, v = make_inputs(family, **shape, device=device, seed=keys + head_dim)
                yield Problem(family, q, k, v, True, head_dim**-0.5)


def paper_problems(shape: dict[str, int] | None = None, device: str = "cuda") -> Iterator[Problem]:
    """The inputs of the paper's test, several draws."""
    from flashhopper.testing import make_inputs

    shape = PAPER if shape is None else shape
    for seed in range(PAPER_DRAWS):
        q, k, v = make_inputs("outlier", **shape, device=device, seed=seed)  # type: ignore[arg-type]
        yield Problem("outlier", q, k, v, False, shape["head_dim"] ** -0.5)


def _add(row: dict[str, Any], name: str, attended: Attended, problem: Problem, reference: _Tensor) -> None:
    """Metrics of the output; then, by themselves, those of its inputs, whose failure does not cost the first."""
    from flashhopper.testing import error_metrics

    row["results"][name] = found = error_metrics(attended.out, reference)._asdict()
    exact, ideal = attend64(*attended.inputs(), problem.causal, problem.scale, attended.v_mean, ideal=True)
    assert ideal is not None
    found["inputs_relative_rmse"] = error_metrics(exact, reference).relative_rmse
    found["ideal_relative_rmse"] = error_metrics(ideal.to(attended.out.dtype), reference).relative_rmse


def row_of(problem: Problem, attends: dict[str, Attend], test: str | None = None) -> dict[str, Any]:
    """Every contender on one problem; what raises becomes an entry of `errors`."""
    batch, seqlen_q, heads, head_dim = problem.q.shape
    row: dict[str, Any] = {
        "family": problem.family,
        "op": "fwd_fp8",
        "dtype": "e4m3",
        "test": test,
        "layer": problem.layer,
        "head_dim": head_dim,
        "causal": problem.causal,
        "batch": batch,
        "heads": heads,
        "kv_heads": problem.k.size(2),
        "seqlen_q": seqlen_q,
        "seqlen_k": problem.k.size(1),
        "results": {},
        "errors": {},
    }
    with torch.no_grad():
        try:
            reference, _ = attend64(problem.q, problem.k, problem.v, problem.causal, problem.scale)
        except Exception as error:
            row["errors"]["reference"] = describe(error)
            return row
        for name, attend in attends.items():
            try:
                _add(row, name, attend(problem), problem, reference)
            except Exception as error:
                row["errors"][name] = describe(error)
    verdicts = {name: targets.judge(row, name) for name in targets.RECIPES}
    row["targets"] = {
        name: {"value": float(f"{one.value:.4g}"), "limit": one.limit, "met": one.met}
        for name, one in verdicts.items()
        if one is not None
    }
    return row


def measure(rounds: int, tensors: Path | None = None) -> list[dict[str, Any]]:
    """All rows; `rounds` is not used, errors do not vary from run to run.

    Args:
        tensors: a safetensors file of further real activations (flashhopper.testing.load_llm_layers).
    """
    attends = contenders()
    rows = []
    for group, test in ((problems(tensors), None), (paper_problems(), targets.PAPER_TEST)):
        for problem in group:
            faulthandler.dump_traceback_later(ROW_SECONDS, exit=True)
            rows.append(row_of(problem, attends, test))
            faulthandler.cancel_dump_traceback_later()
    for name, error in sorted({(name, error) for row in rows for name, error in row["errors"].items()}):
        print(f"{name}: {error}", flush=True)
    if not any(name in row["results"] for row in rows for name in targets.RECIPES):
        raise RuntimeError("flashhopper computed none of the rows")
    return rows
