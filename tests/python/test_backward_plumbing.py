"""From gradients to the arguments of the compiled module's backward, with a fake one: order, strides, copies,
workspace, shortcuts, errors, and which engine serves.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from fake_module import FakeModule, install

import flashhopper as fh
from flashhopper import backends
from flashhopper.engine import hopper, hopper_backward

Tensors = list[torch.Tensor]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    return install(monkeypatch)


def inputs(
    *, batch: int = 2, seqlen_q: int = 5, seqlen_k: int = 7, heads: int = 4, kv_heads: int = 2, dim_v: int = 64
) -> Tensors:
    shapes = ((batch, seqlen_q, heads, 64), (batch, seqlen_k, kv_heads, 64), (batch, seqlen_k, kv_heads, dim_v))
    return [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]


def outputs(q: torch.Tensor, v: torch.Tensor) -> Tensors:
    """dout, out and lse of the right shapes."""
    shape = (*q.shape[:3], v.shape[3])
    lse = torch.randn(q.shape[0], q.shape[2], q.shape[1])
    return [torch.randn(shape, dtype=q.dtype), torch.randn(shape, dtype=q.dtype), lse]


def run(
    tensors: Tensors,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sink: torch.Tensor | None = None,
    sm_margin: int = 0,
    deterministic: bool = False,
    backend: str = "hopper",
) -> Tensors:
    """flashhopper::backward; dsink comes with a sink alone."""
    bounds = (-1, 0 if causal else -1) if window is None else window
    numbers = (0.25, *bounds, softcap, sm_margin, deterministic, backend)
    gradients: Tensors = list(torch.ops.flashhopper.backward(dout, dlse, *tensors, out, lse, sink, *numbers))
    if sink is None:
        assert gradients.pop().numel() == 0
    return gradients


def strides(x: torch.Tensor) -> tuple[int, ...]:
    return x.stride()[:3]


def test_arguments(module: FakeModule) -> None:
    q, k, v = inputs(dim_v=40)
    dout, out, lse = outputs(q, v)
    gradients = run([q, k, v], dout, out, lse, causal=True, sm_margin=3, deterministic=True)
    (call,) = module.backward_calls
    names = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
    for name, x in zip(names, (q, k, v, out, dout, *gradients), strict=True):
        assert (call[name], call[f"{name}_strides"]) == (x.data_ptr(), strides(x))
    for gradient, x in zip(gradients, (q, k, v), strict=True):
        assert (gradient.shape, gradient.dtype, gradient.is_contiguous()) == (x.shape, x.dtype, True)
    assert (call["lse"], call["dlse"]) == (lse.data_ptr(), 0)
    assert call["workspace"] % 16 == 0
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen_q": 5, "seqlen_k": 7, "head_dim": 64, "head_dim_v": 40}
    rest = {"window_left": -1, "window_right": 0, "softmax_scale": 0.25, "dtype": FakeModule.BF16, "stream": 77}
    assert call | sizes | rest == call
    assert (call["sm_margin"], call["deterministic"]) == (3, True)


def test_windows_and_softcap_arrive(module: FakeModule) -> None:
    q, k, v = inputs()
    run([q, k, v], *outputs(q, v), window=(3, 2), softcap=30.0)
    (call,) = module.backward_calls
    assert (call["window_left"], call["window_right"], call["softcap"]) == (3, 2, 30.0)
    assert call["sink"] == 0
    run([q, k, v], *outputs(q, v))
    assert module.backward_calls[-1]["softcap"] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_sink_is_float32_and_its_gradient_of_its_dtype(
    module: FakeModule, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    q, k, v = inputs()
    sink = torch.randn(4, dtype=dtype)
    seen: list[list[float]] = []
    launch = module.backward

    def differentiate(views: Any, addresses: Any, *rest: Any) -> None:
        logits, gradient = ((ctypes.c_float * 4).from_address(address) for address in addresses[2:4])
        seen.append(list(logits))
        gradient[:] = [1.0, 2.0, 3.0, 4.0]
        launch(views, addresses, *rest)

    monkeypatch.setattr(module, "backward", differentiate)
    *_, dsink = run([q, k, v], *outputs(q, v), sink=sink)
    assert seen == [sink.float().tolist()]
    assert dsink.dtype == dtype
    assert dsink.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert len(module.backward_calls) == 1


def test_a_sink_has_a_gradient_without_keys(module: FakeModule) -> None:
    """lse is the sink then: its gradient goes there, through the kernels."""
    tensors = inputs(seqlen_k=0)
    run(tensors, *outputs(tensors[0], tensors[2]), sink=torch.randn(4))
    assert len(module.backward_calls) == 1
    tensors = inputs(seqlen_q=0)
    *_, dsink = run(tensors, *outputs(tensors[0], tensors[2]), sink=torch.randn(4))
    assert len(module.backward_calls) == 1
    assert (dsink.shape, dsink.any().item()) == ((4,), False)


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


def odd(x: torch.Tensor) -> torch.Tensor:
    """x two bytes beyond an aligned address."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


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


def test_the_workspace_is_asked_for_once(module: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    empty = torch.empty

    def counted(*shape: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.uint8:
            made.append(shape)
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", counted)
    tensors = inputs()
    rest = outputs(tensors[0], tensors[2])
    run(tensors, *rest)
    module.backward_plans.clear()  # resolve asked too
    for _ in range(3):
        run(tensors, *rest)
    assert module.backward_plans == []
    assert made == [(4321,)] * 4  # torch's allocator lends it for each call
    run(tensors, *rest, deterministic=True)
    run(tensors, *rest, sm_margin=2)
    run(tensors, *rest, causal=True)
    problem = (2, 4, 2, 5, 7, 64, 64)
    assert module.backward_plans == [
        ((*problem, -1, -1), FakeModule.BF16, 0, True, 132),
        ((*problem, -1, -1), FakeModule.BF16, 2, False, 132),
        ((*problem, -1, 0), FakeModule.BF16, 0, False, 132),
    ]


@pytest.mark.parametrize(
    "shape",
    [{"batch": 0}, {"seqlen_q": 0}, {"heads": 0, "kv_heads": 0}, {"seqlen_k": 0}, {"seqlen_q": 0, "seqlen_k": 0}],
)
def test_nothing_to_compute_gives_zeros(module: FakeModule, shape: dict[str, int]) -> None:
    tensors = inputs(**shape)
    gradients = run(tensors, *outputs(tensors[0], tensors[2]))
    assert module.backward_calls == []
    for gradient, x in zip(gradients, tensors, strict=True):
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
        assert not gradient.any()


def test_another_device_is_guarded(module: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    class Guard:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)
            module.device = self.index

        def __exit__(self, *_: object) -> None:
            module.device = 3

    module.device = 3
    monkeypatch.setattr(torch.cuda, "device", Guard)
    tensors = inputs()
    run(tensors, *outputs(tensors[0], tensors[2]), sm_margin=1, deterministic=True)
    assert entered == [-1]
    assert module.device == 3
    (call,) = module.backward_calls
    assert (call["sm_margin"], call["deterministic"], call["softmax_scale"]) == (1, True, 0.25)


def test_errors_of_the_module(module: FakeModule) -> None:
    tensors = inputs()
    rest = outputs(tensors[0], tensors[2])
    module.error = RuntimeError("launching bwd_hd64 failed: invalid argument (1)")
    with pytest.raises(RuntimeError, match=r"failed: invalid argument \(1\); plan: .*bwd_hd64_m128_n160.*4321"):
        run(tensors, *rest)
    module.error = ValueError("head_dim is 63")
    with pytest.raises(ValueError, match="head_dim is 63"):
        run(tensors, *rest)


def test_what_is_not_the_output_s_gradient_is_refused(module: FakeModule) -> None:
    tensors = inputs()
    dout, out, lse = outputs(tensors[0], tensors[2])
    with pytest.raises(ValueError, match="dout has shape"):
        run(tensors, dout[:, :4], out, lse)
    assert module.backward_calls == []


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


def test_plans_are_forgotten_with_the_module(module: FakeModule) -> None:
    arguments = ((2, 5, 4, 64, 7, 2, 64), torch.bfloat16, -1, 0, 0, False, torch.device("cuda", 0))
    assert hopper_backward.backward_plan(*arguments)["config"] == "bwd_hd64_m128_n160"
    module.backward_rows = ((128, 128),)
    assert hopper_backward.backward_plan(*arguments)["config"] == "bwd_hd64_m128_n160"
    backends.forget()
    assert hopper_backward.backward_plan(*arguments)["config"] == "bwd_hd128_m128_n160"


def test_a_dense_call_has_no_offsets(module: FakeModule) -> None:
    q, k, v = inputs()
    run([q, k, v], *outputs(q, v))
    (call,) = module.backward_calls
    assert call["totals"] == (0, 0)
    assert [call[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")] == [0] * 4
