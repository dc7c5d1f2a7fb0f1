"""From a public call, whichever way it goes, to the engine that serves its gradients, with a fake compiled module."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from backward_calls import inputs
from fake_module import FakeModule, install

import flashhopper as fh
from flashhopper.engine import hopper


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    return install(monkeypatch)


def test_an_unused_lse_has_no_gradient(module: FakeModule) -> None:
    q, k, v = (x.requires_grad_() for x in inputs())
    out, lse = fh.flash_attn_func(q, k, v, return_lse=True)
    torch.autograd.grad(out.sum(), (q, k, v))
    assert module.backward_calls[-1]["dlse"] == 0
    out, lse = fh.flash_attn_func(q, k, v, return_lse=True)
    torch.autograd.grad(lse.sum(), (q, k, v))
    call = module.backward_calls[-1]
    assert call["dlse"] != 0
    assert call["dout"] != 0


def attend(way: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if way == "operator":
        numbers = (0.125, -1, 0, 0.0, 5, True, fh.backend())
        return torch.ops.flashhopper.forward(q, k, v, None, *numbers)[0]  # type: ignore[no-any-return]
    attention: Any = fh.flash_attn_func
    if way == "compiled":
        attention = torch.compile(attention, backend="aot_eager", fullgraph=True)
    out: torch.Tensor = attention(q, k, v, causal=True, sm_margin=5, deterministic=True)
    return out


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("way", ["plain", "operator", "create_graph", "compiled"])
def test_every_way_reaches_the_kernel(module: FakeModule, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Options of the forward call arrive, and each gradient is that of its tensor."""
    q, k, v = (x.requires_grad_() for x in inputs())
    launch = module.backward

    def fill(views: Any, *rest: Any) -> None:
        for (address, *_), x, byte in zip(views[5:], (q, k, v), (0x3F, 0x40, 0x41), strict=True):
            ctypes.memset(address, byte, 2 * x.numel())
        launch(views, *rest)

    monkeypatch.setattr(module, "backward", fill)
    out = attend(way, q, k, v)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), dout, create_graph=way == "create_graph")
    (forward,) = module.calls
    (call,) = module.backward_calls
    assert (forward["sm_margin"], call["sm_margin"], call["deterministic"]) == (5, 5, True)
    assert (call["softmax_scale"], call["window_left"], call["window_right"]) == (0.125, -1, 0)
    assert (call["q"], call["k"], call["v"]) == (forward["q"], forward["k"], forward["v"])
    for gradient, x, byte in zip(gradients, (q, k, v), (0x3F, 0x40, 0x41), strict=True):
        assert gradient.shape == x.shape
        assert (gradient.detach().contiguous().view(torch.uint8) == byte).all()


def compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the forward give real results, as the fake one cannot."""

    def forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (x.detach() for x in arguments[:3])
        out, lse = fh.reference_attention(q, k, v)
        return out.to(q.dtype), lse.float()

    monkeypatch.setattr(hopper, "forward", forward)


def test_without_a_backward_kernel_auto_takes_the_tiled_engine(
    module: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.backward_rows = ()
    compute(monkeypatch)
    q, k, v = (x.requires_grad_() for x in inputs())
    assert "tiled engine" in fh.explain(q, k, v).gradients
    out = fh.flash_attn_func(q, k, v)
    assert isinstance(out, torch.Tensor)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), dout)
    assert module.backward_calls == []
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(fh.reference_attention(*exact)[0], exact, dout.double())
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() < 3e-2


def test_without_a_backward_kernel_hopper_refuses_by_name(module: FakeModule) -> None:
    module.backward_rows = ()
    q, k, v = (x.requires_grad_() for x in inputs())
    message = 'backend "hopper" cannot serve this call: no backward kernel was built for bf16 with head_dim 64'
    with fh.set_backend("hopper"):
        out = fh.flash_attn_func(q, k, v)
        assert isinstance(out, torch.Tensor)
    assert len(module.calls) == 1
    with pytest.raises(RuntimeError, match=message):
        out.sum().backward()


def test_the_backend_of_the_forward_call_serves_its_gradient(module: FakeModule) -> None:
    q, k, v = (x.requires_grad_() for x in inputs())
    with fh.set_backend("tiled"):
        out = fh.flash_attn_func(q, k, v)
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    assert module.backward_calls == []
    out = fh.flash_attn_func(q, k, v)
    assert isinstance(out, torch.Tensor)
    with fh.set_backend("tiled"):
        out.sum().backward()
    assert len(module.backward_calls) == 1
