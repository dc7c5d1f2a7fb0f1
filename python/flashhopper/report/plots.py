"""The report's figures as inline SVG. Before it: render.py; after it: rows.py.

One small figure a panel: panels flow into columns on a desk and into one column on a phone, where text keeps its size.
Text stays text, and colours are CSS variables, so that a figure follows the page from light to dark.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from .contenders import VMEAN_TARGET
from .rows import Histogram, Report, Row, ScaleMap, short_length
from .verdict import percent

WIDTH, HEIGHT = 3.7, 2.75  # inches at 96 pixels: a phone's width
# Colours that stand for CSS variables until the SVG is written.
_TEXT, _GRID = "#010101", "#020202"
_VARIABLES = {_TEXT: "var(--text)", _GRID: "var(--grid)"}
# contender -> marker, dash; what distinguishes lines besides colour
STYLES: dict[str, tuple[str, str]] = {
    "fp16": ("<", ":"),
    "bf16": ("s", ":"),
    "naive_fp16": ("^", ":"),
    "fa3": ("D", "--"),
    "paper": ("v", "-"),
    "e4m3": ("P", "-"),
    "accurate": ("o", "-"),
}
GLYPHS = {"<": "◀", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "o": "●"}  # markers in a page's text
_COLOURS = {name: f"#0300{number:02d}" for number, name in enumerate(STYLES)}
_VARIABLES |= {colour: f"var(--series-{name})" for name, colour in _COLOURS.items()}
_RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.edgecolor": _GRID,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _TEXT,
    "ytick.labelcolor": _TEXT,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True)
class Plot:
    """A panel: its SVG, which is self-contained, and what it shows for those who do not see it."""

    name: str
    title: str
    alt: str
    svg: str


def error_plots(report: Report) -> list[Plot]:
    """Relative rmse against context length, a panel a family and head_dim; real layers have one length and none."""
    found = []
    panels = dict.fromkeys((row.family, row.head_dim) for row in report.rows if not row.layer)
    several = len({head_dim for _, head_dim in panels}) > 1
    for family, head_dim in panels:
        rows = [row for row in report.rows if (row.family, row.head_dim, row.layer) == (family, head_dim, "")]
        title = f"{family}, head_dim {head_dim}" if several else family
        found.append(_error_plot(f"error-{family}-{head_dim}", title, rows))
    return found


def _error_plot(name: str, title: str, rows: Sequence[Row]) -> Plot:
    lengths = sorted({row.seqlen_k for row in rows})
    with mpl.rc_context(_RC):
        figure, axes = _axes(title)
        ends = []
        for contender in dict.fromkeys(row.contender for row in rows):
            points = sorted((row.seqlen_k, row.relative_rmse) for row in rows if row.contender == contender)
            _line(axes, contender, [x for x, _ in points], [y for _, y in points])
            ends.append(f"{contender} {percent(points[-1][1])}")
        axes.set(xscale="log", yscale="log", xlabel="keys", ylabel="relative rmse")
        if rows[0].family == "vmean":
            axes.axhline(VMEAN_TARGET, color=_TEXT, linewidth=1, linestyle=(0, (1, 2)))
            axes.annotate("target", (lengths[0], VMEAN_TARGET), (2, 3), textcoords="offset points", fontsize=8)
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_length(round(x))))
        axes.xaxis.set_minor_locator(NullLocator())
        _percent_axis(axes)
        alt = f"Relative rmse of {title} inputs over {_span(lengths)} keys. At the longest context: {', '.join(ends)}."
        return Plot(name, title, alt, _svg(figure, name))


def _span(lengths: Sequence[int]) -> str:
    return str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"


def histogram_plots(report: Report) -> list[Plot]:
    """How errors of single elements are distributed, a panel a family or layer."""
    found = []
    for family, layer in dict.fromkeys((h.family, h.layer) for h in report.histograms):
        mine = [h for h in report.histograms if (h.family, h.layer) == (family, layer)]
        found.append(_histogram_plot(f"histogram-{layer or family}", layer or family, mine))
    return found


def _histogram_plot(name: str, title: str, histograms: Sequence[Histogram]) -> Plot:
    with mpl.rc_context(_RC):
        figure, axes = _axes(title)
        medians = []
        for h in histograms:
            centres = [10 ** ((a + b) / 2) for a, b in zip(h.edges, h.edges[1:], strict=False)]
            shares = [100 * share for share in h.shares]
            # The outermost bins hold all that lies beyond, no error at all among it.
            style = {"color": _COLOURS[h.contender], "linestyle": STYLES[h.contender][1]}
            axes.plot(centres[1:-1], shares[1:-1], linewidth=1.6, **style)  # type: ignore[arg-type]
            below = itertools.accumulate(h.shares)
            median = next((centre for centre, share in zip(centres, below, strict=True) if share >= 0.5), centres[-1])
            medians.append(f"{h.contender} {percent(median)}")
        axes.set(xscale="log", xlabel="error of an element / rms of the output", ylabel="share of elements, %")
        axes.set_ylim(bottom=0)
        axes.set_xlim(10 ** histograms[0].edges[1], 10 ** histograms[0].edges[-2])
        axes.xaxis.set_major_locator(FixedLocator([1e-4, 1e-3, 1e-2, 1e-1]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g} %"))
        axes.xaxis.set_minor_locator(NullLocator())
        alt = f"Distribution of errors of single elements on {title}. Half of them lie below: {', '.join(medians)}."
        return Plot(name, title, alt, _svg(figure, name))


def scale_plots(report: Report) -> list[Plot]:
    """Scales of keys and values, a row a head and a column a block, a panel a family or layer."""
    return [_scale_plot(found) for found in report.scales]


def _scale_plot(found: ScaleMap) -> Plot:
    title = found.layer or found.family
    name = f"scales-{title}"
    texts = []
    with mpl.rc_context({**_RC, "axes.grid": False, "axes.spines.left": False, "axes.spines.bottom": False}):
        figure = Figure(figsize=(WIDTH, HEIGHT + 0.35), layout="constrained")
        both = figure.subplots(2, 1, sharex=True)
        for axes, side, scales in zip(both, ("keys", "values"), (found.k_scale, found.v_scale), strict=True):
            flat = [x for row in scales for x in row if x > 0]
            low, high = min(flat), max(flat)
            norm = LogNorm(low, max(high, low * 1.05))
            image = axes.imshow(scales, aspect="auto", cmap="viridis", norm=norm, interpolation="nearest")
            bar = figure.colorbar(image, ax=axes, pad=0.02)
            ticks = [low, max(high, low * 1.05)]
            bar.set_ticks(ticks, labels=[f"{x:.2g}" for x in ticks])
            bar.minorticks_off()
            bar.outline.set_visible(False)
            axes.set_ylabel(f"{side}: head")
            axes.set_yticks(range(len(scales)) if len(scales) <= 4 else [0, len(scales) - 1])
            texts.append(f"{side} {low:.2g} to {high:.2g}, a spread of {high / low:.2g} times")
        both[0].set_title(title)
        both[1].set_xlabel(f"block of {found.block} tokens")
        both[1].xaxis.get_major_locator().set_params(integer=True, nbins=6)
        alt = f"Heat map of accurate()'s block scales on {title}, {found.seqlen_k} tokens: {'; '.join(texts)}."
        return Plot(name, title, alt, _svg(figure, name))


def speed_plots(report: Report) -> list[Plot]:
    """Error against speed, a panel a head_dim; none without speed rows."""
    found = []
    for head_dim in dict.fromkeys(row.head_dim for row in report.speed):
        rows = [row for row in report.speed if row.head_dim == head_dim and row.relative_rmse]
        if not rows:
            continue
        title, name = f"head_dim {head_dim}", f"speed-{head_dim}"
        with mpl.rc_context(_RC):
            figure, axes = _axes(title)
            for contender in dict.fromkeys(row.contender for row in rows):
                mine = sorted((row.tflops, row.relative_rmse or 0.0) for row in rows if row.contender == contender)
                _line(axes, contender, [x for x, _ in mine], [y for _, y in mine])
            axes.set(yscale="log", xlabel="TFLOP/s of the attention kernel", ylabel="relative rmse")
            _percent_axis(axes)
            best = max(rows, key=lambda row: row.tflops)
            alt = f"Relative rmse against speed at {title}. Fastest: {best.contender}, {best.tflops:.0f} TFLOP/s."
            found.append(Plot(name, title, alt, _svg(figure, name)))
    return found


def _axes(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    return figure, axes


def _line(axes: Axes, contender: str, x: Sequence[float], y: Sequence[float]) -> None:
    marker, dash = STYLES[contender]
    style = {"color": _COLOURS[contender], "marker": marker, "linestyle": dash}
    kept = [(a, b) for a, b in zip(x, y, strict=True) if b > 0 and math.isfinite(b)]
    axes.plot([a for a, _ in kept], [b for _, b in kept], linewidth=1.6, markersize=4.5, **style)  # type: ignore[arg-type]


def _percent_axis(axes: Axes) -> None:
    """A few round figures: a decade may hold all the data."""
    low, high = axes.get_ylim()
    decades = math.log10(high / low)
    subs = (1.0,) if decades > 2 else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g} %"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())


def _svg(figure: Figure, name: str) -> str:
    """The figure as an <svg> element for a page: no prologue, no metadata, identifiers of its own."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s(?:xmlns(?::xlink)?|version)="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    text = re.sub(r"font-family: [^;\"]*", "font-family: inherit", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    # The size is the page's to say; the view box keeps the proportions.
    opening, closing = text.split(">", 1)
    return re.sub(r'\s(?:width|height)="[^"]*"', "", opening) + ">" + closing
