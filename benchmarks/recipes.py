"""Errors of the 8-bit recipes, emulated: runs the families and writes the tables of docs/numerics.md.

    python -m benchmarks.recipes                    prints the tables (about ten minutes on two cores)
    python -m benchmarks.recipes --write            also puts them between the markers of docs/numerics.md
    python -m benchmarks.recipes --tensors FILE     real activations from FILE in place of tests/data; --windows says
                                                    which of its layers see how many keys, as JSON

Before it: nothing; after it: flashhopper.fp8 (quantize, emulate), flashhopper.report.contenders (who is compared, and
targets), flashhopper.testing.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from benchmarks.digest import ROOT
from flashhopper import flash_attn_func
from flashhopper.fp8 import Fp8Recipe, emulate
from flashhopper.fp8.quantize import quantize
from flashhopper.report.contenders import FA3, NAMED, TARGETS, VMEAN_TARGET
from flashhopper.testing import FAMILIES, Inputs, error_metrics, load_llm_layers, make_inputs

PAGE = ROOT / "docs/numerics.md"
MARKED = re.compile(r"(<!-- recipes:begin -->\n).*?(<!-- recipes:end -->)", re.DOTALL)
SLICE = ROOT / "tests/data/gemma3_270m_qkv_slice.safetensors"
HEAD_DIMS = (64, 128, 256)
# seqlen_k -> queries (the last ones), heads, KV heads
SIZES = {2048: (2048, 4, 4), 16384: (256, 16, 4), 131072: (128, 8, 2)}


class Case(NamedTuple):
    family: str
    name: str
    inputs: Inputs
    options: dict[str, object]


def cases(tensors: str, windows: dict[str, int] | None) -> Iterator[Case]:
    for layer in load_llm_layers(tensors, windows=windows):
        options = {"softmax_scale": layer.softmax_scale, "window_size": layer.window_size, "causal": True}
        yield Case("llm", f"{layer.name}, {layer.inputs.q.shape[1]} tokens", layer.inputs, options)
    for family in FAMILIES:
        for seqlen, (queries, heads, kv_heads) in SIZES.items():
            for head_dim in HEAD_DIMS:
                sizes = {"seqlen_q": queries, "seqlen_k": seqlen, "heads": heads, "kv_heads": kv_heads}
                inputs = make_inputs(family, head_dim=head_dim, seed=1, **sizes)
                yield Case(family, f"{seqlen}, d{head_dim}", inputs, {"causal": True})


def _reference(case: Case) -> torch.Tensor:
    """The tiled engine in float64: the oracle's scores of 128k keys would take gigabytes."""
    out = flash_attn_func(*(x.double() for x in case.inputs), **case.options)  # type: ignore[arg-type]
    assert isinstance(out, torch.Tensor)
    return out


def errors(case: Case, recipes: dict[str, Fp8Recipe], **numerics: object) -> dict[str, float]:
    """Relative rmse of each recipe."""
    ref = _reference(case)
    found = {}
    for name, recipe in recipes.items():
        out, _ = emulate.attention(quantize(*case.inputs, recipe), **case.options, **numerics)  # type: ignore[arg-type]
        found[name] = error_metrics(out, ref).relative_rmse
    return found


def _grid(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def _row(family: str, name: str, found: dict[str, float]) -> list[str]:
    """Errors beside their ratios to FA3's; bold where a target is missed."""
    row = [family, name, f"{found['fa3']:.2e}"]
    for recipe in NAMED:
        ratio, target = found[recipe] / found["fa3"], TARGETS.get(family, {}).get(recipe)
        is_vmean = family == "vmean"
        missed = found[recipe] > VMEAN_TARGET if is_vmean else target is not None and ratio > target
        text = f"{found[recipe]:.2e}" + ("" if is_vmean else f" ({ratio:.2f})")
        row.append(f"**{text}**" if missed else text)
    return row


def main_table(tensors: str, windows: dict[str, int] | None) -> str:
    rows = []
    for case in cases(tensors, windows):
        rows.append(_row(case.family, case.name, errors(case, {"fa3": FA3, **NAMED})))
        print(rows[-1], flush=True)
    return _grid(["family", "input", "FA3's scales", *NAMED], rows)


def ablation_table(tensors: str, windows: dict[str, int] | None) -> str:
    """What each building block of accurate() is worth."""
    best = Fp8Recipe.accurate()
    variants = {
        "accurate()": best,
        "no rotation": replace(best, rotate=False),
        "no smoothing": replace(best, smooth_k=False),
        "values not centred": replace(best, center_v=False),
        "e4m3 QK^T": replace(best, qk_format="e4m3"),
        "q_block 128": replace(best, q_block=128),
        "one scale a head": replace(best, q_block=0, k_block=0, v_block=0),
        "a scale a key": replace(best, k_block=1),
    }
    columns: dict[str, dict[str, float]] = {}
    for case in cases(tensors, windows):
        if case.family == "llm" or case.name == "2048, d128":
            label = case.name.split(",")[0] if case.family == "llm" else case.family
            columns[label] = errors(case, variants)
            sums = errors(case, {"x": best}, row_sum="exact")
            columns[label]["row sums of P before rounding"] = sums["x"]
    names = [*variants, "row sums of P before rounding"]
    rows = [[name, *(f"{column[name]:.2e}" for column in columns.values())] for name in names]
    return _grid(["variant", *columns], rows)


def accumulation_table() -> str:
    """vmean, no mask, in the model of Hopper's accumulator."""
    bare = replace(NAMED["paper"], center_v=False)
    rows = []
    for seqlen in SIZES:
        inputs = make_inputs("vmean", seqlen_q=64, seqlen_k=seqlen, heads=1, head_dim=64, seed=1)
        recipes = {"FA3's, one level": FA3, "paper() not centred, one level": replace(bare, two_level=False)}
        recipes |= {"paper() not centred, two levels": bare} | {f"{name}()": recipe for name, recipe in NAMED.items()}
        found = errors(Case("vmean", str(seqlen), inputs, {}), recipes, accumulation="14bit")
        rows.append([str(seqlen), *(f"{x:.1e}" for x in found.values())])
        print(rows[-1], flush=True)
    return _grid(["keys", *recipes], rows)


def paper_table() -> str:
    """The paper's Table 3: absolute rmse, B2 H8 S2048 D128, outlier inputs, no mask, three draws."""
    rows = []
    for seed in range(3):
        inputs = make_inputs("outlier", batch=2, seqlen_q=2048, heads=8, head_dim=128, seed=seed)
        ref = _reference(Case("outlier", "", inputs, {}))
        rows.append([str(seed)])
        for recipe in (FA3, *NAMED.values()):
            out, _ = emulate.attention(quantize(*inputs, recipe))
            rows[-1].append(f"{error_metrics(out, ref).rmse:.1e}")
    return _grid(["draw", "FA3's scales", *(f"{name}()" for name in NAMED)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipes", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/numerics.md")
    parser.add_argument("--tensors", default=str(SLICE), help="safetensors file of NAME.q, NAME.k, NAME.v")
    parser.add_argument("--windows", type=json.loads, default=None, help="layer -> keys, as JSON; default the file's")
    options = parser.parse_args()
    real = (options.tensors, options.windows)
    parts = {
        "Relative rmse, and over that of FA3's scales; bold misses its target:": main_table(
            options.tensors, options.windows
        ),
        "Without one of its building blocks, relative rmse at 2048 tokens, head_dim 128, and on real layers:": (
            ablation_table(*real)
        ),
        "`vmean` without a mask, head_dim 64, sums of 14 bits as on Hopper:": accumulation_table(),
        "Absolute rmse of the paper's test (its Table 3: `outlier`, batch 2, 8 heads, 2048 tokens, head_dim 128):": (
            paper_table()
        ),
    }
    text = "\n\n".join(f"{title}\n\n{table}" for title, table in parts.items()) + "\n"
    print(text)
    if options.write:
        PAGE.write_text(MARKED.sub(lambda match: match[1] + text + match[2], PAGE.read_text()))


if __name__ == "__main__":
    main()
