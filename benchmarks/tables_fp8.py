"""The 8-bit blocks of the generated pages. Standard library only. Before it: tables.py, parts.py; after it: targets.py.

Each is empty where its part is not measured, so that a page need not say so.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import targets
from benchmarks.markdown import grid

Record = dict[str, Any]
Rows = list[dict[str, Any]]
ALONE = {"flashhopper_e4m3": "e4m3()", "flashhopper_accurate": "accurate()"}
TITLES = {
    **ALONE,
    "flashhopper_e4m3_call": "e4m3(), whole call",
    "flashhopper_accurate_call": "accurate(), whole call",
    "flashhopper_bf16": "bf16",
    "fa3": "FA3 e4m3",
    "cudnn": "cuDNN e4m3",
}
QUANTISED = {"plain": "casts alone", **{name: f"{name}()" for name in targets.RECIPES}}


def _ratio(row: dict[str, Any], name: str, other: str) -> float | None:
    one, two = row["value"].get(name), row["value"].get(other)
    return one / two if one and two else None


def _text(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _speed_rows(record: Record) -> Rows:
    return [row for row in record["bench"] if row["op"] == "fwd_fp8"]


def speeds(record: Record) -> str:
    """Rates, and those of the recipes over FA3's and over the 16-bit forward's."""
    rows = _speed_rows(record)
    if not rows:
        return ""
    names = [name for name in TITLES if any(name in row["value"] for row in rows)]
    ratios = [(name, other) for other in ("fa3", "flashhopper_bf16") for name in ALONE]
    body = []
    for row in rows:
        numbers = [_text(row["value"].get(name), ".0f") for name in names]
        over = [_text(_ratio(row, *pair)) for pair in ratios]
        mask = "causal" if row["causal"] else "full"
        body.append([str(row["head_dim"]), mask, str(row["seqlen_q"]), *numbers, *over])
    header = ["head_dim", "mask", "seqlen", *(TITLES[name] for name in names)]
    header += [f"{TITLES[name]} / {TITLES[other]}" for name, other in ratios]
    title = (
        "Forward, 8 bits, TFLOP/s of the attention (16k tokens, heads x head_dim = 2048). Inputs are 8-bit already, "
        "but in a whole call, which quantises 16-bit ones; outputs are bf16, but cuDNN's e4m3; FA3 has a scale a head, "
        "cuDNN a scale a tensor:\n\n"
    )
    return title + grid(header, body)


def summary(record: Record) -> list[str]:
    """A line for each recipe, against FA3."""
    lines = []
    for name, title in ALONE.items():
        ratios = [r for r in (_ratio(row, name, "fa3") for row in _speed_rows(record)) if r]
        if ratios:
            lines.append(
                f"8-bit forward, Fp8Recipe.{title}, against FA3's e4m3 in {len(ratios)} cells: {min(ratios):.2f} to "
                f"{max(ratios):.2f} times its speed, median {statistics.median(ratios):.2f}."
            )
    return lines


def quantiser(record: Record) -> str:
    rows = [row for row in record["bench"] if row["op"] == "quantize" and row["share"]]
    if not rows:
        return ""
    names = [name for name in QUANTISED if any(name in row["share"] for row in rows)]
    body = []
    for row in rows:
        shares = [f"{row['share'][name]:.0%}" if name in row["share"] else "-" for name in names]
        body.append([str(row["head_dim"]), f"{row['value']['copy']:.2f}", *shares])
    header = ["head_dim", "copy, TB/s", *(QUANTISED[name] for name in names)]
    return "Quantiser, bytes that must move a second, in percent of a device copy's:\n\n" + grid(header, body)


def _errors(rows: Rows) -> str:
    """One line an input: FA3's error and each recipe's with its ratio, the worst of the head dimensions."""
    groups: dict[tuple[str, str, int], Rows] = {}
    for family, mine in targets.families(rows).items():
        for row in mine:
            groups.setdefault((family, row.get("layer") or "", row["seqlen_k"]), []).append(row)
    body = []
    for (family, layer, keys), mine in groups.items():
        theirs = [row["results"][targets.FA3]["relative_rmse"] for row in mine if targets.FA3 in row["results"]]
        cells = [_text(max(theirs, default=None), ".1e")]
        for recipe in targets.RECIPES:
            found = [row["results"][recipe]["relative_rmse"] for row in mine if recipe in row["results"]]
            ratios = [r for r in (targets.fa3_ratio(row, recipe) for row in mine) if r is not None]
            verdicts = [one for one in (targets.judge(row, recipe) for row in mine) if one is not None]
            text = _text(max(found, default=None), ".1e") + (f" ({max(ratios):.2f})" if ratios else "")
            cells.append(f"**{text}**" if any(not one.met for one in verdicts) else text)
        body.append([" ".join(filter(None, (family, layer))), str(keys), *cells])
    title = (
        "8 bits, relative rmse against float64, causal, the worst of head_dim 64, 128, 256 (in brackets the worst "
        "ratio to FA3's e4m3 with a scale a head; bold misses a target):\n\n"
    )
    return title + grid(["inputs", "keys", "FA3 e4m3", *(QUANTISED[name] for name in targets.RECIPES)], body)


def _targets(rows: Rows) -> str:
    """One line a family and recipe: the target of docs/numerics.md, how often it is met, the ideal, the growth."""
    body = []
    for family, mine in targets.families(rows).items():
        for recipe in targets.RECIPES:
            verdicts = [one for one in (targets.judge(row, recipe) for row in mine) if one is not None]
            ideals = [r for r in (targets.ideal_ratio(row, recipe) for row in mine) if r is not None]
            if not verdicts and not ideals:
                continue
            cells = ["-", "-", "-"]
            if verdicts:
                form, kept = (".1e" if family == "vmean" else ".2f"), sum(one.met for one in verdicts)
                verdict = f"{'met' if kept == len(verdicts) else 'not met'}, {kept} of {len(verdicts)}"
                cells = [f"{verdicts[0].limit:{form}}", f"{max(one.value for one in verdicts):{form}}", verdict]
            grown = targets.growth(mine, recipe) if family != "llm" else None
            limits = ((max(ideals, default=None), targets.IDEAL_LIMIT), (grown, targets.GROWTH_LIMIT))
            cells += ["-" if value is None else _marked(value, limit) for value, limit in limits]
            body.append([family, QUANTISED[recipe], *cells])
    title = (
        "The targets of these errors: relative rmse over FA3's (vmean: itself); over that of float64 attention on the "
        "recipe's own 8-bit inputs with probabilities in e4m3 and outputs in bf16 (at most "
        f"{targets.IDEAL_LIMIT}); and its growth from the shortest context to the longest, over that of what the "
        f"inputs lose (at most {targets.GROWTH_LIMIT}):\n\n"
    )
    header = ["inputs", "recipe", "target", "worst", "verdict", "over the ideal", "growth with context"]
    return title + grid(header, body)


def _marked(value: float, limit: float) -> str:
    return f"{value:.2f}" if value <= limit else f"**{value:.2f}**"


def _paper(rows: Rows) -> str:
    mine = [row for row in rows if row.get("test") == targets.PAPER_TEST]
    names = [name for name in (targets.FA3, *targets.RECIPES) if any(name in row["results"] for row in mine)]
    if not names:
        return ""
    body = []
    for draw, row in enumerate(mine):
        body.append([str(draw), *(_text(row["results"].get(name, {}).get("rmse"), ".1e") for name in names)])
    title = (
        "Absolute rmse of the test in the FlashAttention-3 paper's Table 3 (outlier inputs, batch 2, 8 heads, 2048 "
        "tokens, head_dim 128, no mask):\n\n"
    )
    return title + grid(["draw", *("FA3 e4m3" if name == targets.FA3 else QUANTISED[name] for name in names)], body)


def accuracy(record: Record) -> str:
    rows = [row for row in record.get("accuracy:fp8", []) if row["results"]]
    if not rows:
        return ""
    return "\n\n".join(text for text in (_errors(rows), _targets(rows), _paper(rows)) if text)
