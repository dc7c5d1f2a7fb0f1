"""CPU tests of the benchmark tools: cells, digest, record bookkeeping, parsers and generated tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import digest, record, tables
from benchmarks.cells import PRESETS, parse_cell, parse_cells


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
    old = _record(files, ("tests", "bench:host"), "2026-01-01")
    old["tests"], old["bench"] = {"passed": 1}, [{"op": "host", "n": 1}]
    new = _record(files, ("tests",), "2026-01-02")
    new["tests"] = {"passed": 2}
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, content in zip(paths, (old, new), strict=True):
        record.save(content, path)
    record.merge(paths[::-1], tmp_path / "out.json")
    merged = json.loads((tmp_path / "out.json").read_text())
    assert merged["tests"] == {"passed": 2}
    assert merged["bench"] == [{"op": "host", "n": 1}]
    assert merged["date"] == "2026-01-02"


def test_parts_are_selected_by_name() -> None:
    assert record.select("") == list(record.PARTS)
    assert record.select("tests,bench") == [p for p in record.PARTS if p.startswith("bench:")] + ["tests"]
    with pytest.raises(SystemExit, match="nothing"):
        record.select("nothing")


def test_sanitizer_verdicts() -> None:
    parts = pytest.importorskip("benchmarks.parts")
    assert parts.parse_sanitizer("========= ERROR SUMMARY: 0 errors") == "clean"
    assert parts.parse_sanitizer("========= ERROR SUMMARY: 3 errors") == "3 errors"
    race = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, {} warnings)"
    assert parts.parse_sanitizer(race.format(0, 0, 0)) == "clean"
    assert parts.parse_sanitizer(race.format(2, 1, 1)) == "1 errors (1 warnings)"
    assert parts.parse_sanitizer("Device not supported").startswith("not run: Device")


def test_junit_counts(tmp_path: Path) -> None:
    parts = pytest.importorskip("benchmarks.parts")
    junit = tmp_path / "junit.xml"
    cases = ['<testcase classname="a" name="x"/>']
    cases += ['<testcase classname="a" name="y"><failure message="no\ngood"/></testcase>']
    cases += ['<testcase classname="a" name="z"><skipped/></testcase>']
    junit.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    assert parts.parse_junit(junit) == {"passed": 1, "failed": 1, "skipped": 1, "failures": ["a::y: no good"]}


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
    everything = tables.render(page.replace(" forward-bf16", ""), made)
    assert "ahead in 1" in everything
    with pytest.raises(SystemExit, match="no block"):
        tables.render(page.replace("forward-bf16", "wrong"), made)
