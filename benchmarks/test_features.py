"""CPU tests of what measures windows, grouped heads and packed sequences: cases, contenders by stand-ins, tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashhopper
from benchmarks import features, oracle, parts, peers_features, record, tables, tables_features
from benchmarks.cells import Cell
from benchmarks.features import Case
from benchmarks.harness import cell_of
from benchmarks.peers import Peer
from benchmarks.timing import Contender
from flashhopper import backends

RAGGED, EVEN = (37, 5, 50), (32, 32)


@pytest.fixture(autouse=True)
def _tiled() -> Iterator[None]:
    """The loaders set the backend of the process."""
    before = backends.backend()
    yield
    flashhopper.set_backend(before)


def _timer(contenders: Sequence[Contender], rounds: int) -> None:
    for contender in contenders:
        contender.call()
        contender.times_ms = [1.0] * rounds


def _case(feature: str, op: str = "fwd", lengths: tuple[int, ...] = (), left: int = -1, kv_heads: int = 4) -> Case:
    batch, seqlen = (len(lengths), max(lengths)) if lengths else (2, 48)
    return Case(feature, Cell("bf16", 16, 16, True, batch, 4, kv_heads, seqlen, seqlen, op), left, lengths)


def _fa3(q: Any, k: Any, v: Any, *, causal: bool, window_size: tuple[int, int] = (-1, -1)) -> Any:
    return flashhopper.flash_attn_func(q, k, v, causal=causal, window_size=window_size)


def _fa3_varlen(
    q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, causal: bool
) -> Any:
    return flashhopper.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal
    )


class _Port:
    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)

    def set_ragged_offset(self, offsets: _Port) -> None:
        self.offsets = offsets

    def __getattr__(self, name: str) -> Any:
        def setter(value: Any) -> _Port:
            self.__dict__[name.removeprefix("set_")] = value
            return self

        return setter


class _Graph:
    """Takes cuDNN's calls and attends by the tiled engine on what the buffers of its ports hold, read as the ports'
    dimensions, strides and offsets say."""

    def __init__(self, **_: Any) -> None:
        pass

    def tensor(self, **given: Any) -> _Port:
        return _Port(**given)

    def sdpa(self, **named: Any) -> list[_Port]:
        self.named, self.outputs = named, [_Port() for _ in range(2)]
        return self.outputs

    def sdpa_backward(self, **named: Any) -> list[_Port]:
        self.named, self.outputs = named, [_Port() for _ in range(3)]
        return self.outputs

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0

    def _views(self, port: _Port, buffers: dict[_Port, torch.Tensor]) -> list[torch.Tensor]:
        """(1, heads, seqlen, head_dim) of every batch entry, on the memory of the port."""
        memory, (batch, *dims) = buffers[port], port.dim
        starts = [b * port.stride[0] for b in range(batch)]
        lengths = [dims[1]] * batch
        if self.named.get("use_padding_mask"):
            starts = buffers[port.offsets].flatten().tolist()
            assert starts[-1] == memory.numel()
            lengths = buffers[self.named["seq_len_q"]].flatten().tolist()
        return [
            memory.as_strided((1, dims[0], n, dims[2]), port.stride, start)
            for n, start in zip(lengths, starts, strict=False)
        ]

    def execute(self, buffers: dict[_Port, torch.Tensor], workspace: torch.Tensor, handle: object) -> None:
        named = {name: self._views(port, buffers) for name, port in self.named.items() if name in ("q", "k", "v", "dO")}
        left = self.named.get("diagonal_band_left_bound", 0) - 1
        window = (left, self.named["diagonal_band_right_bound"])
        results = [self._views(port, buffers) for port in self.outputs if "output" in port.__dict__]
        for b, qkv in enumerate(zip(named["q"], named["k"], named["v"], strict=True)):
            with torch.enable_grad():
                leaves = [x.transpose(1, 2).detach().clone().requires_grad_() for x in qkv]
                scale = self.named["attn_scale"]
                out, lse = flashhopper.flash_attn_func(
                    *leaves, softmax_scale=scale, window_size=window, return_lse=True
                )
            found = [out.detach(), lse.detach()[..., None].transpose(1, 2)]
            if "dO" in named:
                found = list(torch.autograd.grad(out, leaves, named["dO"][b].transpose(1, 2)))
                saved = self._views(self.named["o"], buffers)[b], self._views(self.named["stats"], buffers)[b]
                assert torch.equal(saved[0].transpose(1, 2), out)
                assert torch.allclose(saved[1][..., 0], lse)
            for result, value in zip(results, found, strict=False):
                result[b].copy_(value.transpose(1, 2))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """FA3, FA4 and cuDNN as far as the contenders see them."""
    for name in ("fa3_fwd_interface", "flash_attn", "flash_attn.cute"):
        module: Any = SimpleNamespace(flash_attn_func=_fa3, flash_attn_varlen_func=_fa3_varlen, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    types = {name: name for name in ("BFLOAT16", "FLOAT", "INT32")}
    cudnn = {"data_type": SimpleNamespace(**types), "pygraph": _Graph, "create_handle": lambda: None}
    cudnn |= {"set_stream": lambda handle, stream: None, "heur_mode": SimpleNamespace(A=0, FALLBACK=1)}
    cudnn |= {"diagonal_alignment": SimpleNamespace(TOP_LEFT=0)}
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(**cudnn))  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))


def _measure(*cases: Case, load: Any = None) -> list[dict[str, Any]]:
    load = load or (lambda case, device: peers_features.load_all(case, device, "tiled"))
    return features.time_cases(cases, load, 3, device="cpu", timer=_timer)


def test_cases_are_the_ones_asked_for() -> None:
    found = {case.op for case in features.FORWARD} | {case.op for case in features.BACKWARD}
    assert found == {*record.OPS["features"], *record.OPS["features_bwd"]}
    windows = [case for case in features.FORWARD if case.feature == "window"]
    assert [(case.cell.seqlen_q, case.left) for case in windows] == [(16384, 4095), (32768, 4095)]
    grouped = [case.cell for case in features.FORWARD if case.feature == "gqa"]
    square = [cell.seqlen_q for cell in grouped if cell.seqlen_q == cell.seqlen_k]
    assert square == [2048, 8192, 16384, 32768]
    assert [(cell.seqlen_q, cell.seqlen_k, cell.causal) for cell in grouped if cell.seqlen_q not in square] == [
        (seqlen_q, 8192, False) for seqlen_q in (1, 8, 64)
    ]
    assert {(cell.heads, cell.kv_heads) for cell in grouped} == {(64, 8)}
    packed = [case for case in features.FORWARD if case.feature == "varlen"]
    assert {case.cell.head_dim for case in packed if case.is_uniform} == {64, 128, 256}
    assert [sum(case.lengths) for case in packed if not case.is_uniform] == [32768]
    assert all(len(case.lengths) in (0, case.cell.batch) for case in features.FORWARD)
    assert all(case.cell.op == "bwd" for case in features.BACKWARD)
    assert min(features.ragged_lengths(5000, 3)) > 0


@pytest.mark.parametrize(("seqlen", "left"), [(7, -1), (7, 0), (7, 3), (7, 6), (7, 20), (1, 0)])
def test_kept_scores_by_counting(seqlen: int, left: int) -> None:
    kept = sum(j <= i and (left < 0 or j >= i - left) for i in range(seqlen) for j in range(seqlen))
    assert features.kept_scores(seqlen, True, left) == kept
    assert features.kept_scores(seqlen, False, -1) == seqlen * seqlen


def test_flops_of_packed_sequences() -> None:
    one = _case("varlen", lengths=RAGGED)
    kept = sum(n * (n + 1) // 2 for n in RAGGED)
    assert one.flops == 2 * kept * 4 * 32
    assert _case("varlen", "bwd", RAGGED).flops == 2.5 * one.flops


@pytest.mark.parametrize("op", ["fwd", "bwd"])
@pytest.mark.parametrize("feature", ["window", "ragged", "uniform"])
def test_every_contender_computes_the_same(stand_ins: None, op: str, feature: str) -> None:
    lengths = {"window": (), "ragged": RAGGED, "uniform": EVEN}[feature]
    case = _case("window", op, left=9) if feature == "window" else _case("varlen", op, lengths)
    (row,) = _measure(case)
    no_backward = {"fa3"} if op == "bwd" else set()
    assert set(row["errors"]) == no_backward
    dense = ["flashhopper_dense"] if feature == "uniform" else []
    assert list(row["value"]) == [x for x in ("flashhopper", *dense, "fa3", "fa4", "cudnn") if x not in no_backward]
    assert row["value"]["fa4"] == pytest.approx(case.flops / 1e9, rel=1e-4)
    assert row["op"] == case.op
    assert row["window"] == ([9, 0] if feature == "window" else [-1, 0])
    assert row["lengths"] == list(lengths)
    assert cell_of(row) == replace(case.cell, op="fwd")
    assert json.loads(json.dumps(row)) == row


def test_grouped_heads_and_options(stand_ins: None) -> None:
    """torch's cuDNN backend has no CPU kernel: its error is kept, the others are timed."""
    grouped, options = _measure(_case("gqa", kv_heads=2), _case("options"))
    assert list(grouped["value"]) == ["flashhopper", "fa3", "fa4"]
    assert list(grouped["errors"]) == ["cudnn"]
    assert list(options["value"]) == ["flashhopper", "flashhopper_softcap", "flashhopper_sink"]


def test_short_queries_of_grouped_heads(stand_ins: None) -> None:
    """Also with tiles of one head; torch's cuDNN backend has no CPU kernel."""
    case = Case("gqa", Cell("bf16", 16, 16, False, 2, 4, 2, 3, 48))
    assert case.flops == 2 * 2 * 3 * 48 * 4 * 32
    assert [x.shape[1] for x in features.inputs(case, 0, "cpu")] == [3, 48, 48]
    (row,) = _measure(case)
    assert list(row["value"]) == ["flashhopper", "flashhopper_unpacked", "fa3", "fa4"]
    assert list(row["errors"]) == ["cudnn"]
    row["value"] |= {"flashhopper": 300.0, "flashhopper_unpacked": 100.0, "fa3": 200.0, "fa4": 150.0}
    made = {"bench": [row]}
    assert "| forward | 4:2 heads, 2 x 3 on 48 | 16 | full | 300 | 200 | 150 | 1.50 | - |" in tables_features.speeds(
        made
    )
    assert any("share tiles: 3.00 to 3.00 times" in line for line in tables_features.summary(made))


def test_what_fails_or_computes_something_else_is_an_entry(stand_ins: None) -> None:
    def raises(*_: Any) -> Any:
        raise RuntimeError("no such shape")

    def load(case: Case, device: str) -> list[Peer]:
        ours, fa3, *_ = peers_features.load_all(case, device, "tiled")
        other = peers_features.load_all(replace(case, left=8), device, "tiled")[0].prepare
        return [ours, fa3, Peer("fa4", other), Peer("cudnn", raises), Peer("sdpa", unavailable="missing")]

    (row,) = _measure(_case("window", left=9), load=load)
    assert list(row["value"]) == ["flashhopper", "fa3"]
    assert "wrong result: relative rmse" in row["errors"]["fa4"]
    assert "no such shape" in row["errors"]["cudnn"]
    assert row["errors"]["sdpa"] == "missing"

    def broken(contenders: object, rounds: int) -> None:
        raise RuntimeError("device lost")

    (row,) = features.time_cases([_case("window", left=9)], load, 3, device="cpu", timer=broken)
    assert set(row["errors"]) == {"flashhopper", "fa3", "fa4", "cudnn", "sdpa"}


@pytest.mark.parametrize("op", ["fwd", "bwd"])
def test_ours_is_compared_with_float64(op: str) -> None:
    """A window that is one key short is found; peers are then timed without a comparison."""
    case = _case("window", op, left=9)

    def load(case: Case, device: str) -> list[Peer]:
        wrong = peers_features.load_all(replace(case, left=8), device, "tiled")[0]
        right = peers_features.load_all(case, device, "tiled")[0]
        return [wrong, Peer("fa4", right.prepare)]

    (row,) = _measure(case, load=load)
    assert "wrong result" in row["errors"]["flashhopper"]
    assert list(row["value"]) == ["fa4"]


def test_missing_peers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fa3_fwd_interface", "flash_attn", "flash_attn.cute", "cudnn"):
        monkeypatch.setitem(sys.modules, name, None)
    found = {
        peer.name: peer.unavailable for peer in peers_features.load_all(_case("varlen", lengths=EVEN), "cpu", "tiled")
    }
    assert [name for name, reason in found.items() if reason] == ["fa3", "fa4", "cudnn"]
    assert list(found)[:2] == ["flashhopper", "flashhopper_dense"]


def test_oracle_with_a_window_agrees_with_the_tiled_engine() -> None:
    case = Case("window", Cell("bf16", 16, 8, True, 1, 4, 2, 40, 40, "bwd"), 6)
    q, k, v, dout = (x.double() for x in features.inputs(case, 0, "cpu"))
    with flashhopper.set_backend("tiled"):
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = flashhopper.flash_attn_func(*leaves, causal=True, window_size=(6, 0))
        expected = torch.autograd.grad(out, leaves, dout)
    rows = torch.arange(40)
    mine, _ = oracle.attend_rows(q[0, :, 3], k[0, :, 1], v[0, :, 1], rows, 40, True, left=6)
    assert (mine - out[0, :, 3]).abs().max() < 1e-12
    one = (q[0, :, 2:].transpose(0, 1), k[0, :, 1], v[0, :, 1], dout[0, :, 2:].transpose(0, 1), True, torch.float64)
    dq, dk, dv = oracle.head_gradients(*one, left=6)
    assert (dq.transpose(0, 1) - expected[0][0, :, 2:]).abs().max() < 1e-12
    assert (dk - expected[1][0, :, 1]).abs().max() < 1e-12
    assert (dv - expected[2][0, :, 1]).abs().max() < 1e-12


def _row(case: Case, **value: float) -> dict[str, Any]:
    row = {**case.cell.as_row(), "op": case.op, "unit": "TFLOP/s", "value": value, "spread": {}, "errors": {}}
    return {**row, "lengths": list(case.lengths), "window": [case.left, 0]}


def _rows() -> list[dict[str, Any]]:
    return [
        _row(features.BACKWARD[1], flashhopper=400.0, fa4=500.0),
        _row(_case("varlen", lengths=RAGGED), flashhopper=303.0, fa3=300.0),
        _row(_case("varlen", lengths=EVEN), flashhopper=485.0, flashhopper_dense=500.0, fa3=480.0, cudnn=510.0),
        _row(features.FORWARD[0], flashhopper=600.0, fa3=500.0, fa4=400.0),
        _row(_case("options"), flashhopper=600.0, flashhopper_softcap=500.0, flashhopper_sink=594.0),
    ]


def test_tables_of_feature_rows() -> None:
    page = "<!-- figures:begin features -->\n<!-- figures:end -->\n<!-- figures:begin -->\n<!-- figures:end -->\n"
    made: dict[str, Any] = {"bench": _rows()}
    text = tables.render(page, made)
    assert text.count("| forward | window 4096, 2 x 16384 | 128 | causal | 600 | 500 | 400 | - | 1.20 | - |") == 2
    assert "| forward | packed, 2 x 32 | 16 | causal | 485 | 480 | - | 510 | 0.95 | 0.97 |" in text
    assert "| forward | packed, 3 ragged, 92 tokens | 16 | causal | 303 | 300 | - | - | 1.01 | - |" in text
    assert "| backward | 64:8 heads, 2 x 8192 | 128 | causal | 400 | - | 500 | - | 0.80 | - |" in text
    assert "(head_dim 16, causal, 48): softcap 1.20, a sink 1.01." in text
    assert (
        "forward: 0.95 to 1.20 times the speed of the best peer in 3 rows, median 1.01, at 0.95 or more in 3." in text
    )
    assert "backward: 0.80 to 0.80 times the speed of the best peer in 1 rows" in text
    assert "Packed forward: 0.97 to 0.97 times the speed of the same batch unpacked (1 rows), 1.01 times FA3's" in text
    assert tables.render(text, made) == text
    assert "packed" not in tables.render(page, {"bench": []})
    assert "window 4096" in parts.summary(made)


def test_record_keeps_the_feature_parts_apart() -> None:
    made = record.empty()
    backward, *forward = _rows()
    for part, content in (
        ("bench:features", forward),
        ("bench:features_bwd", [backward]),
        ("bench:fwd", [{"op": "fwd"}]),
    ):
        record._put(made, part, content)
        record._put(made, part, content)  # measured again: replaced
        assert record._get(made, part) == content
    assert len(made["bench"]) == 6
    assert record.select("bench:features") == ["bench:features"]


def test_a_part_without_a_result_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [_row(features.FORWARD[0])]
    rows[0]["errors"] = {"flashhopper": "missing"}
    monkeypatch.setattr(features, "time_cases", lambda *_, **__: rows)
    with pytest.raises(RuntimeError, match="no contender ran"):
        parts.RUNNERS["bench:features"](3)
    rows[0]["value"] = {"flashhopper": 600.0}
    assert parts.RUNNERS["bench:features_bwd"](3) == rows
