"""Makes the report's page: one HTML file that asks nothing of a network and needs no script. Before it: command.py;
after it: verdict.py, plots.py, templates/report.html.j2.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from . import plots, speed
from .collect import ABLATIONS, ACCUMULATIONS, ONE_LEVEL
from .rows import AblationRow, Report, short_length
from .verdict import columns, goal, percent, summary, times, verdicts

_TEMPLATES = Path(__file__).parent / "templates"
_NOTABLE = 1.1  # a building block without which the error grows by a tenth


@dataclass(frozen=True)
class Change:
    """One cell of the ablation: what accurate() loses without a building block."""

    ratio: str
    error: str
    is_notable: bool
    emulated: bool


def page(report: Report) -> str:
    """The whole report as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        percent=percent, keys=short_length, goal=goal, times=times, svg=lambda plot: Markup(plot.svg)
    )
    ablated, changes = _ablation(report)
    return environment.get_template("report.html.j2").render(
        report=report,
        rounds=speed.ROUNDS,
        verdicts=verdicts(report),
        columns=columns(report),
        summary=summary(report),
        legend=_legend(report),
        error_plots=plots.error_plots(report),
        histogram_plots=plots.histogram_plots(report),
        scale_plots=plots.scale_plots(report),
        speed_plots=plots.speed_plots(report),
        ablated=ablated,
        changes=changes,
        accumulation=_accumulation(report),
        accumulated=list(dict.fromkeys(row.seqlen_k for row in report.accumulation)),
    )


def _legend(report: Report) -> list[tuple[str, str, str]]:
    """(contender, label, glyph of its marker)."""
    glyphs = ((name, plots.GLYPHS[plots.STYLES[name][0]]) for name in report.contenders)
    return [(name, report.contenders[name]["label"], glyph) for name, glyph in glyphs]


def _ablation(report: Report) -> tuple[list[str], list[tuple[str, str, list[Change | None]]]]:
    """Column names, and for each variant its words and a cell a column."""
    names = list(dict.fromkeys(row.layer or row.family for row in report.ablation))
    found = {(row.variant, row.layer or row.family): _change(row) for row in report.ablation}
    variants = [(variant, text) for variant, text, _ in (*ABLATIONS, ONE_LEVEL)]
    return names, [(variant, text, [found.get((variant, name)) for name in names]) for variant, text in variants]


def _change(row: AblationRow) -> Change:
    is_notable = row.ratio is not None and row.ratio >= _NOTABLE
    return Change(times(row.ratio), percent(row.relative_rmse), is_notable, row.emulated)


def _accumulation(report: Report) -> list[tuple[str, bool, list[str]]]:
    """(variant, whether in two levels, relative rmse of each length)."""
    found: dict[str, list[str]] = {variant: [] for variant, _ in ACCUMULATIONS}
    for row in report.accumulation:
        found[row.variant].append(percent(row.relative_rmse))
    return [(variant, recipe.two_level, found[variant]) for variant, recipe in ACCUMULATIONS]
