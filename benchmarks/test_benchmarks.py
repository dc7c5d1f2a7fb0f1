"""CPU tests of the benchmark tools: cells, digest, record bookkeeping, parsers and generated tables."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import pytest

from benchmarks import digest, gpu_tests, perplexity, record, settling, suite_log, tables, timing
from benchmarks.cells import PRESETS, parse_cell, parse_cells
from benchmarks.timing import orders


def test_issue_preset_is_the_paper_workload() -> None:
    cells = PRESETS["issue2"]
    assert len(cells) == 36
    assert {cell.batch * cell.seqlen_q for cell in cells} == {16384}
    assert {cell.heads * cell.head_dim for cell in cells} == {2048}


@pytest.mark.parametrize("cell", [c for cells in PRESETS.values() for c in cells], ids=lambda c: c.name)
def test_names_parse_back(cell: object) -> None:
    assert parse_cell(cell.name) == cell  # type: ignore[attr-defined]


def test_backward_presets_are_the_same_workloads() -> None:
    cells = PRESETS["issue3"]
    assert len(cells) == 18
    assert {cell.op for cell in cells} == {"bwd"}
    assert [cell.name.removeprefix("bwd:") for cell in cells] == [c.name for c in PRESETS["issue2"][:18]]
    assert all(cell.flops == 2.5 * parse_cell(cell.name.removeprefix("bwd:")).flops for cell in cells)
    assert len(PRESETS["bwd_head_dims"]) == 6
    assert "op" not in cells[0].as_row()  # a row has its own


def test_explicit_shapes() -> None:
    cell = parse_cell("bf16:192/128:causal:sq=300:sk=77:b=2:h=4:kvh=2")
    assert (cell.head_dim, cell.head_dim_v, cell.seqlen_q, cell.seqlen_k) == (192, 128, 300, 77)
    assert (cell.batch, cell.heads, cell.kv_heads) == (2, 4, 2)
    assert parse_cell(cell.name) == cell


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (3, 7), (7, 3), (1, 1), (4, 0)])
def test_kept_scores_by_counting(seqlen_q: int, seqlen_k: int) -> None:
    cell = parse_cell(f"bf16:64:causal:sq={seqlen_q}:sk={seqlen_k}:b=1:h=1")
    kept = sum(j <= i + seqlen_k - seqlen_q for i in range(seqlen_q) for j in range(seqlen_k))
    assert cell.kept_scores == kept


def test_causal_counts_half() -> None:
    assert parse_cell("bf16:128:causal:8192").flops * 2 == parse_cell("bf16:128:full:8192").flops


@pytest.mark.parametrize("text", ["bf16:64:full", "fp8:64:full:1", "bf16:64:window:1", "bf16:64:full:x=1", ""])
def test_bad_cells_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="cell"):
        parse_cells(text)


def test_nobody_is_always_first() -> None:
    draws = random.Random(0)
    cells = [orders(5, 4, draws) for _ in range(200)]
    for turns in cells:
        for forwards, backwards in (turns[:2], turns[2:]):
            assert sorted(forwards) == list(range(5))
            assert backwards == forwards[::-1]
    firsts = [turns[0][0] for turns in cells]
    assert all(firsts.count(index) > 20 for index in range(5))
    assert len({tuple(turns[0]) for turns in cells}) > 60
    assert len(orders(3, 1, draws)) == 1
    assert orders(0, 2, draws) == [[], []]


def test_what_is_measured_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round keeps one time of each; what runs in front of the first counts for nobody; who raises stops alone."""
    ran: list[str] = []

    def elapsed(call: timing.Call, *_: object) -> float:
        call()
        return float(len(ran))

    def breaks() -> None:
        if len(ran) >= 7:  # in the second round
            raise ValueError("a bad shape")
        ran.append("c")

    monkeypatch.setattr(timing, "_warm_up", lambda contender: contender.call())
    monkeypatch.setattr(timing, "elapsed_ms", elapsed)
    contenders = [timing.Contender(name, lambda name=name: ran.append(name)) for name in "ab"]  # type: ignore[misc]
    contenders.append(timing.Contender("c", breaks))
    timing.measure(contenders, 2)
    assert ran[:3] == ["a", "b", "c"]  # warm, in front of
    assert ran[3] == ran[6]  # what ends the first round, untimed,
    assert sorted(ran[4:7]) == ["a", "b", "c"]  # and that round
    assert [len(c.times_ms) for c in contenders] == [2, 2, 1]
    assert [c.error for c in contenders] == [None, None, "ValueError: a bad shape"]


def test_rates_by_the_time_since_a_change() -> None:
    ends = [10.0 * i for i in range(1, 11)] + [100 + 20.0 * i for i in range(1, 6)]  # half as fast after 100 ms
    fast, slow, later = settling.rates(ends, 1e9, (0.0, 100.0, 200.0, 300.0))
    assert (fast, slow) == (pytest.approx(0.1), pytest.approx(0.05))
    assert math.isnan(later)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("cpp/core/a.hpp", "cmake/b.cmake", "CMakeLists.txt", "python/flashhopper/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_digest_follows_sources_alone(tree: Path) -> None:
    before = digest.sources(tree)
    assert list(before) == ["CMakeLists.txt", "cmake/b.cmake", "cpp/core/a.hpp", "python/flashhopper/c.py"]
    (tree / "python/flashhopper/__pycache__").mkdir()
    for name in ("python/flashhopper/__pycache__/c.py", "cpp/x.so", "cpp/.hidden", "python/flashhopper/py.typed"):
        (tree / name).write_text("not a source")
    assert digest.sources(tree) == before
    (tree / "cpp/core/a.hpp").write_text("changed")
    after = digest.sources(tree)
    assert digest.digest(after) != digest.digest(before)
    assert digest.changed({k: v[:16] for k, v in before.items()}, after) == ["changed  cpp/core/a.hpp"]


def _record(files: dict[str, str], parts: tuple[str, ...], date: str) -> record.Record:
    here = digest.digest(files)
    made = record.empty()
    made.update(digest=here, date=date, gpu="NVIDIA H200", commit="")
    made["sources"][here] = {name: content[:16] for name, content in files.items()}
    for part in parts:
        made["parts"][part] = {"digest": here, "commit": "", "date": date}
    return made


def test_check_tells_fresh_from_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = digest.sources()
    path = tmp_path / "record.json"
    assert record.check(path) == 1
    record.save(_record(files, record.PARTS, "2026-01-01"), path)
    assert record.check(path) == 0
    record.save(_record({**files, "CMakeLists.txt": "0" * 64}, record.PARTS, "2026-01-01"), path)
    capsys.readouterr()
    assert record.check(path) == 1
    assert "changed  CMakeLists.txt" in capsys.readouterr().out
    record.save(_record(files, record.PARTS[:-1], "2026-01-01"), path)
    assert record.check(path) == 1


def test_merge_takes_the_newest_of_each_part(tmp_path: Path) -> None:
    files = digest.sources()
    old = _record(files, ("tests:dense", "bench:host"), "2026-01-01")
    old["tests:dense"], old["bench"] = {"passed": 1}, [{"op": "host", "n": 1}]
    new = _record(files, ("tests:dense", "tests:fp8"), "2026-01-02")
    new["tests:fp8"] = {"passed": 3}
    new["tests:dense"] = {"passed": 2}
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, content in zip(paths, (old, new), strict=True):
        record.save(content, path)
    record.merge(paths[::-1], tmp_path / "out.json")
    merged = json.loads((tmp_path / "out.json").read_text())
    assert (merged["tests:dense"], merged["tests:fp8"]) == ({"passed": 2}, {"passed": 3})
    assert merged["tests"] | {"passed": 5, "failed": 0, "skipped": 0, "failures": []} == merged["tests"]
    assert merged["bench"] == [{"op": "host", "n": 1}]
    assert merged["date"] == "2026-01-02"


def test_merge_names_the_commit_that_has_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a copy was measured that had no commit of its own, or changes beside one."""
    files = digest.sources()
    made = _record(files, ("tests:dense", "tests:fp8", "tests:features", "sanitizer"), "2026-01-01")
    for part, commit in (("tests:fp8", "0123+"), ("tests:features", "4567"), ("sanitizer", "89ab+")):
        made["parts"][part]["commit"] = commit
    made["parts"]["sanitizer"]["digest"] = "others"
    record.save(made, tmp_path / "record.json")
    monkeypatch.setattr(digest, "commit", lambda: "cdef")
    record.merge([tmp_path / "record.json"], tmp_path / "out.json")
    merged = json.loads((tmp_path / "out.json").read_text())
    assert [part["commit"] for part in merged["parts"].values()] == ["cdef", "cdef", "4567", "89ab+"]
    assert merged["commit"] == "cdef"


def test_parts_are_selected_by_name() -> None:
    assert record.select("") == list(record.PARTS)
    chosen = [p for p in record.PARTS if p.startswith(("bench:", "tests:"))]
    assert record.select("tests,bench") == chosen
    assert record.select("tests:fp8,tests:dense") == ["tests:dense", "tests:fp8"]
    assert record.select("accuracy") == ["accuracy"]
    with pytest.raises(SystemExit, match="nothing"):
        record.select("nothing")


def test_parts_wait_for_the_gpus_and_the_files_they_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts, nothing = ["perplexity", "tests:dense", "tests:two_gpus"], record.Given()
    assert record.runnable(parts, "", 1, nothing) == ["tests:dense"]
    printed = capsys.readouterr().out
    assert "tests:two_gpus: left as it is, needs 2 GPUs" in printed
    assert "perplexity: left as it is, needs --gguf and --ids" in printed
    assert record.runnable(parts, "perplexity,tests:dense,tests:two_gpus", 1, nothing) == parts
    assert record.runnable(parts, "", 2, record.Given(gguf=tmp_path, ids=tmp_path)) == parts
    assert [path.name for path in gpu_tests.files("tests:two_gpus")] == ["test_gpu_distributed.py"]


def test_perplexity_is_what_the_example_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys; open(sys.argv[sys.argv.index('--json') + 1], 'w').write(json.dumps(sys.argv))"
    )
    monkeypatch.setattr(perplexity, "PROGRAM", program)
    given = perplexity.measure(Path("a.gguf"), Path("ids.json"))
    for name, value in (("--gguf", "a.gguf"), ("--ids", "ids.json"), ("--tokens", "16384"), ("--device", "cuda")):
        assert given[given.index(name) + 1] == value
    with pytest.raises(RuntimeError, match="needs --gguf and --ids"):
        perplexity.measure(None, Path("ids.json"))


def test_the_table_of_perplexities() -> None:
    rows = {"eager": {"perplexity": 20.0}, "flashhopper": {"perplexity": 19.98}, "Fp8Recipe.e4m3()": {"perplexity": 21}}
    engines = {"flashhopper, full": "hopper: a", "flashhopper, window": "hopper: a"}
    engines |= {"Fp8Recipe.e4m3(), full": "hopper: a", "Fp8Recipe.e4m3(), window": "tiled: b"}
    sizes = {"model": "M", "tokens": 16384, "context": 2048, "dtype": "bf16"}
    text = tables.block({"perplexity": {**sizes, "rows": rows, "engines": engines}}, "perplexity")
    assert "Perplexity of M, on 16,384 tokens" in text
    assert "| eager | 20.0000 | +0.000 % | torch |" in text
    assert "| flashhopper | 19.9800 | -0.100 % | hopper |" in text
    assert "| Fp8Recipe.e4m3() | 21.0000 | +5.000 % | hopper and tiled |" in text
    assert tables.block({}, "perplexity") == ""


def test_sanitizer_verdicts() -> None:
    parts = pytest.importorskip("benchmarks.parts")
    assert parts.parse_sanitizer("========= ERROR SUMMARY: 0 errors") == "clean"
    assert parts.parse_sanitizer("========= ERROR SUMMARY: 3 errors") == "3 errors"
    race = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, {} warnings)"
    assert parts.parse_sanitizer(race.format(0, 0, 0)) == "clean"
    assert parts.parse_sanitizer(race.format(2, 1, 1)) == "1 errors (1 warnings)"
    report = "========= Error: Race reported between Write access at f(int, a::b<(int)0>)+0x79 in tma.hpp:55\n"
    assert parts.parse_sanitizer(2 * report + race.format(2, 2, 0)) == "2 errors (2 at tma.hpp:55)"
    assert parts.parse_sanitizer("Device not supported").startswith("not run: Device")


SMALL_SUITE = """
import os, time
import pytest

@pytest.mark.parametrize("index", range(4))
def test_right(index, record_property):
    record_property("problems", 10)

def test_wrong():
    assert 1 == 2, "no good"

def test_skipped():
    pytest.skip("for a reason")

def test_slow():
    time.sleep(float(os.environ["SLEEP"]))

def test_last():
    pass
"""


def _logged(folder: Path, monkeypatch: pytest.MonkeyPatch, sleep: float, seconds: int) -> record.Record:
    """What the record keeps of a suite of one file, run as the GPU suites are."""
    (folder / "test_small.py").write_text(SMALL_SUITE.replace("def test_", "@pytest.mark.gpu\ndef test_"))
    monkeypatch.setenv("SLEEP", str(sleep))
    monkeypatch.setattr(gpu_tests, "FOLDER", folder)
    monkeypatch.setattr(gpu_tests, "WORKERS", 2)
    monkeypatch.setitem(gpu_tests.SUITES, "tests:small", gpu_tests.Suite(("test_small.py",), seconds))
    monkeypatch.setattr(gpu_tests, "_suite_of", lambda path: "tests:small")
    return gpu_tests.run("tests:small")


def test_a_suite_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = _logged(tmp_path, monkeypatch, 0.0, 60)
    assert [counts[key] for key in ("passed", "failed", "skipped", "not_run", "problems")] == [6, 1, 1, 0, 40]
    assert len(counts["failures"]) == 1
    assert re.search(r"test_small.py::test_wrong: .*no good", counts["failures"][0])
    assert list(counts["file_seconds"]) == ["test_small.py"]
    assert "6 passed, 1 failed, 1 skipped; 40 problems" in gpu_tests.line("tests:small", counts)


def test_a_suite_that_is_cut_short_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # in order: no workers
    counts = _logged(tmp_path, monkeypatch, 60.0, 6)
    assert [counts[key] for key in ("passed", "failed", "skipped", "not_run", "problems")] == [4, 2, 1, 1, 40]
    assert "test_slow: did not finish" in counts["failures"][1]
    assert "1 not run" in gpu_tests.line("tests:small", counts)


def test_a_suite_without_tests_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests, "files", lambda part: [tmp_path])
    with pytest.raises(RuntimeError, match="no GPU test ran"):
        gpu_tests.run("tests:dense")


def test_every_gpu_test_file_is_in_one_suite() -> None:
    found = [path for part in gpu_tests.SUITES for path in gpu_tests.files(part)]
    assert sorted(found) == sorted(gpu_tests.FOLDER.glob("test_*.py"))
    assert all(gpu_tests.files(part) for part in ("tests:dense", "tests:backward", "tests:fp8"))


def test_a_dead_worker_is_a_failure(tmp_path: Path) -> None:
    """Its test has no teardown; pytest-xdist reports it once, at "???"."""
    writer = suite_log.SuiteLog((tmp_path / "log.jsonl").open("w"))
    writer.pytest_xdist_node_collection_finished(["a::x", "a::y"])
    writer.pytest_runtest_logstart("a::x")
    location = ("a", 0, "x")
    writer.pytest_runtest_logreport(
        pytest.TestReport("a::x", location, {}, "failed", "worker 'gw0' crashed", "???", duration=0)  # type: ignore[arg-type]
    )
    writer.pytest_sessionfinish()
    counts = gpu_tests.read_log(tmp_path / "log.jsonl")
    assert counts["failures"] == ["a::x: worker 'gw0' crashed"]
    assert (counts["failed"], counts["not_run"]) == (1, 1)


def test_tables_are_made_from_the_record() -> None:
    made = _record({}, (), "2026-01-01")
    cell = {**parse_cell("bf16:128:causal:8192").as_row(), "op": "fwd", "unit": "TFLOP/s"}
    made["bench"] = [{**cell, "value": {"flashhopper": 700.0, "fa3": 650.0, "cudnn": 690.0}}]
    page = "# x\n<!-- figures:begin forward-bf16 -->\nold\n<!-- figures:end -->\ntail\n"
    text = tables.render(page, made)
    assert "| 128 | causal | 8192 | 700 | 650 | 690 | 1.01 |" in text
    assert text.endswith("<!-- figures:end -->\ntail\n")
    assert tables.render(text, made) == text
    assert tables.NOTHING in tables.render(page, None)
    some = {"passed": 1000, "failed": 1, "skipped": 0, "not_run": 2, "problems": 3000}
    made |= {"tests:dense": some, "tests:fp8": some}
    found = tables.block(made, "verification")
    assert "2,000 passed, 2 failed, 0 skipped, 4 not run, 6,000 problems" in found
    everything = tables.render(page.replace(" forward-bf16", ""), made)
    assert "ahead in 1" in everything
    with pytest.raises(SystemExit, match="no block"):
        tables.render(page.replace("forward-bf16", "wrong"), made)


def test_tables_name_parts_of_earlier_sources() -> None:
    entry = {"digest": "new", "date": "2026-01-02T03:04:05+00:00", "commit": "c"}
    record = {
        "digest": "new",
        "bench": [],
        "large": [],
        "parts": {"bench:bwd": {**entry, "digest": "old"}, "large": entry},
    }
    assert set(tables.PARTS_OF) == set(tables.BLOCKS) - {"source"}
    assert "bench:bwd (2026-01-02 03:04)" in tables._age(record, "backward")
    assert tables._age(record, "large") == ""
    assert tables._age(record, "forward-bf16") == ""
