"""CPU tests of what measures 8-bit attention: contenders on the emulation, peers by stand-ins, targets, tables."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashhopper
from benchmarks import (
    accuracy_fp8,
    fp8,
    parts,
    peers_fp8,
    perplexity,
    quantize_bandwidth,
    record,
    sanitize_subset,
    tables,
    targets,
)
from benchmarks.cells import PRESETS, parse_cell
from benchmarks.harness import cell_of, table
from benchmarks.peers import inputs
from benchmarks.timing import Contender
from flashhopper import backends
from flashhopper.fp8 import emulate
from flashhopper.report import contenders

OURS = ("flashhopper_e4m3", "flashhopper_accurate", "flashhopper_e4m3_call", "flashhopper_accurate_call")


@pytest.fixture(autouse=True)
def _tiled() -> Iterator[None]:
    """The loaders set the backend of the process."""
    before = backends.backend()
    yield
    flashhopper.set_backend(before)


def _fake_timer(contenders: Sequence[Contender], rounds: int) -> None:
    for contender in contenders:
        contender.call()
        contender.times_ms = [1.0] * rounds


def _fake_fa3(q8: Any, k8: Any, v8: Any, softmax_scale: Any = None, causal: bool = False, **scales: Any) -> Any:
    return flashhopper.flash_attn_fp8_func(q8, k8, v8, softmax_scale=softmax_scale, causal=causal, **scales)


class _Port:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: self


class _FakeGraph:
    """Takes cuDNN's calls and attends by SDPA on what the buffers of its ports hold."""

    refuses_virtual_amax_s = False

    def __init__(self, **_: Any) -> None:
        self.workspace_asked = False

    def tensor(self, name: str, dim: list[int], stride: list[int], data_type: object) -> _Port:
        assert len(dim) == len(stride) == 4
        return _Port()

    def sdpa_fp8(self, **named: Any) -> tuple[Any, ...]:
        self.named, self.outputs = named, [_Port() for _ in range(4)]
        return tuple(self.outputs)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0

    def check_support(self) -> None:
        if self.refuses_virtual_amax_s:
            type(self).refuses_virtual_amax_s = False
            raise RuntimeError("declare amax_s")

    def execute(self, buffers: dict[Any, torch.Tensor], workspace: torch.Tensor, handle: object) -> None:
        get = {name: buffers[port].float() for name, port in self.named.items() if isinstance(port, _Port)}
        q, k, v = (get[x] * get[f"descale_{x}"] for x in "qkv")
        assert get["scale_s"] * get["descale_s"] == 1.0
        is_causal, scale = self.named["use_causal_mask"], self.named["attn_scale"]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
        buffers[self.outputs[0]].copy_((out * get["scale_o"]).clamp(-448, 448).to(torch.float8_e4m3fn))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """FA3 and cuDNN as far as the contenders see them."""
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", SimpleNamespace(flash_attn_func=_fake_fa3))  # type: ignore[arg-type]
    names = {"FP8_E4M3": 0, "FLOAT": 1}
    cudnn = {
        "data_type": SimpleNamespace(**names),
        "heur_mode": SimpleNamespace(A=0, FALLBACK=1),
        "pygraph": _FakeGraph,
    }
    cudnn |= {"create_handle": lambda: None, "set_stream": lambda handle, stream: None}
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(**cudnn))  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))


def test_preset_is_the_16_bit_one() -> None:
    cells = PRESETS["fp8"]
    assert cells == PRESETS["issue2"][:18]
    assert {(c.head_dim, c.causal, c.seqlen_q) for c in cells} == {
        (d, causal, s) for d in (64, 128, 256) for causal in (False, True) for s in (2048, 8192, 16384)
    }


@pytest.mark.parametrize("causal", ["full", "causal"])
def test_every_contender_computes_attention(stand_ins: None, causal: str) -> None:
    cells = [parse_cell(f"bf16:64:{causal}:140:b=1:h=1")]
    rows = fp8.time_cells(cells, peers_fp8.load_all("tiled"), 3, device="cpu", timer=_fake_timer)
    assert rows[0]["errors"] == {}
    assert list(rows[0]["value"]) == [*OURS, peers_fp8.BF16, "fa3", "cudnn"]
    assert rows[0]["op"] == "fwd_fp8"
    assert rows[0]["value"]["fa3"] == pytest.approx(cells[0].flops / 1e9, rel=1e-4)
    assert cell_of(rows[0]).name.startswith("e4m3:64:")
    assert json.loads(json.dumps(rows)) == rows


def test_cudnn_gets_amax_s_where_it_wants_it(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_FakeGraph, "refuses_virtual_amax_s", True)
    peers = [peer for peer in peers_fp8.load_all("tiled") if peer.name == "cudnn"]
    cells = [parse_cell("bf16:64:full:128:b=1:h=1"), parse_cell("bf16:64:causal:sq=64:sk=128:b=1:h=1")]
    first, second = fp8.time_cells(cells, peers, 3, device="cpu", timer=_fake_timer)
    assert first["errors"] == {}
    assert "top-left" in second["errors"]["cudnn"]


def test_what_fails_or_computes_something_else_is_an_entry() -> None:
    def raises(*_: Any) -> peers_fp8.Prepared:
        raise RuntimeError("no such shape")

    def wrong(cell: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> peers_fp8.Prepared:
        return peers_fp8.Prepared(lambda: v, peers_fp8.first)

    peers = [peers_fp8.Peer8("fa3", raises), peers_fp8.Peer8("x", wrong), peers_fp8.Peer8("y", unavailable="missing")]
    cells = [parse_cell("bf16:64:full:64:b=1:h=1")]
    row = fp8.time_cells(cells, peers, 3, device="cpu", timer=_fake_timer)[0]
    assert "no such shape" in row["errors"]["fa3"]
    assert "wrong result" in row["errors"]["x"]
    assert row["errors"]["y"] == "missing"

    def broken(contenders: object, rounds: int) -> None:
        raise RuntimeError("device lost")

    row = fp8.time_cells(cells, peers, 3, device="cpu", timer=broken)[0]
    assert "device lost" in row["errors"]["fa3"]
    missing = {p.name for p in peers_fp8.load_all("tiled") if p.unavailable}
    assert missing >= {"fa3", "cudnn"} - {name for name in ("cudnn",) if name in sys.modules}


def test_scales_a_kv_head_cover_their_group() -> None:
    q, k, _ = inputs(parse_cell("bf16:64:full:32:b=2:h=4:kvh=2"), 0, "cpu")
    q[1, 3, 2, 5] = 40.0
    data, descale = peers_fp8.quantize_per_head(q, 2)
    assert descale.shape == (2, 2)
    assert descale[1, 1].item() == pytest.approx(40 / 448)
    back = data.float() * descale.repeat_interleave(2, 1)[:, None, :, None]
    assert (back - q.float()).abs().max() < 40 / 16
    assert peers_fp8.quantize_per_head(k, 2)[1].shape == (2, 2)


def test_float64_attention_and_its_ideal(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.double() for x in inputs(parse_cell("bf16:64:causal:sq=70:sk=150:b=2:h=4:kvh=2"), 0, "cpu"))
    monkeypatch.setattr(accuracy_fp8, "CHUNK_SCORES", 150 * 32)  # blocks of 32 queries, a ragged one last
    for causal in (False, True):
        with flashhopper.set_backend("tiled"):
            expected = flashhopper.flash_attn_func(q, k, v, softmax_scale=0.2, causal=causal)
        out, nothing = accuracy_fp8.attend64(q, k, v, causal, 0.2)
        assert nothing is None
        assert (out - expected).abs().max() < 1e-12
    mean = torch.full((2, 2, 64), 3.0)
    out, ideal = accuracy_fp8.attend64(q, k, v + 3.0, True, 0.2, mean, ideal=True)
    _, uncentred = accuracy_fp8.attend64(q, k, v + 3.0, True, 0.2, ideal=True)
    assert 1e-3 < (ideal - out).norm() / (out - 3.0).norm() < 5e-2
    assert (uncentred - out).norm() > 1.5 * (ideal - out).norm()


def test_accuracy_rows(stand_ins: None, tmp_path: Path) -> None:
    attends = accuracy_fp8.contenders("tiled")
    assert set(attends) == {*targets.RECIPES, "fa3"}
    chosen = list(accuracy_fp8.problems(tmp_path / "none", ((192, 192, 2), (320, 64, 2)), (64,), "cpu"))
    assert {p.family for p in chosen} == {"llm", "normal", "outlier", "kbias", "vmean", "peaky"}
    assert all(p.causal for p in chosen)
    some = [p for p in chosen if p.family in ("kbias", "vmean") or p.layer == "layer5"]
    rows = [accuracy_fp8.row_of(problem, attends) for problem in some]
    shape = {"batch": 1, "seqlen_q": 128, "heads": 1, "head_dim": 64}
    paper = next(iter(accuracy_fp8.paper_problems(shape, "cpu")))
    rows.append(accuracy_fp8.row_of(paper, attends, targets.PAPER_TEST))
    for row in rows:
        assert row["errors"] == {}
        for found in row["results"].values():
            # On the CPU the kernel is its emulation, so every contender is close to its ideal.
            assert 0.5 < found["relative_rmse"] / found["ideal_relative_rmse"] < 1.5
            assert found["cosine"] > 0.98
    kbias = next(row for row in rows if row["family"] == "kbias")
    assert kbias["targets"]["accurate"]["limit"] == 0.40
    assert rows[-1]["targets"] == {}
    text = tables.render(
        "<!-- figures:begin accuracy-8bit -->\n<!-- figures:end -->", {"bench": [], "accuracy:fp8": rows}
    )
    assert "| llm layer5 | 320 |" in text
    assert "Table 3" in text
    assert json.loads(json.dumps(rows)) == rows


def test_failures_of_accuracy_are_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = next(iter(accuracy_fp8.paper_problems({"batch": 1, "seqlen_q": 16, "heads": 1, "head_dim": 64}, "cpu")))

    def no_inputs() -> Any:
        raise RuntimeError("no inputs")

    attends = {"fa3": lambda p: 1 / 0, "e4m3": lambda p: accuracy_fp8.Attended(p.q, no_inputs)}
    row = accuracy_fp8.row_of(problem, attends)  # type: ignore[arg-type]
    assert "ZeroDivisionError" in row["errors"]["fa3"]
    assert row["errors"]["e4m3"] == "RuntimeError: no inputs"
    assert row["results"]["e4m3"]["relative_rmse"] > 0
    assert targets.ideal_ratio(row, "e4m3") is None
    monkeypatch.setattr(accuracy_fp8, "attend64", no_inputs)
    assert "reference" in accuracy_fp8.row_of(problem, attends)["errors"]  # type: ignore[arg-type]


def _accuracy_row(family: str, keys: int, errors: dict[str, float], ideal: float = 1.0, **more: Any) -> dict[str, Any]:
    results = {
        name: {"rmse": x, "relative_rmse": x, "inputs_relative_rmse": 0.02, "ideal_relative_rmse": x / ideal}
        for name, x in errors.items()
    }
    shape = {"head_dim": 128, "seqlen_k": keys, "layer": None, "test": None}
    return {"family": family, **shape, "results": results, "errors": {}, **more}


def test_targets_are_judged() -> None:
    row = _accuracy_row("outlier", 2048, {"fa3": 0.10, "accurate": 0.05, "e4m3": 0.071})
    assert targets.judge(row, "accurate") == (pytest.approx(0.5), 0.50)
    assert targets.judge(row, "accurate").met  # type: ignore[union-attr]
    assert not targets.judge(row, "e4m3").met  # type: ignore[union-attr]
    assert targets.judge(row, "paper") is None
    assert targets.judge({**row, "test": targets.PAPER_TEST}, "accurate") is None
    alone = _accuracy_row("normal", 2048, {"accurate": 0.05})
    assert targets.judge(alone, "accurate") is None
    vmean = _accuracy_row("vmean", 2048, {"accurate": 2.9e-3, "paper": math.nan})
    assert targets.judge(vmean, "accurate").met  # type: ignore[union-attr]
    assert not targets.judge(vmean, "paper").met  # type: ignore[union-attr]
    assert targets.judge(_accuracy_row("kbias", 1, {"fa3": 1.0, "paper": 1.0}), "paper") is None
    rows = [_accuracy_row("normal", keys, {"e4m3": x}) for keys, x in ((131072, 0.03), (2048, 0.02), (16384, 9.0))]
    assert targets.growth(rows, "e4m3") == pytest.approx(1.5)
    assert targets.growth(rows[:1], "e4m3") is None
    assert targets.ideal_ratio(_accuracy_row("normal", 1, {"e4m3": 0.02}, ideal=1.25), "e4m3") == pytest.approx(1.25)


def test_targets_are_those_of_the_report() -> None:
    assert contenders.TARGETS == targets.TARGETS
    assert contenders.VMEAN_TARGET == targets.VMEAN_TARGET


def _speed_row() -> dict[str, Any]:
    value = {"flashhopper_e4m3": 1000.0, "flashhopper_accurate": 900.0, "flashhopper_e4m3_call": 800.0}
    value |= {"flashhopper_bf16": 500.0, "fa3": 800.0}
    shape = {**parse_cell("bf16:128:causal:8192").as_row(), "dtype": "e4m3"}
    return {**shape, "op": "fwd_fp8", "unit": "TFLOP/s", "value": value, "spread": {}, "errors": {}}


def _quantize_row() -> dict[str, Any]:
    shape = quantize_bandwidth.cell_for(96).as_row()
    value, share = {"copy": 4.0, "plain": 3.6, "accurate": 3.0}, {"plain": 0.9, "accurate": 0.75}
    more = {"microseconds": {}, "megabytes": {}, "spread": {}, "errors": {}}
    return {**shape, "op": "quantize", "unit": "TB/s", "value": value, "share": share, **more}


def test_tables_of_8_bit_rows() -> None:
    page = "<!-- figures:begin -->\n<!-- figures:end -->\n"
    errors = {"fa3": 0.05, "accurate": 0.035, "e4m3": 0.06, "paper": 0.05}
    rows = [_accuracy_row("normal", keys, errors, ideal=1.2) for keys in (2048, 131072)]
    rows.append(_accuracy_row("llm", 320, errors, layer="layer5"))
    rows.append(_accuracy_row("outlier", 2048, errors, test=targets.PAPER_TEST))
    made: dict[str, Any] = {"bench": [_speed_row(), _quantize_row()], "accuracy:fp8": rows}
    text = tables.render(page, made)
    assert "| 128 | causal | 8192 | 1000 | 900 | 800 | 500 | 800 | 1.25 | 1.12 | 2.00 | 1.80 |" in text
    assert "Fp8Recipe.e4m3(), against FA3's e4m3 in 1 cells: 1.25 to 1.25" in text
    assert "| 96 | 4.00 | 90% | 75% |" in text
    assert "| normal | 2048 | 5.0e-02 | 5.0e-02 (1.00) | **6.0e-02 (1.20)** | 3.5e-02 (0.70) |" in text
    assert "| normal | accurate() | 0.80 | 0.70 | met, 2 of 2 | **1.20** | 1.00 |" in text
    assert "| normal | e4m3() | 1.05 | 1.20 | not met, 0 of 2 | **1.20** | 1.00 |" in text
    assert "| llm layer5 | 320 |" in text
    assert "| 0 | 5.0e-02 | 5.0e-02 | 6.0e-02 | 3.5e-02 |" in text
    assert tables.render(text, made) == text
    assert "8 bits" not in tables.render(page, {"bench": []})
    summary = parts.summary(made)
    assert "whole call" in summary
    assert "Quantiser" in summary
    assert "fwd_fp8" not in summary  # the 16-bit table takes its best peer from 16-bit rows
    assert "cell" in table([_speed_row()])


def test_record_keeps_8_bit_parts_apart(tmp_path: Path) -> None:
    made = record.empty()
    for part, content in (
        ("bench:fwd", [{"op": "fwd"}]),
        ("bench:fp8", [_speed_row()]),
        ("bench:quantize", [_quantize_row()]),
        ("accuracy", [{"op": "fwd"}]),
        ("accuracy:fp8", [_accuracy_row("normal", 1, {})]),
    ):
        record._put(made, part, content)
        record._put(made, part, content)  # measured again: replaced
        made["parts"][part] = {"digest": "x", "commit": "c", "date": "2026-01-01"}
        assert record._get(made, part) == content
    assert len(made["bench"]) == 3
    record.save(made, tmp_path / "a.json")
    record.merge([tmp_path / "a.json"], tmp_path / "out.json")
    merged = record.load(tmp_path / "out.json")
    assert merged["accuracy:fp8"] == made["accuracy:fp8"]
    assert sorted(row["op"] for row in merged["bench"]) == ["fwd", "fwd_fp8", "quantize"]
    assert record.select("accuracy") == ["accuracy"]
    assert record.select("bench:fp8,accuracy:fp8") == ["bench:fp8", "accuracy:fp8"]
    assert sorted([*parts.RUNNERS, *parts.WITH_GIVEN]) == sorted(record.PARTS)


def test_what_is_given_reaches_the_part_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy_fp8, "measure", lambda rounds, tensors=None: [rounds, tensors])
    given = record.Given(tensors=Path("x"), gguf=Path("y"), ids=Path("z"))
    assert parts.run("accuracy:fp8", 3, given) == [3, Path("x")]
    monkeypatch.setattr(perplexity, "measure", lambda gguf, ids: [gguf, ids])
    assert parts.run("perplexity", 3, given) == [Path("y"), Path("z")]
    monkeypatch.setattr(parts, "bench_fwd", lambda rounds, peers: list(peers))
    assert parts.run("bench:fwd", 3, given) == list(parts.PEERS)
    assert parts.run("bench:fwd", 3, record.Given(peers=("fa3",))) == ["flashhopper", "fa3"]
    monkeypatch.setitem(parts.RUNNERS, "large", lambda rounds: rounds)
    assert parts.run("large", 3, given) == 3


def test_quantiser_rows() -> None:
    cell = quantize_bandwidth.cell_for(96, 256, 256)
    assert quantize_bandwidth.cell_for(128).batch * quantize_bandwidth.SEQLEN == quantize_bandwidth.TOKENS

    def in_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: flashhopper.Fp8Recipe) -> Any:
        if recipe == flashhopper.Fp8Recipe.paper():
            raise RuntimeError("refused")
        with flashhopper.set_backend("tiled"):
            return flashhopper.quantize_fp8(q, k, v, recipe)

    row = quantize_bandwidth.row_for(cell, 3, device="cpu", run=in_torch, timer=_fake_timer)
    assert row["op"] == "quantize"
    assert "refused" in row["errors"]["paper"]
    assert set(row["share"]) == {"plain", "e4m3", "accurate"}
    plain = 3 * 256 * 21 * (2 * 96 + 96) + 3 * 2 * 21 * 4  # 16 bits in, 8 bits and a scale a block of 128 out
    assert row["megabytes"]["plain"] == round(plain / 1e6, 1)
    assert row["share"]["accurate"] > row["share"]["plain"]  # more bytes in the fake timer's same time
    assert any("refused" in line for line in quantize_bandwidth.lines(row))
    refused = quantize_bandwidth.row_for(cell, 3, device="cpu", timer=_fake_timer)
    assert "not on a CUDA device" in refused["errors"]["plain"]
    assert refused["share"] == {}
    assert len(quantize_bandwidth.lines(refused)) == 4


@pytest.mark.parametrize(("case", "recipe"), sanitize_subset.EIGHT_BIT)
def test_bounds_of_the_sanitizer_subset(
    case: sanitize_subset.Case, recipe: flashhopper.Fp8Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels' calls replaced by torch operations: what the bounds allow is far from what these lose."""
    hopper = sanitize_subset.hopper_fp8

    def quantize(q: Any, k: Any, v: Any, chosen: Any) -> Any:
        with flashhopper.set_backend("tiled"):
            return flashhopper.quantize_fp8(q, k, v, chosen)

    def forward(qkv: Any, scale: float, left: int, right: int, margin: int) -> Any:
        return emulate.attention(qkv, scale, window_size=(left, right))

    monkeypatch.setattr(hopper, "quantize", quantize)
    monkeypatch.setattr(hopper, "forward", forward)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    lost, error = sanitize_subset._run_8bit(case, recipe, torch.Generator().manual_seed(0))
    assert 1e-3 < lost < sanitize_subset.BOUND_8BIT
    assert error == 0.0
