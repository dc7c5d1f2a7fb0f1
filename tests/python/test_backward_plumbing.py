"""From gradients to the arguments of the compiled module's backward, with a fake one: order, workspace, shortcuts,
errors. Copies: test_backward_copies.py; which engine serves: test_backward_routes.py.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from backward_calls import inputs, outputs, run, strides
from fake_module import FakeModule, install

from flashhopper import backends
from flashhopper.engine import hopper_backward


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    return install(monkeypatch)


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
