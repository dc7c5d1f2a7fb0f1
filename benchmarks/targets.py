"""What the 8-bit recipes must reach, and whether rows of the record's part accuracy:fp8 do. Standard library only.

The limits are those of flashhopper.report.contenders, which needs torch; a test holds them equal. Before it:
accuracy_fp8.py, tables_fp8.py; after it: nothing. A row holds `results`: contender -> metrics,
each metric of one output against float64 attention of the 16-bit inputs:

    relative_rmse          of the kernel
    inputs_relative_rmse   of float64 attention on the contender's own dequantised inputs
    ideal_relative_rmse    the same with probabilities rounded to e4m3 and outputs to 16 bits: what no kernel can help
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

FA3 = "fa3"
RECIPES = ("paper", "e4m3", "accurate")
TARGETS: dict[str, dict[str, float]] = {  # family -> recipe -> relative rmse over FA3's; no entry: no target
    "normal": {"accurate": 0.80, "e4m3": 1.05, "paper": 1.05},
    "outlier": {"accurate": 0.50, "e4m3": 0.70, "paper": 0.70},
    "kbias": {"accurate": 0.40, "e4m3": 0.60},
    "peaky": {"accurate": 0.80, "e4m3": 1.05, "paper": 1.05},
    "llm": {"accurate": 0.65, "e4m3": 0.95},
}
VMEAN_TARGET = 3e-3  # relative rmse itself, for every recipe and length
IDEAL_LIMIT = 1.15  # relative rmse over that of the ideal
GROWTH_LIMIT = 1.3  # of the error from the shortest context to the longest, over the growth of what the inputs lose
KEY = "inputs_relative_rmse"
PAPER_TEST = "paper"  # `test` of the rows that repeat the FlashAttention-3 paper's Table 3; they have no target


class Verdict(NamedTuple):
    """value <= limit, or not."""

    value: float
    limit: float

    @property
    def met(self) -> bool:
        return self.value <= self.limit


def fa3_ratio(row: dict[str, Any], recipe: str) -> float | None:
    """Relative rmse of a recipe over FA3's on the same inputs; None where either is missing."""
    ours, theirs = row["results"].get(recipe), row["results"].get(FA3)
    return ours["relative_rmse"] / theirs["relative_rmse"] if ours and theirs and theirs["relative_rmse"] > 0 else None


def ideal_ratio(row: dict[str, Any], name: str) -> float | None:
    """Relative rmse of a contender over that of the ideal on its own 8-bit inputs."""
    found = row["results"].get(name, {})
    ideal = found.get("ideal_relative_rmse")
    return found["relative_rmse"] / ideal if ideal else None


def judge(row: dict[str, Any], recipe: str) -> Verdict | None:
    """A row against its target; None where there is no target, or nothing to compare."""
    if row.get("test") == PAPER_TEST or recipe not in row["results"]:
        return None
    if row["family"] == "vmean":
        return Verdict(row["results"][recipe]["relative_rmse"], VMEAN_TARGET)
    limit, ratio = TARGETS.get(row["family"], {}).get(recipe), fa3_ratio(row, recipe)
    return None if limit is None or ratio is None else Verdict(ratio, limit)


def growth(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """How much faster a contender's error grows with the context than what its inputs lose: the worst head dimension,
    from the fewest keys to the most. None where there is one length only."""
    found = []
    for head_dim in sorted({row["head_dim"] for row in rows}):
        mine = [row for row in rows if row["head_dim"] == head_dim and KEY in row["results"].get(name, {})]
        mine.sort(key=lambda row: row["seqlen_k"])
        if len(mine) < 2 or mine[0]["seqlen_k"] == mine[-1]["seqlen_k"]:
            continue
        (first, last) = (row["results"][name] for row in (mine[0], mine[-1]))
        inputs = last[KEY] / first[KEY]
        found.append(last["relative_rmse"] / first["relative_rmse"] / max(1.0, inputs))
    return max(found) if found else None


def families(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """family -> its rows, without the paper's test."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("test") != PAPER_TEST:
            found.setdefault(row["family"], []).append(row)
    return found
