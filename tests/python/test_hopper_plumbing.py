"""From tensors to the arguments of the compiled module, with a fake one: order, strides, copies, workspaces, errors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from fake_module import (
    BACKWARD_PARAMETERS,
    CALL_PARAMETERS,
    FORWARD_PARAMETERS,
    PREPARE_PARAMETERS,
    FakeModule,
    install,
)

import flashhopper as fh
from flashhopper.engine import hopper

STUB = Path(__file__).parents[2] / "python" / "flashhopper" / "_C.pyi"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    return install(monkeypatch)


def inputs(
    *,
    batch: int = 2,
    seqlen_q: int = 5,
    seqlen_k: int = 7,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    dim_v: int = 64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16)

    return (
        normal(batch, seqlen_q, heads, dim),
        normal(batch, seqlen_k, kv_heads, dim),
        normal(batch, seqlen_k, kv_heads, dim_v),
    )


def test_parameter_names_are_those_of_the_stub() -> None:
    functions = {n.name: n for n in ast.walk(ast.parse(STUB.read_text())) if isinstance(n, ast.FunctionDef)}
    assert tuple(a.arg for a in functions["prepare_forward"].args.posonlyargs) == PREPARE_PARAMETERS
    assert tuple(a.arg for a in functions["__call__"].args.posonlyargs) == ("self", *CALL_PARAMETERS)
    assert tuple(a.arg for a in functions["backward"].args.posonlyargs) == BACKWARD_PARAMETERS
    assert tuple(a.arg for a in functions["forward"].args.posonlyargs) == FORWARD_PARAMETERS


def test_arguments(module: FakeModule) -> None:
    q, k, v = inputs(dim=128, dim_v=64)
    out, lse = fh.flash_attn_func(q, k, v, 0.25, True, sm_margin=3, return_lse=True)
    (call,) = module.calls
    assert out.shape == (2, 5, 4, 64)
    assert out.dtype == q.dtype
    assert out.is_contiguous()
    assert lse.shape == (2, 4, 5)
    assert lse.dtype == torch.float32
    addresses = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    assert all(call[name] == x.data_ptr() for name, x in addresses.items())
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        assert tuple(call[f"{name}_{part}_stride"] for part in ("batch", "row", "head")) == x.stride()[:3]
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen_q": 5, "seqlen_k": 7, "head_dim": 128, "head_dim_v": 64}
    rest = {"window_left": -1, "window_right": 0, "softmax_scale": 0.25, "dtype": 1, "sm_margin": 3, "stream": 77}
    assert call | sizes | rest == call


def test_defaults(module: FakeModule) -> None:
    q, k, v = (x.half() for x in inputs(dim=96, dim_v=96))
    fh.flash_attn_func(q, k, v)
    (call,) = module.calls
    assert call["softmax_scale"] == pytest.approx(96**-0.5)
    assert (call["window_left"], call["window_right"], call["dtype"]) == (-1, -1, FakeModule.FP16)


def test_a_window_that_hides_nothing_is_causal(module: FakeModule) -> None:
    q, k, v = inputs()
    fh.flash_attn_func(q, k, v, window_size=(7, 0))
    fh.flash_attn_func(q, k, v, window_size=(6, 4))
    assert [(c["window_left"], c["window_right"]) for c in module.calls] == [(-1, 0), (-1, -1)]


def test_views_are_read_where_they_lie(module: FakeModule) -> None:
    fused = torch.randn(2, 5, 3, 4, 64, dtype=torch.bfloat16)
    q, k, v = fused.unbind(2)
    k = k[:, :, :1].expand(-1, -1, 4, -1)  # stride 0 goes as it is
    v = v.permute(0, 2, 1, 3).contiguous().transpose(1, 2)
    fh.flash_attn_func(q, k, v)
    (call,) = module.calls
    for name, x in (("q", q), ("k", k), ("v", v)):
        assert call[name] == x.data_ptr()
        assert tuple(call[f"{name}_{part}_stride"] for part in ("batch", "row", "head")) == x.stride()[:3]
    assert call["k_head_stride"] == 0
    assert fh.explain(q, k, v).copies == ()


@pytest.mark.parametrize("kind", ["row stride", "address", "head_dim stride", "head stride"])
def test_what_tma_cannot_read_is_copied_and_named(module: FakeModule, kind: str) -> None:
    q, k, v = inputs()
    if kind == "row stride":
        k = torch.randn(2, 7, 2 * 64 + 1, dtype=torch.bfloat16)[..., :128].unflatten(-1, (2, 64))
        reason = "k (row stride 258 bytes is not a multiple of 16)"
    elif kind == "head stride":
        k = torch.randn(2000, dtype=torch.bfloat16).as_strided((2, 7, 2, 64), (800, 160, 65, 1))
        reason = "k (head stride 130 bytes is not a multiple of 16)"
    elif kind == "address":
        k = torch.randn(2 * 7 * 2 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 7, 2, 64)
        reason = "k (its address is not a multiple of 16 bytes)"
    else:
        k = torch.randn(2, 7, 2, 128, dtype=torch.bfloat16)[..., ::2]
        reason = "k (head_dim stride 2 is not 1)"
    fh.flash_attn_func(q, k, v)
    (call,) = module.calls
    assert (call["q"], call["v"]) == (q.data_ptr(), v.data_ptr())
    assert call["k"] != k.data_ptr()
    assert (call["k_batch_stride"], call["k_row_stride"], call["k_head_stride"]) == (7 * 2 * 64, 2 * 64, 64)
    plan = fh.explain(q, k, v)
    assert plan.copies == (reason,)
    assert reason in str(plan)


def test_strides_of_single_elements_are_made_readable(module: FakeModule) -> None:
    q = torch.randn(64, dtype=torch.bfloat16).as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    k = torch.randn(1, 1, 65, dtype=torch.bfloat16).as_strided((1, 1, 1, 64), (65, 65, 65, 1))
    fh.flash_attn_func(q, k, k)
    (call,) = module.calls
    assert call["q"] == q.data_ptr()
    assert [call[f"q_{part}_stride"] for part in ("batch", "row", "head")] == [64, 64, 64]
    assert fh.explain(q, k, k).copies == ()


@pytest.mark.parametrize("shape", [{"batch": 0}, {"seqlen_q": 0}, {"heads": 0, "kv_heads": 0}])
def test_nothing_to_compute_launches_nothing(module: FakeModule, shape: dict[str, int]) -> None:
    q, k, v = inputs(**shape)
    out, lse = fh.flash_attn_func(q, k, v, return_lse=True)
    assert module.calls == []
    assert out.shape == q.shape
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])


def test_zero_keys_reach_the_kernel(module: FakeModule) -> None:
    fh.flash_attn_func(*inputs(seqlen_k=0))
    (call,) = module.calls
    assert call["seqlen_k"] == 0
    assert all(call[f"k_{part}_stride"] % 8 == 0 for part in ("batch", "row", "head"))


def test_one_workspace_a_stream(module: FakeModule) -> None:
    tensors = inputs()
    for stream in (77, 77, 88, 77, 88):
        module.stream = stream
        fh.flash_attn_func(*tensors)
    assert [c["workspace"] for c in module.calls] == [1001, 1001, 1002, 1001, 1002]


def test_an_unwanted_lse_goes_to_spare_memory(module: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    fh.flash_attn_func(q, k, v)
    assert module.calls[-1]["lse"] == 6001
    _, lse = fh.flash_attn_func(q, k, v, return_lse=True)
    assert module.calls[-1]["lse"] == lse.data_ptr()
    fh.flash_attn_func(q.requires_grad_(), k, v)
    assert module.calls[-1]["lse"] != 6001
    module.capturing = True
    with torch.no_grad():
        fh.flash_attn_func(q, k, v)
    assert module.calls[-1]["lse"] not in (6001, 0)
    module.capturing = False
    monkeypatch.setattr(hopper, "SPARE_ROWS", 39)  # one fewer than these inputs have
    hopper._workspaces.clear()
    with torch.no_grad():
        fh.flash_attn_func(q, k, v)
    assert not 6000 < module.calls[-1]["lse"] < 7000


def test_workspace_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    zeros = torch.zeros

    def cpu_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(device)
        return zeros(*shape, dtype=dtype)

    monkeypatch.setattr(hopper, "module", FakeModule())
    monkeypatch.setattr(torch, "zeros", cpu_zeros)
    tensor, address, spare, rows = hopper._new_workspace(3, 10)
    assert made == [torch.device("cuda", 3)]
    assert (tensor.dtype, tensor.numel(), address, rows) == (torch.int32, 36 + 10, tensor.data_ptr(), 10)
    assert spare == address + 144  # 130 bytes of workspace, rounded up to 16
    assert not tensor.any()


def test_a_captured_graph_owns_its_workspace(module: FakeModule) -> None:
    tensors = inputs()
    fh.flash_attn_func(*tensors)
    module.capturing = True
    fh.flash_attn_func(*tensors)
    fh.flash_attn_func(*tensors)
    module.capturing = False
    fh.flash_attn_func(*tensors)
    assert [c["workspace"] for c in module.calls] == [1001, 1002, 1003, 1001]


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
    fh.flash_attn_func(*inputs())
    assert entered == [-1]
    assert len(module.calls) == 1
    assert module.device == 3


def test_errors_of_the_module(module: FakeModule) -> None:
    tensors = inputs()
    module.error = RuntimeError("cudaLaunchKernelExC: invalid argument (1)")
    with pytest.raises(RuntimeError, match=r"cudaLaunchKernelExC: invalid argument \(1\); plan: .*fwd_hd64_m128_n160"):
        fh.flash_attn_func(*tensors)
    module.error = ValueError("head_dim is 63")
    with pytest.raises(ValueError, match="head_dim is 63"):
        fh.flash_attn_func(*tensors)


def test_every_way_reaches_the_kernel(module: FakeModule) -> None:
    q, k, v = inputs()
    torch.ops.flashhopper.forward(q, k, v, None, 0.1, -1, 0, 0.0, 0, False, "auto")
    with torch.no_grad():
        fh.flash_attn_func(q.requires_grad_(), k, v)
    fh.flash_attn_func(q, k, v)
    assert len(module.calls) == 3
