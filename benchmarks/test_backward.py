"""CPU tests of what measures the backward pass: the mirror of the C ABI, the oracle, peers, rows and tables."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from benchmarks import abi, accuracy_backward, harness, oracle, peers, tables
from benchmarks.cells import parse_cell
from benchmarks.digest import ROOT

HEADER = ROOT / "cpp" / "include" / "flashhopper" / "flashhopper.h"
C_TYPES = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double}


def _fields(struct: str) -> list[tuple[str, object]]:
    """Names and ctypes of one struct of the header."""
    text = re.sub(r"//[^\n]*", "", HEADER.read_text())
    body = re.search(r"typedef struct \{([^}]*)\} " + struct + ";", text)
    assert body is not None, f"no {struct} in {HEADER.name}"
    found: list[tuple[str, object]] = []
    for declaration in filter(None, (part.strip() for part in body[1].split(";"))):
        kind, names = re.match(r"(?:const )?(\w+)(.*)", declaration, re.DOTALL).groups()  # type: ignore[union-attr]
        for name in names.split(","):
            array = re.fullmatch(r"(\w+)\[(\d+)\]", name.strip())
            if array:
                found.append((array[1], ctypes.c_char * int(array[2])))
            elif "*" in name:
                found.append((name.replace("*", "").strip(), ctypes.c_void_p))
            else:
                found.append((name.strip(), C_TYPES.get(kind, abi.TensorView)))
    return found


@pytest.mark.parametrize(
    ("struct", "mirror"),
    [
        ("flashhopper_tensor", abi.TensorView),
        ("flashhopper_forward_params", abi.ForwardParams),
        ("flashhopper_backward_params", abi.BackwardParams),
        ("flashhopper_plan", abi.Plan),
    ],
)
def test_structs_mirror_the_header(struct: str, mirror: type[ctypes.Structure]) -> None:
    assert list(mirror._fields_) == _fields(struct)


def _problem(causal: bool, seqlen_q: int = 37, seqlen_k: int = 21) -> tuple[torch.Tensor, ...]:
    cell = parse_cell(f"bf16:16/8:{'causal' if causal else 'full'}:sq={seqlen_q}:sk={seqlen_k}:b=2:h=4:kvh=2")
    return (*peers.inputs(cell, 1, "cpu"), peers.output_gradient(cell, 1, "cpu"))


@pytest.mark.parametrize("causal", [False, True])
def test_oracle_agrees_with_the_tiled_engine(causal: bool) -> None:
    import flashhopper

    q, k, v, dout = _problem(causal)
    with flashhopper.set_backend("tiled"):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = flashhopper.flash_attn_func(*leaves, causal=causal, return_lse=True)
        gradients = torch.autograd.grad(out, leaves, dout)
    errors = oracle.gradient_errors(gradients, q, k, v, dout, causal)
    assert errors.wrong == []
    assert max(errors.plain.values()) > 0
    broken = (gradients[0], gradients[1] * 1.1, gradients[2].clone())
    broken[2][0, 0, 0, 0] = float("nan")
    found = oracle.gradient_errors(broken, q, k, v, dout, causal).wrong
    assert [text.split()[0] for text in found] == ["1", "dk", "dv"]
    mine, mine_lse = oracle.attend(q, k, v, causal)
    assert (mine.float() - out.detach().float()).abs().max().item() < 2e-2
    assert torch.allclose(mine_lse, lse.detach(), atol=1e-5)


def test_backward_call_is_autograd_of_one_forward() -> None:
    """SDPA's heads-first output takes the same dout; what has no gradient says so."""
    cell = parse_cell("bwd:bf16:16:causal:32:b=2:h=2")
    q, k, v = (x.float() for x in peers.inputs(cell, 0, "cpu"))
    dout = peers.output_gradient(cell, 0, "cpu").float()
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def prepare(cell: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> peers.Call:
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        return lambda: sdpa(*heads_first, is_causal=True)

    call = peers.Peer("sdpa", prepare).call(cell, q, k, v, dout)
    for _ in range(2):  # the graph is kept
        gradients: tuple[torch.Tensor, ...] = call()  # type: ignore[assignment]
    for batch in range(2):
        for head in range(2):
            one = (q[batch, :, head : head + 1].transpose(0, 1), k[batch, :, head], v[batch, :, head])
            right = oracle.head_gradients(*one, dout[batch, :, head : head + 1].transpose(0, 1), True, torch.float64)
            mine = (gradients[0][batch, :, head][None], gradients[1][batch, :, head], gradients[2][batch, :, head])
            assert all(torch.allclose(a.double(), b, atol=1e-5) for a, b in zip(mine, right, strict=True))
    with pytest.raises(NotImplementedError, match="gradient"):
        peers.Peer("detached", lambda *_: lambda: torch.zeros(2, 32, 2, 16)).call(cell, q, k, v, dout)
    with pytest.raises(NotImplementedError, match="no backward"):
        peers.Peer("fa3", prepare, no_gradient=peers.NO_GRADIENT["fa3"]).call(cell, q, k, v, dout)
    with pytest.raises(RuntimeError, match="missing"):
        peers.Peer("fa4", unavailable="missing").call(cell, q, k, v, dout)


def _speed_row() -> dict[str, object]:
    cell = parse_cell("bwd:bf16:128:causal:8192")
    value = {"flashhopper": 500.0, "fa4": 450.0, "cudnn": 480.0, "flashhopper_det": 400.0}
    return {**cell.as_row(), "op": "bwd", "unit": "TFLOP/s", "value": value, "spread": {}, "errors": {}}


def _accuracy_row() -> dict[str, object]:
    def errors(rmse: float) -> accuracy_backward.Errors:
        return {name: {"rmse": rmse, "relative_rmse": rmse, "max_error": 5 * rmse} for name in oracle.GRADIENTS}

    row: dict[str, object] = {"family": "normal", "op": "bwd", "dtype": "bf16", "errors": {}}
    return {**row, "gradients": errors(1e-3), "plain": errors(2e-3), "peers": {"cudnn": errors(1.25e-3)}}


def test_tables_of_backward_rows() -> None:
    page = "<!-- figures:begin backward -->\n<!-- figures:end -->\n<!-- figures:begin -->\n<!-- figures:end -->\n"
    record: dict[str, object] = {"bench": [_speed_row()], "accuracy": [_accuracy_row()]}
    text = tables.render(page, record)
    assert text.count("| 128 | causal | 8192 | 500 | 450 | 480 | 1.04 |") == 2
    assert "deterministic=True, head_dim 128, causal, 8192: 400, 0.80 times" in text
    assert "Backward against the best peer in 1 cells" in text
    assert "| normal | bf16 | 1 | 1.0e-03 | 1.0e-03 | 1.0e-03 | 0.50 | 0.50 | 0.80 | 0.80 |" in text
    assert tables.render(text, record) == text
    assert "Backward" not in tables.render(page, {"bench": []})
    assert "Backward" not in tables.render(Path(ROOT / "docs" / "numerics.md").read_text(), record)


def test_text_tables_of_backward_rows() -> None:
    text = harness.table([_speed_row()])  # the deterministic contender is no peer
    assert "bwd bf16:128:causal:8192" in text
    assert "1.042 cudnn" in text
    assert "0.500" in accuracy_backward.table([_accuracy_row()])
    assert "1/1" in accuracy_backward.table([_accuracy_row()])
