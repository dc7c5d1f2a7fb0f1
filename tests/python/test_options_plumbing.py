"""Packed sequences, windows, softcap and sink on their way to the compiled module, with a fake one."""

from __future__ import annotations

import pytest
import torch
from fake_module import FakeModule, install

import flashhopper as fh
from flashhopper import backends

BF16 = torch.bfloat16
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
CU_Q, CU_K = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 8], [0, 4, 9, 12]))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    return install(monkeypatch)


def dense(seqlen_q: int = 5, seqlen_k: int = 7) -> Tensors:
    q = torch.randn(2, seqlen_q, 4, 64).to(BF16)
    k, v = (torch.randn(2, seqlen_k, 2, 64).to(BF16) for _ in range(2))
    return q, k, v


def packed(total_q: int = 9, total_k: int = 12) -> Tensors:
    q, k = torch.randn(total_q, 4, 128).to(BF16), torch.randn(total_k, 2, 128).to(BF16)
    return q, k, torch.randn(total_k, 2, 64).to(BF16)


def test_a_packed_call(module: FakeModule) -> None:
    q, k, v = packed()
    used = torch.tensor([1, 0, 5], dtype=torch.int32)
    sink = torch.randn(4)
    out, lse = fh.flash_attn_varlen_func(
        *(q, k, v, CU_Q, CU_K, 5, 6, 0.25),
        causal=True,
        softcap=30.0,
        sink=sink,
        seqused_k=used,
        sm_margin=3,
        return_lse=True,
    )
    (call,) = module.forward_calls
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((9, 4, 64), BF16, (4, 9), torch.float32)
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        assert call[name] == x.data_ptr()
        assert call[f"{name}_strides"][1:] == x.stride()[:2]
    addresses = {"lse": lse, "sink": sink, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "seqused_k": used}
    assert all(call[name] == x.data_ptr() for name, x in addresses.items())
    assert call["seqused_q"] == 0
    assert call["packed_workspace"] not in (0, call["workspace"])
    sizes = {"batch": 3, "heads": 4, "kv_heads": 2, "seqlen_q": 5, "seqlen_k": 6, "head_dim": 128, "head_dim_v": 64}
    rest = {"window_left": -1, "window_right": 0, "softmax_scale": 0.25, "softcap": 30.0, "totals": (9, 12)}
    assert call | sizes | rest | {"dtype": 1, "sm_margin": 3, "stream": 77} == call
    assert module.calls == []


def test_lengths_stay_on_the_device(module: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("a length was read on the host")

    for name in ("tolist", "item", "__int__", "__bool__", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, read)
    fh.flash_attn_varlen_func(*packed(), CU_Q, CU_K, 5, 6)
    assert len(module.forward_calls) == 1


def test_what_a_packed_call_copies(module: FakeModule) -> None:
    _, k, v = packed()
    far = torch.randn(9, 4, 129).to(BF16)[..., :128]  # rows that TMA cannot reach
    offsets = torch.stack([CU_Q, CU_Q], 1)[:, 0]
    fh.flash_attn_varlen_func(far, k.transpose(0, 1).contiguous().transpose(0, 1), v, offsets, CU_K, 5, 6)
    (call,) = module.forward_calls
    assert call["q"] != far.data_ptr()
    assert call["q_strides"][1:] == (4 * 128, 128)
    assert call["k_strides"][1:] == (128, 12 * 128)
    assert call["cu_seqlens_q"] not in (0, offsets.data_ptr())


@pytest.mark.parametrize(("total_q", "total_k"), [(0, 5), (7, 0)])
def test_empty_packed_tensors(module: FakeModule, total_q: int, total_k: int) -> None:
    offsets = torch.zeros(3, dtype=torch.int32)
    out, lse = fh.flash_attn_varlen_func(*packed(total_q, total_k), offsets, offsets, 0, 0, return_lse=True)
    assert (out.shape, lse.shape) == ((total_q, 4, 64), (4, total_q))
    assert len(module.forward_calls) == (total_q > 0)


@pytest.mark.parametrize("options", [{"softcap": 20.0}, {"sink": torch.randn(4).half()}])
def test_dense_options(module: FakeModule, options: dict[str, object]) -> None:
    q, k, v = dense()
    out, lse = fh.flash_attn_func(q, k, v, window_size=(3, 1), return_lse=True, **options)  # type: ignore[arg-type]
    (call,) = module.forward_calls
    assert (call["out"], call["lse"]) == (out.data_ptr(), lse.data_ptr())
    assert call["out_strides"] == out.stride()[:3]
    assert (call["window_left"], call["window_right"], call["totals"]) == (3, 1, (0, 0))
    assert call["softcap"] == options.get("softcap", 0.0)
    assert (call["sink"] != 0) == ("sink" in options)
    assert call["cu_seqlens_q"] == call["cu_seqlens_k"] == call["packed_workspace"] == 0
    assert lse.shape == (2, 4, 5)


def test_windows_go_the_short_way(module: FakeModule) -> None:
    fh.flash_attn_func(*dense(), window_size=(2, 3))
    (call,) = module.calls
    assert (call["window_left"], call["window_right"]) == (2, 3)


def test_errors_hold_the_plan(module: FakeModule) -> None:
    module.error = RuntimeError("launching fwd failed")
    with pytest.raises(RuntimeError, match=r"launching fwd failed; plan: .*fwd_hd128_m128_n160"):
        fh.flash_attn_varlen_func(*packed(), CU_Q, CU_K, 5, 6)


def test_gradients_come_from_the_kernels_too(module: FakeModule) -> None:
    leaves = [x.requires_grad_() for x in packed()]
    out = fh.flash_attn_varlen_func(*leaves, CU_Q, CU_K, 5, 6, causal=True, softcap=7.0, deterministic=True)
    out.sum().backward()
    assert all(x.grad is not None for x in leaves)
    (forward,), (call,) = module.forward_calls, module.backward_calls
    for name in ("totals", "softcap", "cu_seqlens_q", "cu_seqlens_k", "lse", "seqlen_q", "seqlen_k", "window_right"):
        assert call[name] == forward[name]
    assert call["deterministic"]


def test_explain_says_so(module: FakeModule) -> None:
    plan = fh.explain(*dense(), window_size=(2, 3), softcap=5.0, sink=torch.randn(4))
    assert plan.backend == "hopper"
    assert plan.gradients.startswith("hopper, bwd_hd64")
    module.backward_rows = ()
    backends.forget()
    assert "tiled engine" in fh.explain(*dense(), softcap=5.0).gradients
    with fh.set_backend("hopper"):
        plan = fh.explain(*dense(), softcap=5.0)
        assert plan.gradients.startswith("none: backward would raise RuntimeError, no backward kernel was built")
