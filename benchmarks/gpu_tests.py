"""The record's `tests` parts: the GPU tests in suites that run, are timed and age one by one. Before it: parts.py;
after it: pytest with the plugin suite_log.py.

Failed tests are a result, and so are tests that a suite's time did not suffice for; a suite of which no test ran is an
error.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.digest import ROOT

FOLDER = ROOT / "tests" / "gpu"
WORKERS = 8
SLOWEST = 8  # tests that the record names


class Suite(NamedTuple):
    """File name patterns of tests/gpu, the most seconds that their tests may take together, the GPUs they need."""

    patterns: tuple[str, ...]
    seconds: int
    gpus: int = 1


# The first suite that has a pattern of a file's name runs it: the last one takes what the others leave.
SUITES = {
    "tests:dense": Suite(
        tuple(
            f"test_gpu_{name}.py" for name in ("forward", "clusters", "fuzz", "large", "layouts", "numerics", "runtime")
        ),
        200,
    ),
    "tests:backward": Suite(("test_gpu_backward*.py", "test_gpu_train_gpt.py"), 200),
    "tests:fp8": Suite(("test_gpu_fp8*.py", "test_gpu_quantize*.py"), 200),
    "tests:two_gpus": Suite(("test_gpu_distributed.py",), 200, gpus=2),
    "tests:features": Suite(("test_gpu_*.py",), 200),
}


def files(part: str) -> list[Path]:
    """The files of one suite."""
    return [path for path in sorted(FOLDER.glob("test_*.py")) if _suite_of(path) == part]


def _suite_of(path: Path) -> str:
    return next(part for part, suite in SUITES.items() if any(path.match(pattern) for pattern in suite.patterns))


def lacks_gpus(part: str, count: int) -> bool:
    """Whether a part of the record is a suite that needs more GPUs than there are."""
    return part in SUITES and SUITES[part].gpus > count


def run(part: str) -> dict[str, Any]:
    """Runs a suite and returns its counts; prints the end of what pytest printed."""
    with tempfile.TemporaryDirectory() as folder:
        log, output = Path(folder) / "log.jsonl", Path(folder) / "output.txt"
        begin = time.monotonic()
        code = _pytest([str(path) for path in files(part)], log, output, SUITES[part].seconds)
        seconds = time.monotonic() - begin
        text = output.read_text(errors="replace")
        counts = read_log(log, SUITES[part].seconds if code is None else None)
    print(text[-6000:], flush=True)
    if counts["passed"] + counts["failed"] == 0:
        raise RuntimeError(f"no GPU test ran, exit code {code}: {text[-300:]}")
    return {**counts, "seconds": round(seconds, 1)}


def _pytest(paths: list[str], log: Path, output: Path, seconds: int) -> int | None:
    """The exit code; None where the time ran out."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *paths, "-q", "--no-header", "--tb=short"]
    # The benchmark plugin, where installed, warns about xdist, and warnings are errors.
    command += ["-p", "no:benchmark", "-p", "benchmarks.suite_log", f"--suite-log={log}"]
    if importlib.util.find_spec("xdist"):
        # Groups (tests of many gigabytes; tests that compile) stay on one worker each, and start first.
        command += ["-n", str(min(WORKERS, os.cpu_count() or 1)), "--dist", "loadgroup"]
    # The workers share the CPU, and a pool of compiler processes takes longer to start than the few kernels to compile.
    env = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ}
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the workers too
            process.wait()
            return None


def read_log(path: Path, cut_after: int | None = None) -> dict[str, Any]:
    """Counts of a test log: tests by outcome, problems that they compared with an oracle, the first line of each
    failure, seconds by file and the slowest tests.

    cut_after: the seconds after which the run was stopped; tests that ran then are failures.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    collected = max((line["count"] for line in lines if line["kind"] == "collected"), default=0)
    finished = {line["id"]: line for line in lines if line["kind"] == "finished"}
    outcomes = Counter(line["outcome"] for line in finished.values())
    failures = [f"{name}: {line['message']}" for name, line in finished.items() if line["outcome"] == "failed"]
    running = {line["id"]: line["at"] for line in lines if line["kind"] == "started" and line["id"] not in finished}
    if cut_after is not None:
        last = lines[-1]["at"] if lines else 0.0
        failures += [
            f"{name}: did not finish, begun {last - at:.0f} s before the last that did; the suite has {cut_after} s"
            for name, at in running.items()
        ]
    by_file: Counter[str] = Counter()
    for name, line in finished.items():
        by_file[name.split("::")[0].rsplit("/", 1)[-1]] += line["seconds"]
    slowest = sorted(finished.values(), key=lambda line: line["seconds"], reverse=True)[:SLOWEST]
    return {
        "passed": outcomes["passed"],
        "failed": len(failures),
        "skipped": outcomes["skipped"],
        "not_run": max(collected - len(finished) - (len(running) if cut_after is not None else 0), 0),
        "problems": sum(line["problems"] for line in finished.values()),
        "failures": failures,
        "file_seconds": {name: round(seconds, 1) for name, seconds in by_file.most_common()},
        "slowest": {line["id"]: round(line["seconds"], 1) for line in slowest},
    }


def total(suites: list[dict[str, Any]]) -> dict[str, Any]:
    """The suites together, as a reader of the record who does not know them expects it."""
    counts = {key: sum(suite.get(key, 0) for suite in suites) for key in ("passed", "failed", "skipped", "not_run")}
    seconds = round(sum(suite.get("seconds", 0.0) for suite in suites), 1)
    problems = sum(suite.get("problems", 0) for suite in suites)
    return {
        **counts,
        "problems": problems,
        "seconds": seconds,
        "failures": [line for suite in suites for line in suite.get("failures", [])],
    }


def line(part: str, counts: dict[str, Any]) -> str:
    """One line for a reader: what ran, what failed, and on how many problems."""
    text = f"{part}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
    if counts["not_run"]:
        text += f", {counts['not_run']} not run"
    return f"{text}; {counts['problems']} problems against an oracle; {counts['seconds']} s"
