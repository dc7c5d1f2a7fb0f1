"""What a reader should take home from the rows: a verdict for each recipe, and the summary table. Before it:
command.py, render.py; after it: rows.py.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from .rows import Report, Row

GOOD, BAD, OPEN = "good", "bad", "open"


@dataclass(frozen=True)
class Verdict:
    """One recipe's headline."""

    name: str
    label: str
    text: str  # the recipe in words
    status: str  # GOOD, BAD or OPEN (nothing to judge)
    headline: str
    typical: str  # relative rmse, median over problems
    worst: str
    against: str  # FA3's scales
    missed: tuple[str, ...]  # targets, one a line
    emulated: bool


def percent(x: float | None) -> str:
    """Two significant digits, as a share of a hundred; a dash for what does not exist."""
    if x is None or x != x:
        return "–"
    if x in (float("inf"), float("-inf")):
        return "∞"
    value = 100 * x
    if value == 0:
        return "0 %"
    if value < 0.01:
        return f"{value:.0e} %"
    digits = 3 if value < 0.1 else 2 if value < 1 else 1 if value < 10 else 0
    return f"{value:.{digits}f} %"


def times(x: float | None) -> str:
    """A ratio, to hundredths where they say something."""
    if x is None:
        return "–"
    return f"{x:.2f}×" if x >= 0.095 else f"{x:.3f}×"


def verdicts(report: Report) -> list[Verdict]:
    """One for each named recipe, in the order of the contenders."""
    found = []
    for name, words in report.contenders.items():
        rows = [row for row in report.rows if row.contender == name]
        if name in report.settings["recipes"] and rows:
            found.append(_verdict(name, words, rows))
    return found


def _verdict(name: str, words: dict[str, str], rows: list[Row]) -> Verdict:
    judged = [row for row in rows if row.met is not None]
    missed = tuple(
        f"{row.family} {row.case}: {_figure(row, row.judged)} against {_figure(row, row.target)}"
        for row in judged
        if not row.met
    )
    if not judged:
        status, headline = OPEN, "No target applies to these problems"
    elif missed:
        status, headline = BAD, f"Misses {len(missed)} of {len(judged)} targets"
    else:
        status = GOOD
        headline = "Meets its target" if len(judged) == 1 else f"Meets all {len(judged)} targets"
    worst = max(rows, key=lambda row: row.relative_rmse)
    ratios = [row.ratio for row in rows if row.ratio is not None and row.family != "vmean"]
    against = times(statistics.median(ratios)) if ratios else "–"
    typical = percent(statistics.median(row.relative_rmse for row in rows))
    return Verdict(
        name,
        words["label"],
        words["text"],
        status,
        headline,
        typical,
        f"{percent(worst.relative_rmse)} on {worst.family} {worst.case}",
        against,
        missed,
        any(row.emulated for row in rows),
    )


def _figure(row: Row, value: float | None) -> str:
    if value is None:
        return "–"
    return percent(value) if row.family == "vmean" else times(value)


def goal(row: Row) -> str:
    """A row's target as text; empty where it has none."""
    return "" if row.target is None else f"≤ {_figure(row, row.target)}"


def columns(report: Report) -> list[str]:
    """Families, and layers of a model on their own."""
    return list(dict.fromkeys(row.layer or row.family for row in report.rows))


@dataclass(frozen=True)
class Cell:
    """Worst relative rmse of one contender on one family."""

    text: str
    ratio: str
    status: str
    emulated: bool


def summary(report: Report) -> dict[str, list[Cell | None]]:
    """contender -> a cell for each of columns(): the worst over lengths and head dims."""
    table: dict[str, list[Cell | None]] = {}
    for name in report.contenders:
        cells: list[Cell | None] = []
        for column in columns(report):
            rows = [row for row in report.rows if row.contender == name and (row.layer or row.family) == column]
            cells.append(_cell(rows) if rows else None)
        table[name] = cells
    return table


def _cell(rows: list[Row]) -> Cell:
    worst = max(rows, key=lambda row: row.relative_rmse)
    met = [row.met for row in rows if row.met is not None]
    status = OPEN if not met else GOOD if all(met) else BAD
    return Cell(percent(worst.relative_rmse), times(worst.ratio), status, any(row.emulated for row in rows))
