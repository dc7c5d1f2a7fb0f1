"""The parts of the record, one function each: (rounds) -> what the record keeps of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import (
    accuracy,
    accuracy_backward,
    accuracy_fp8,
    features,
    fp8,
    gpu_tests,
    harness,
    large,
    peers_features,
    peers_fp8,
    perplexity,
    tables_features,
    tables_fp8,
)
from benchmarks.cells import PRESETS
from benchmarks.digest import ROOT
from benchmarks.peers import NAMES, load_all

if TYPE_CHECKING:
    from benchmarks.record import Given

TOOL_SECONDS = 150  # for each tool of compute-sanitizer
# Of the 16-bit rows, unless others are named. SDPA's FA2 kernels are no contender on Hopper, and what runs behind them
# finds a cooler card.
PEERS = tuple(name for name in NAMES if name != "sdpa")


def _show(row: harness.Row) -> None:
    values = " ".join(f"{name} {value:.0f}" for name, value in row["value"].items())
    print(f"{row['op']} {harness.cell_of(row).name}: {values}", flush=True)


def bench_fwd(rounds: int, peers: Sequence[str] = PEERS) -> list[harness.Row]:
    cells = PRESETS["issue2"] + PRESETS["head_dims"]
    rows = harness.time_forward(cells, load_all(list(peers)), rounds, on_row=_show)
    print("\n".join(harness.error_lines(rows)))
    return rows


def bench_bwd(rounds: int, peers: Sequence[str] = PEERS) -> list[harness.Row]:
    cells = PRESETS["issue3"] + PRESETS["bwd_head_dims"]
    rows = harness.time_backward(cells, load_all(list(peers)), rounds, on_row=_show)
    print("\n".join(harness.error_lines(rows)))
    return rows


def bench_fp8(rounds: int) -> list[harness.Row]:
    rows = fp8.time_cells(PRESETS["fp8"], peers_fp8.load_all(), rounds, on_row=_show)
    print("\n".join(harness.error_lines(rows)))
    if not any(row["value"] for row in rows):
        raise RuntimeError(f"no contender ran in any cell: {rows[0]['errors']}")
    return rows


def _bench_features(cases: tuple[features.Case, ...], rounds: int) -> list[harness.Row]:
    rows = features.time_cases(cases, peers_features.load_all, rounds, on_row=_show)
    print("\n".join(harness.error_lines(rows)))
    if not any(row["value"] for row in rows):
        raise RuntimeError(f"no contender ran in any case: {rows[0]['errors']}")
    return rows


def bench_quantize(rounds: int) -> list[harness.Row]:
    from benchmarks import quantize_bandwidth  # needs the package itself

    return quantize_bandwidth.measure(rounds)


def bench_host(rounds: int) -> list[harness.Row]:
    return harness.time_host(load_all(list(NAMES)), rounds)


def parse_sanitizer(output: str) -> str:
    """`clean`, the number of errors, or why there is no verdict."""
    race = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)", output)
    if race:
        errors, warnings = int(race.group(2)), int(race.group(3))
        note = f" ({warnings} warnings)" if warnings else ""
        return (f"{errors} errors{race_sites(output)}" if errors else "clean") + note
    summary = re.findall(r"ERROR SUMMARY: (\d+) errors?", output)
    if summary:
        errors = max(int(number) for number in summary)
        return f"{errors} errors" if errors else "clean"
    lines = [line for line in output.strip().splitlines() if line.strip()] or ["no output"]
    return f"not run: {lines[-1][:200]}"


def race_sites(output: str) -> str:
    """Which writes racecheck reports and how often, by source line; one that is not known yet would show."""
    sites = re.findall(r"Error: Race reported between (?:Write|Read) access at .* in (\S+:\d+)", output)
    counts = [f"{sites.count(site)} at {site}" for site in sorted(set(sites))]
    return f" ({', '.join(counts)})" if counts else ""


def sanitizer(rounds: int) -> dict[str, str]:
    """compute-sanitizer's tools over a few tiny problems; only this library's kernels are instrumented."""
    tools = ("memcheck", "racecheck", "synccheck")
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        return dict.fromkeys(tools, "not run: compute-sanitizer is not on PATH")
    result = {}
    for tool in tools:
        command = [program, "--tool", tool, "--kernel-name", "kns=flashhopper", "--target-processes", "all"]
        command += [sys.executable, "-m", "benchmarks.sanitize_subset"]
        # Freed blocks go back to the driver, so that a touch of freed or neighbouring memory shows.
        env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TOOL_SECONDS)
        except subprocess.TimeoutExpired:
            result[tool] = f"not run: no verdict within {TOOL_SECONDS} s"
            continue
        output = run.stdout + run.stderr
        result[tool] = parse_sanitizer(output)
        if "subset done" not in output:
            result[tool] = f"not run: the program stopped early; {result[tool]}"
        if result[tool] != "clean":
            print("\n".join([line for line in output.splitlines() if "=====" in line][:40]), flush=True)
        print(f"{tool}: {result[tool]}", flush=True)
    return result


RUNNERS: dict[str, Callable[[int], Any]] = {
    "bench:host": bench_host,
    "bench:fp8": bench_fp8,
    "bench:quantize": bench_quantize,
    "bench:features": lambda rounds: _bench_features(features.FORWARD, rounds),
    "bench:features_bwd": lambda rounds: _bench_features(features.BACKWARD, rounds),
    "accuracy": lambda rounds: accuracy.measure(rounds) + accuracy_backward.measure(rounds),
    "large": large.measure,
    **{part: lambda rounds, part=part: gpu_tests.run(part) for part in gpu_tests.SUITES},  # type: ignore[misc]
    "sanitizer": sanitizer,
}


# Parts that take what the caller gives.
WITH_GIVEN: dict[str, Callable[[int, Given], Any]] = {
    "bench:fwd": lambda rounds, given: bench_fwd(rounds, _peers(given)),
    "bench:bwd": lambda rounds, given: bench_bwd(rounds, _peers(given)),
    "accuracy:fp8": lambda rounds, given: accuracy_fp8.measure(rounds, given.tensors),
    "perplexity": lambda rounds, given: perplexity.measure(given.gguf, given.ids),
}


def _peers(given: Given) -> Sequence[str]:
    return ["flashhopper", *given.peers] if given.peers else PEERS


def run(part: str, rounds: int, given: Given) -> Any:
    """What the record keeps of one part."""
    return WITH_GIVEN[part](rounds, given) if part in WITH_GIVEN else RUNNERS[part](rounds)


def summary(record: dict[str, Any]) -> str:
    """Everything a reader of the terminal needs, short."""
    bench = [row for row in record["bench"] if row["op"] in ("fwd", "bwd", "host")]
    lines = [harness.table(bench)] if bench else []
    eight = (tables_fp8.speeds(record), tables_fp8.quantiser(record), tables_fp8.accuracy(record))
    lines += [text for text in eight if text]
    lines += [text for text in (tables_features.speeds(record), *tables_features.summary(record)) if text]
    if "accuracy" in record:
        lines.append(accuracy.table(record["accuracy"]))
        backward = [row for row in record["accuracy"] if row["op"] == "bwd"]
        lines += [accuracy_backward.table(backward)] if backward else []
    lines += [text for text in (perplexity.table(record),) if text]
    if "large" in record:
        lines += [large.line(row) for row in record["large"]]
    for part in gpu_tests.SUITES:
        if part in record:
            lines += [gpu_tests.line(part, record[part]), *record[part]["failures"][:20]]
    if "sanitizer" in record:
        lines.append("sanitizer: " + ", ".join(f"{tool} {verdict}" for tool, verdict in record["sanitizer"].items()))
    return "\n".join(lines)
