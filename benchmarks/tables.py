"""Writes the figures of README.md and docs/ from the record. Standard library only.

    python -m benchmarks.tables           rewrites what stands between the markers
    python -m benchmarks.tables --check   exit code 1 where it would change anything

A block lies between `<!-- figures:begin NAME -->` and `<!-- figures:end -->`; NAME is one of BLOCKS, none means all.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import perplexity, tables_features, tables_fp8
from benchmarks.digest import ROOT
from benchmarks.markdown import grid
from benchmarks.record import RECORD, Record, load

MARKED = re.compile(r"(<!-- figures:begin ?([\w-]*) ?-->\n).*?(<!-- figures:end -->)", re.DOTALL)
OURS, DETERMINISTIC = "flashhopper", "flashhopper_det"
GRADIENTS = ("dq", "dk", "dv")
TITLES = {OURS: "flashhopper", "fa3": "FA3", "fa4": "FA4", "cudnn": "cuDNN", "sdpa": "SDPA (FA2)"}
NOTHING = "*Not measured yet.*"
COUNTS = {  # of the GPU tests
    **{name: name for name in ("passed", "failed", "skipped")},
    "not_run": "not run",
    "problems": "problems compared with an oracle",
}


def _peers(rows: list[dict[str, Any]]) -> list[str]:
    return [name for name in TITLES if any(name in row["value"] for row in rows)]


def _best(row: dict[str, Any]) -> float | None:
    """The best peer's value: the largest rate, the smallest time."""
    values = [value for name, value in row["value"].items() if name not in (OURS, DETERMINISTIC)]
    return (min(values) if row["unit"] == "us" else max(values)) if values else None


def _ratio(row: dict[str, Any]) -> float | None:
    best, ours = _best(row), row["value"].get(OURS)
    return ours / best if best and ours else None


def _speeds(rows: list[dict[str, Any]]) -> str:
    names = _peers(rows)
    body = []
    for row in rows:
        dims = f"{row['head_dim']}" + ("" if row["head_dim_v"] == row["head_dim"] else f"/{row['head_dim_v']}")
        ratio = _ratio(row)
        numbers = [f"{row['value'][name]:.0f}" if name in row["value"] else "-" for name in names]
        mask = "causal" if row["causal"] else "full"
        body.append([dims, mask, str(row["seqlen_q"]), *numbers, f"{ratio:.2f}" if ratio else "-"])
    return grid(["head_dim", "mask", "seqlen", *(TITLES[name] for name in names), "of the best peer"], body)


def _forward(record: Record, dtype: str) -> str:
    rows = [row for row in record["bench"] if row["op"] == "fwd" and row["dtype"] == dtype]
    if not rows:
        return NOTHING
    return f"Forward, {dtype}, TFLOP/s (16k tokens, heads x head_dim = 2048):\n\n" + _speeds(rows)


def _backward(record: Record) -> str:
    """Empty where nothing is measured, so that a page need not say so."""
    rows = [row for row in record["bench"] if row["op"] == "bwd" and row["dtype"] == "bf16"]
    if not rows:
        return ""
    title = "Backward, bf16, TFLOP/s (the same shapes, 2.5 times the forward's FLOPs; FA3's package has no backward):"
    lines = [title, "", _speeds(rows)]
    for row in rows:
        speed, ours = row["value"].get(DETERMINISTIC), row["value"].get(OURS)
        if speed and ours:
            mask = "causal" if row["causal"] else "full"
            where = f"head_dim {row['head_dim']}, {mask}, {row['seqlen_q']}"
            lines += ["", f"With deterministic=True, {where}: {speed:.0f}, {speed / ours:.2f} times the default."]
    return "\n".join(lines)


def _host(record: Record) -> str:
    rows = [row for row in record["bench"] if row["op"] == "host"]
    if not rows:
        return NOTHING
    names = _peers(rows)
    body = [
        [
            "causal" if row["causal"] else "full",
            *(f"{row['value'][n]:.1f}" if n in row["value"] else "-" for n in names),
        ]
        for row in rows
    ]
    titles = {**TITLES, "sdpa": "SDPA"}
    return "Host time of a call without gradients, microseconds:\n\n" + grid(
        ["mask", *(titles[n] for n in names)], body
    )


def _accuracy(record: Record) -> str:
    rows = [row for row in record.get("accuracy", []) if row["op"] == "fwd" and "relative_rmse" in row]
    if not rows:
        return NOTHING
    body = []
    for family, dtype in dict.fromkeys((row["family"], row["dtype"]) for row in rows):
        mine = [row for row in rows if (row["family"], row["dtype"]) == (family, dtype)]
        cells = [f"{max(row['relative_rmse'] for row in mine):.1e}", f"{max(row['max_error'] for row in mine):.1e}"]
        for peer in ("fa3", "cudnn"):
            ratios = [row["relative_rmse"] / row["peers"][peer] for row in mine if row["peers"].get(peer)]
            cells.append(f"{max(ratios):.3f}" if ratios else "-")
        body.append([family, dtype, str(len(mine)), *cells])
    header = ["inputs", "dtype", "cases", "relative rmse", "max error", "rmse / FA3's", "rmse / cuDNN's"]
    title = "Error against float64, the worst of head_dim 64, 128, 256, full and causal, 2k to 128k keys:\n\n"
    return title + grid(header, body)


def _gradient_accuracy(record: Record) -> str:
    rows = [row for row in record.get("accuracy", []) if row["op"] == "bwd" and "gradients" in row]
    if not rows:
        return ""
    body = []
    for family, dtype in dict.fromkeys((row["family"], row["dtype"]) for row in rows):
        mine = [row for row in rows if (row["family"], row["dtype"]) == (family, dtype)]
        cells = [f"{max(row['gradients'][name]['relative_rmse'] for row in mine):.1e}" for name in GRADIENTS]
        for others in ([row["plain"] for row in mine], [row["peers"].get("cudnn") for row in mine]):
            for metric in ("rmse", "max_error"):
                ratios = [
                    row["gradients"][name][metric] / other[name][metric]
                    for row, other in zip(mine, others, strict=True)
                    for name in GRADIENTS
                    if other and other[name][metric] > 0
                ]
                cells.append(f"{max(ratios):.2f}" if ratios else "-")
        body.append([family, dtype, str(len(mine)), *cells])
    header = ["inputs", "dtype", "cases", *(f"{name}: relative rmse" for name in GRADIENTS)]
    header += [f"{metric} / {peer}'s" for peer in ("PyTorch autograd", "cuDNN") for metric in ("rmse", "max error")]
    title = "Gradients against float64 autograd, the worst of head_dim 64, 128, 256, full and causal, 2k tokens:\n\n"
    return title + grid(header, body)


def _large(record: Record) -> str:
    rows = record.get("large")
    if not rows:
        return NOTHING
    body = [
        [
            f"{row['seqlen_q']:,}",
            f"{row['seconds']:.2f}",
            f"{row['tflops']:.0f}",
            f"{(row['input_bytes'] + row['output_bytes']) / 2**30:.1f}",
            f"{row['extra_bytes'] / 2**20:.1f}",
            f"{row['max_error']:.1e}",
        ]
        for row in rows
    ]
    header = [
        "tokens",
        "seconds",
        "TFLOP/s",
        "inputs and outputs, GiB",
        "memory beyond them, MiB",
        "max error of sampled rows",
    ]
    return "One sequence, causal, 8 heads of 128, bf16:\n\n" + grid(header, body)


def _verification(record: Record) -> str:
    parts = []
    suites = {name.removeprefix("tests:"): counts for name, counts in record.items() if name.startswith("tests:")}
    if suites:
        total = {key: sum(counts[key] for counts in suites.values()) for key in COUNTS}
        outcomes = ", ".join(f"{total[key]:,} {text}" for key, text in COUNTS.items())
        parts.append(f"GPU tests ({', '.join(suites)}): {outcomes}")
    if "sanitizer" in record:
        parts.append("compute-sanitizer " + ", ".join(f"{tool}: {text}" for tool, text in record["sanitizer"].items()))
    return ("; ".join(parts) + ".") if parts else NOTHING


def _summary(record: Record) -> str:
    lines = []
    for op, title in (("fwd", "Forward"), ("bwd", "Backward")):
        ratios = [r for r in (_ratio(row) for row in record["bench"] if row["op"] == op) if r]
        if ratios:
            lines.append(
                f"{title} against the best peer in {len(ratios)} cells: {min(ratios):.2f} to {max(ratios):.2f} times"
                f" its speed, median {statistics.median(ratios):.2f}, ahead in {sum(r >= 1 for r in ratios)}."
            )
    return "\n".join(lines + tables_features.summary(record) + tables_fp8.summary(record)) or NOTHING


def _source(record: Record) -> str:
    where = (
        f"{record.get('gpu')}, driver {record.get('driver')}, CUDA {record.get('cuda')}, torch {record.get('torch')}"
    )
    measured: dict[str, list[str]] = {}
    for part, entry in record.get("parts", {"all": record}).items():
        when = f"{str(entry.get('date'))[:10]}, commit {entry.get('commit') or 'unknown'}"
        measured.setdefault(when, []).append(part)
    when = "; ".join(measured) if len(measured) == 1 else "; ".join(f"{', '.join(p)}: {w}" for w, p in measured.items())
    return (
        f"{where}, cuDNN {record.get('cudnn')}. Measured on {when}. Interleaved rounds, medians "
        "(benchmarks/results/h200); `python -m benchmarks.record --check` says which parts are of older sources."
    )


BLOCKS: dict[str, Callable[[Record], str]] = {
    "summary": _summary,
    "forward-bf16": lambda record: _forward(record, "bf16"),
    "forward-fp16": lambda record: _forward(record, "fp16"),
    "backward": _backward,
    "features": tables_features.speeds,
    "forward-8bit": tables_fp8.speeds,
    "quantiser": tables_fp8.quantiser,
    "host": _host,
    "accuracy": _accuracy,
    "gradient-accuracy": _gradient_accuracy,
    "accuracy-8bit": tables_fp8.accuracy,
    "perplexity": perplexity.table,
    "large": _large,
    "verification": _verification,
    "source": _source,
}


# The parts of the record that a block shows.
PARTS_OF: dict[str, tuple[str, ...]] = {
    "summary": ("bench:fwd", "bench:bwd", "bench:features", "bench:features_bwd", "bench:fp8", "accuracy:fp8"),
    "forward-bf16": ("bench:fwd",),
    "forward-fp16": ("bench:fwd",),
    "backward": ("bench:bwd",),
    "features": ("bench:features", "bench:features_bwd"),
    "forward-8bit": ("bench:fp8",),
    "quantiser": ("bench:quantize",),
    "host": ("bench:host",),
    "accuracy": ("accuracy",),
    "gradient-accuracy": ("accuracy",),
    "accuracy-8bit": ("accuracy:fp8",),
    "perplexity": ("perplexity",),
    "large": ("large",),
    "verification": ("tests:dense", "tests:backward", "tests:fp8", "tests:features", "tests:two_gpus", "sanitizer"),
}


def _age(record: Record, name: str) -> str:
    """Which parts of a block are of other sources than the newest measurement; empty where none is."""
    parts = record.get("parts", {})
    old = [p for p in PARTS_OF.get(name, ()) if p in parts and parts[p]["digest"] != record.get("digest")]
    dates = ", ".join(f"{part} ({parts[part]['date'][:16].replace('T', ' ')})" for part in old)
    return f"\n\nOf sources before those of the newest measurement: {dates}." if old else ""


def _text(record: Record, name: str) -> str:
    text = BLOCKS[name](record)
    return text + _age(record, name) if text and text != NOTHING else text


def block(record: Record | None, name: str) -> str:
    """The text of one block, without its markers."""
    if name and name not in BLOCKS:
        raise SystemExit(f"no block {name!r}; blocks are {', '.join(BLOCKS)}")
    if record is None:
        return NOTHING
    texts = (_text(record, part) for part in ([name] if name else BLOCKS))
    return "\n\n".join(text for text in texts if text)


def render(text: str, record: Record | None) -> str:
    """`text` with every block made anew."""
    return MARKED.sub(lambda match: f"{match[1]}{block(record, match[2])}\n{match[3]}", text)


def pages(root: Path = ROOT) -> list[Path]:
    return [path for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))) if path.is_file()]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.tables", description="figures of the README and docs from the record"
    )
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 where a page is stale")
    parser.add_argument("--record", type=Path, default=RECORD)
    args = parser.parse_args()
    record = load(args.record) if args.record.is_file() else None
    stale = 0
    for path in pages():
        old = path.read_text(encoding="utf-8")
        new = render(old, record)
        if new == old:
            continue
        stale += 1
        if args.check:
            print(f"{path.relative_to(ROOT)}: figures are stale, run `python -m benchmarks.tables`")
        else:
            path.write_text(new, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: figures written")
    return 1 if stale and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
