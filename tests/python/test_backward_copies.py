"""What the backward reads where it lies, and what it copies first, with a fake compiled module."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from backward_calls import Tensors, inputs, odd, outputs, run, strides
from fake_module import FakeModule, install


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    return install(monkeypatch)


def test_views_are_read_where_they_lie(module: FakeModule) -> None:
    fused = torch.randn(2, 5, 3, 4, 64, dtype=torch.bfloat16)
    q, k, v = fused.unbind(2)
    dout, out, lse = outputs(q, v)
    dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
    dq, dk, dv = run([q, k, v], dout, out, lse)
    (call,) = module.backward_calls
    for name, x in {"q": q, "k": k, "v": v, "dout": dout}.items():
        assert (call[name], call[f"{name}_strides"]) == (x.data_ptr(), strides(x))
    assert all(x.is_contiguous() for x in (dq, dk, dv))


@pytest.mark.parametrize("kind", ["expanded", "address", "head_dim stride", "dtype"])
def test_a_gradient_that_tma_cannot_read_is_copied(
    module: FakeModule, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    q, k, v = inputs()
    dout, out, lse = outputs(q, v)
    changed = {
        "expanded": torch.ones((), dtype=dout.dtype).expand_as(dout),  # what sum().backward() sends
        "address": odd(dout),
        "head_dim stride": torch.stack([dout, dout], -1)[..., 0],
        "dtype": dout.float(),
    }[kind]
    seen: Tensors = []
    launch = module.backward

    def read(views: Any, *rest: Any) -> None:
        buffer = (ctypes.c_int16 * dout.numel()).from_address(views[4][0])  # while the copy lives
        seen.append(torch.tensor(list(buffer), dtype=torch.int16).view(dout.dtype).view(dout.shape))
        launch(views, *rest)

    monkeypatch.setattr(module, "backward", read)
    run([q, k, v], changed, out, lse)
    (call,) = module.backward_calls
    assert call["dout"] != changed.data_ptr()
    assert call["dout"] % 16 == 0
    assert call["dout_strides"] == strides(dout)
    assert torch.equal(seen[0], changed.to(dout.dtype))
    assert call["q"] == q.data_ptr()


def test_other_operands_are_copied_too(module: FakeModule) -> None:
    q, k, v = inputs()
    dout, out, lse = outputs(q, v)
    run([odd(q), odd(k), odd(v)], dout, odd(out), lse)
    (call,) = module.backward_calls
    assert all(call[name] % 16 == 0 for name in ("q", "k", "v", "out", "dout"))
    assert all(call[f"{name}_strides"] == strides(x) for name, x in {"q": q, "k": k, "v": v, "out": out}.items())


def test_strides_of_single_elements_are_made_readable(module: FakeModule) -> None:
    x = torch.randn(64, dtype=torch.bfloat16).as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    run([x, x, x], x, x, torch.zeros(1, 1, 1))
    (call,) = module.backward_calls
    for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"):
        assert call[f"{name}_strides"] == (64, 64, 64)
    assert (call["q"], call["dout"]) == (x.data_ptr(), x.data_ptr())


def test_row_values_are_contiguous_float32(module: FakeModule) -> None:
    q, k, v = inputs()
    dout, out, lse = outputs(q, v)
    dlse = torch.randn_like(lse)
    run([q, k, v], dout, out, lse, dlse)
    assert (module.backward_calls[-1]["lse"], module.backward_calls[-1]["dlse"]) == (lse.data_ptr(), dlse.data_ptr())
    transposed = lse.transpose(1, 2).contiguous().transpose(1, 2)
    run([q, k, v], dout, out, transposed, torch.zeros(()).expand_as(lse))
    call = module.backward_calls[-1]
    assert call["lse"] not in (transposed.data_ptr(), 0)
    assert call["dlse"] != 0
    run([q, k, v], dout, out, lse, dlse.double())
    assert module.backward_calls[-1]["dlse"] != 0
