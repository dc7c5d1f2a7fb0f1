"""A/B timing of several builds of libflashhopper.so in one run, over the C ABI alone (ctypes and torch).

    python -m benchmarks.variants a.so b.so --cells bf16:128:full:8192,bf16:128:causal:8192 --peers cudnn,fa3
    python -m benchmarks.variants a.so b.so --op bwd --cells bwd_quick --peers fa4,cudnn [--deterministic]

Each build is first checked in a process of its own, so that one that hangs or faults takes nothing else down; the
builds that give right results are then timed in turn with the peers.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import variant_checks
from benchmarks.abi import Library
from benchmarks.cells import OPS, Cell, parse_cells
from benchmarks.peers import inputs, load_all, output_gradient
from benchmarks.timing import Contender, describe, measure, tflops

CHECK_SECONDS = 90  # for all cells of one build; a kernel that deadlocks is reported after this
ROUND_SECONDS = 60  # for one cell's timing


def _checks_in_processes(paths: list[str], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Runs check_build for every build at once, each in its own process with a time limit."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.variants",
        "--check-only",
        f"--cells={args.cells}",
        f"--seed={args.seed}",
        *([f"--op={args.op}"] if args.op else []),
        *(["--deterministic"] if args.deterministic else []),
    ]
    pipe = subprocess.PIPE
    processes = {path: subprocess.Popen([*command, path], stdout=pipe, stderr=pipe, text=True) for path in paths}
    deadline = time.monotonic() + CHECK_SECONDS
    reports: dict[str, dict[str, Any]] = {}
    for path, process in processes.items():
        try:
            stdout, stderr = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            last = (process.communicate()[1].strip().splitlines() or ["start"])[-1]
            reports[path] = {"failed": f"no result within {CHECK_SECONDS} s, a kernel hangs? Last: {last[:200]}"}
            continue
        try:
            reports[path] = json.loads(stdout.splitlines()[-1])
        except (IndexError, ValueError):
            lines = stderr.strip().splitlines() or ["no output"]
            reports[path] = {"failed": f"exit {process.returncode}: {' | '.join(lines[-3:])[:400]}"}
    return reports


def _usable(report: dict[str, Any], cell: Cell, force: bool) -> bool:
    entry = report.get("cells", {}).get(cell.name, {"error": "absent"})
    return "error" not in entry and (force or bool(entry["ok"]))


def _library_contender(label: str, library: Library, cell: Cell, tensors: tuple[torch.Tensor, ...]) -> Contender:
    q, k, v = tensors
    out = q.new_empty((*q.shape[:3], v.size(3)))
    lse = torch.empty((cell.batch, cell.heads, cell.seqlen_q), dtype=torch.float32, device=q.device)
    params = library.params(q, k, v, out, lse, causal=cell.causal)

    def call(keep: tuple[torch.Tensor, ...] = (q, k, v, out, lse)) -> None:  # the struct holds raw pointers
        library.launch(params)

    return Contender(label, call)


def _backward_contender(
    label: str, library: Library, cell: Cell, tensors: tuple[torch.Tensor, ...], deterministic: bool
) -> Contender:
    """The whole call of the C ABI, outputs and workspace allocated before."""
    q, k, v, dout = tensors
    out, lse, _ = variant_checks.forward_results(library, cell, q, k, v)
    prepared = library.prepare_backward(dout, q, k, v, out, lse, causal=cell.causal, deterministic=deterministic)
    return Contender(label, lambda: library.launch_backward(prepared))


def _failed(label: str, error: str) -> Contender:
    contender = Contender(label, lambda: None)
    contender.error = error
    return contender


def time_cell(
    cell: Cell, libraries: dict[str, Library], reports: dict[str, Any], peers: list[Any], args: argparse.Namespace
) -> list[Contender]:
    """One interleaved measurement; contenders that cannot take part come back with their error."""
    backward = cell.op == "bwd"
    tensors = (*inputs(cell, args.seed), *([output_gradient(cell, args.seed)] if backward else []))
    contenders = []
    for label, library in libraries.items():
        if not _usable(reports[label], cell, args.force):
            contenders.append(_failed(label, "did not pass its check"))
            continue
        try:
            if backward:
                contenders.append(_backward_contender(label, library, cell, tensors, args.deterministic))
            else:
                contenders.append(_library_contender(label, library, cell, tensors))
        except Exception as error:
            contenders.append(_failed(label, describe(error)))
    for peer in peers:
        try:
            contenders.append(Contender(peer.name, peer.call(cell, *tensors)))
        except Exception as error:
            contenders.append(_failed(peer.name, describe(error)))
    measure([c for c in contenders if c.error is None], args.rounds)
    return contenders


def table(names: list[str], rows: dict[str, list[Contender]], flops: dict[str, float]) -> str:
    """Cells down, contenders across, TFLOP/s; the best of each row carries a star."""
    width = max(9, *(len(name) + 1 for name in names))
    first = max(len("TFLOP/s"), *(len(row) for row in rows)) if rows else 7
    lines = ["TFLOP/s".ljust(first) + "".join(name.rjust(width + 1) for name in names)]
    for row, contenders in rows.items():
        speeds = {c.name: math.nan if c.error else tflops(flops[row], c.median_ms) for c in contenders}
        best = max((s for s in speeds.values() if not math.isnan(s)), default=math.nan)
        line = row.ljust(first)
        for speed in (speeds.get(name, math.nan) for name in names):
            text = "- " if math.isnan(speed) else f"{speed:.1f}" + ("*" if speed == best else " ")
            line += text.rjust(width + 1)
        lines.append(line)
    return "\n".join(lines)


def _labels(paths: list[str]) -> dict[str, str]:
    """Short names: the file's stem, or its folder's where stems repeat, numbered as a last resort."""
    stems = [Path(p).stem for p in paths]
    labels: dict[str, str] = {}
    for index, path in enumerate(paths):
        label = stems[index] if stems.count(stems[index]) == 1 else Path(path).resolve().parent.name
        label = label.removeprefix("libflashhopper").lstrip("_-.") or stems[index]
        while label in labels:
            label += f"#{index}"
        labels[label] = path
    return labels


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.variants", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("libraries", nargs="+", help="paths of libflashhopper.so builds, optionally label=path")
    parser.add_argument("--cells", default="quick", help="comma-separated cells or presets (benchmarks/cells.py)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default="", help="comma-separated: cudnn, sdpa, fa3, fa4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="JSON file, rewritten after every cell")
    parser.add_argument("--force", action="store_true", help="time builds whose results are wrong, too")
    parser.add_argument("--check-only", action="store_true", help="check one build in this process, print JSON")
    parser.add_argument("--op", choices=OPS, default=None, help="bwd: the gradients of all cells; default: as they say")
    parser.add_argument("--deterministic", action="store_true", help="the libraries' bit-reproducible backward")
    args = parser.parse_args()
    cells = parse_cells(args.cells)
    if args.op:
        cells = [dataclasses.replace(cell, op=args.op) for cell in cells]
    if args.check_only:
        faulthandler.dump_traceback_later(CHECK_SECONDS + 10, exit=True)
        report = variant_checks.check_build(args.libraries[0], cells, args.seed, args.deterministic)
        print(json.dumps(report))
        return 0
    named = dict(item.split("=", 1) for item in args.libraries if "=" in item)
    labels = {**named, **_labels([item for item in args.libraries if "=" not in item])}
    return run(labels, cells, args)


def run(labels: dict[str, str], cells: list[Cell], args: argparse.Namespace) -> int:
    begin = time.monotonic()
    checked = _checks_in_processes(list(labels.values()), args)
    reports = {label: checked[path] for label, path in labels.items()}
    for label, report in reports.items():
        print("\n".join(variant_checks.lines(label, report)), flush=True)
    libraries = {label: Library(path) for label, path in labels.items() if "failed" not in reports[label]}
    peers = load_all([p for p in args.peers.split(",") if p])
    for peer in peers:
        print(f"peer {peer.name}: {peer.unavailable or peer.version}", flush=True)
    rows: dict[str, list[Contender]] = {}
    for cell in cells:
        faulthandler.dump_traceback_later(ROUND_SECONDS, exit=True)
        rows[cell.name] = time_cell(cell, libraries, reports, peers, args)
        faulthandler.cancel_dump_traceback_later()
        flops = {cell.name: cell.flops for cell in cells}
        result = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "checks": reports,
            "tflops": {n: {c.name: tflops(flops[n], c.median_ms) for c in r if c.times_ms} for n, r in rows.items()},
            "times_ms": {n: {c.name: c.times_ms for c in r} for n, r in rows.items()},
            "errors": {n: {c.name: c.error for c in r if c.error} for n, r in rows.items()},
        }
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1))
        for contender in rows[cell.name]:
            if contender.error:
                print(f"{cell.name} {contender.name}: {contender.error}", flush=True)
    spread = max((c.spread for r in rows.values() for c in r if c.times_ms), default=math.nan)
    print(f"largest spread between rounds {spread:.1%}, {time.monotonic() - begin:.0f} s in all")
    names = [*libraries, *(p.name for p in peers)]
    print(table(names, rows, {cell.name: cell.flops for cell in cells}))
    return 0 if all(e.get("ok") for r in reports.values() for e in r.get("cells", {"": {}}).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
