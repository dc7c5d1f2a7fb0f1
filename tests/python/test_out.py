"""out=: the caller's memory gets the result, on every path, and what cannot be written there is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_module import FakeModule, install
from helpers import oracle

import flashhopper as fh

Attend = Any


def inputs(dtype: torch.dtype = torch.float32, dim: int = 64) -> list[torch.Tensor]:
    return [torch.randn(2, n, h, d).to(dtype) for n, h, d in ((9, 4, dim), (11, 2, dim), (11, 2, 72))]


def packing() -> tuple[Any, ...]:
    return torch.tensor([0, 4, 4, 9]).int(), torch.tensor([0, 0, 5, 11]).int(), 5, 6


def dense_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    return fh.flash_attn_func(q, k, v, causal=True, **options)


def packed_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    q, k, v = (x[0] if x.dim() == 4 else x for x in (q, k, v))
    return fh.flash_attn_varlen_func(q, k, v, *packing(), causal=True, **options)


BOTH = pytest.mark.parametrize(("attend", "shape"), [(dense_call, (2, 9, 4, 72)), (packed_call, (9, 4, 72))])


@BOTH
@pytest.mark.parametrize("options", [{}, {"window_size": (3, 0)}, {"softcap": 2.0}, {"sink": torch.zeros(4)}], ids=str)
def test_the_result_is_in_the_callers_memory(attend: Attend, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    tensors = inputs()
    expected, expected_lse = attend(*tensors, return_lse=True, **options)
    store = torch.full((3, *shape), float("nan"))
    result, lse = attend(*tensors, return_lse=True, out=store[1], **options)
    assert result.data_ptr() == store[1].data_ptr()
    assert torch.equal(store[1], expected)
    assert torch.equal(lse, expected_lse)
    assert store[::2].isnan().all()
    assert torch.equal(attend(*tensors, out=store[0], **options), expected)


@BOTH
def test_what_cannot_take_the_result_is_refused_by_name(attend: Attend, shape: tuple[int, ...]) -> None:
    tensors = inputs()
    wide = torch.zeros(*shape[:-1], 80)
    for out, message in (
        (torch.zeros(*shape[:-1], 71), r"out has shape .*71\): must be .*72\)"),
        (torch.zeros(shape).half(), "out has dtype torch.float16: must be the result's, torch.float32"),
        (torch.zeros(shape, device="meta"), "out is on meta, q on cpu"),
        (wide[..., :72], "out has strides .* must be contiguous"),
        (shape, "out is a tuple: must be a tensor"),
        (torch.zeros(shape, requires_grad=True), "a gradient is wanted"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(*tensors, out=out)
    out = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"a gradient is wanted.*no_grad\(\), or leave out=None"):
        attend(tensors[0].requires_grad_(), *tensors[1:], out=out)
    assert not out.any()
    with torch.no_grad():
        attend(*tensors, out=out)
    assert out.any()


@BOTH
def test_memory_of_an_input_is_refused(attend: Attend, shape: tuple[int, ...]) -> None:
    store = torch.randn(20_000)
    count = torch.Size(shape).numel()
    q, k, _ = inputs()
    for offset, is_shared in ((0, True), (count - 1, True), (count, False)):
        v = store[offset : offset + 11 * 2 * 72].view(1, 11, 2, 72)
        arguments = (q[:1], k[:1], v)
        out = store[:count].view(shape) if len(shape) == 3 else store[: count // 2].view(1, *shape[1:])
        v = v if len(shape) == 3 else store[offset // 2 :][: 11 * 2 * 72].view(1, 11, 2, 72)
        if is_shared:
            with pytest.raises(ValueError, match="out shares memory with v"):
                attend(*arguments[:2], v, out=out)
        else:
            attend(*arguments[:2], v, out=out)


def test_memory_of_sinks_and_offsets_is_refused() -> None:
    store = torch.zeros(9 * 4 * 72)
    q, k, v = (x[0] for x in inputs())
    for name, x in (("sink", store[-4:]), ("cu_seqlens_q", store[:4].view(torch.int32)), ("seqused_k", store[:3])):
        x = x if name == "sink" else x.view(torch.int32)
        options = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), packing(), strict=True))
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            fh.flash_attn_varlen_func(q, k, v, **{**options, name: x}, out=store.view(9, 4, 72))
    assert not store.any()


class Subclass(torch.Tensor):
    pass


@BOTH
def test_another_kind_of_tensor_is_refused(attend: Attend, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="out is a Subclass, q, k and v are plain tensors"):
        attend(*inputs(), out=torch.zeros(shape).as_subclass(Subclass))


@BOTH
def test_autograd_knows_that_it_changes(attend: Attend, shape: tuple[int, ...]) -> None:
    leaf = torch.ones(shape, requires_grad=True)
    out = torch.ones(shape)
    product = leaf * out
    attend(*inputs(), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_with_eight_bits_it_is_refused() -> None:
    q, k, v = inputs(torch.bfloat16)
    with pytest.raises(NotImplementedError, match="out is not available with fp8"):
        fh.flash_attn_func(q, k, v, fp8=fh.Fp8Recipe(), out=torch.zeros(2, 9, 4, 72).bfloat16())


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    compiled = torch.compile(dense_call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    q, k, v = inputs()
    out = torch.zeros(2, 9, 4, 72)
    with torch.no_grad():
        compiled(q, k, v, out=out)
    assert torch.equal(out, dense_call(q, k, v))


def test_autocast_decides_the_dtype() -> None:
    q, k, v = inputs()
    out = torch.zeros(2, 9, 4, 72).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        dense_call(q, k, v, out=out)
        with pytest.raises(ValueError, match=r"must be the result's, torch\.bfloat16"):
            dense_call(q, k, v, out=out.float())
    assert (out.double() - oracle(q, k, v, causal=True)[0]).abs().max() < 3e-2


def test_the_kernel_gets_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call and the ones that remember it: nothing is allocated or copied."""
    module: FakeModule = install(monkeypatch)
    q, k, v = inputs(torch.bfloat16)
    outs = [torch.zeros(2, 9, 4, 72).bfloat16() for _ in range(3)]
    for out in outs:
        assert dense_call(q, k, v, out=out) is out
    dense_call(q, k, v)
    addresses = [call["out"] for call in module.calls]
    assert addresses[:3] == [out.data_ptr() for out in outs]
    assert addresses[3] not in addresses[:3]
    assert module.prepared == 1
    with pytest.raises(ValueError, match="out has shape"):
        dense_call(q, k, v, out=outs[0][:1])
    store = torch.zeros(2 * 9 * 4 * 72).bfloat16()
    k = store[: k.numel()].view(k.shape)
    with pytest.raises(ValueError, match="out shares memory with k"):
        dense_call(q, k, v, out=store.view(2, 9, 4, 72))
    assert len(module.calls) == 4


def test_the_kernel_gets_its_address_in_packed_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    module: FakeModule = install(monkeypatch)
    q, k, v = (x[0] for x in inputs(torch.bfloat16))
    out = torch.zeros(9, 4, 72).bfloat16()
    for options in ({}, {"softcap": 2.0}, {"sink": torch.zeros(4), "window_size": (3, 0)}):
        result, lse = packed_call(q, k, v, out=out, return_lse=True, **options)
        assert result is out
        call = module.forward_calls[-1]
        assert (call["out"], call["lse"]) == (out.data_ptr(), lse.data_ptr())
        assert call["out_strides"][1:] == (4 * 72, 72)
    assert len(module.forward_calls) == 3
    leaf = q.clone().requires_grad_()
    with torch.no_grad():
        assert packed_call(leaf, k, v, out=out) is out
    assert module.forward_calls[-1]["out"] == out.data_ptr()
    with pytest.raises(ValueError, match="a gradient is wanted"):
        packed_call(leaf, k, v, out=out)
    store = torch.zeros(9 * 4 * 72 + 8).bfloat16()
    with pytest.raises(ValueError, match="out cannot be written in 16-byte pieces: its address"):
        packed_call(q, k, v, out=store[1:-7].view(9, 4, 72))
    assert len(module.forward_calls) == 4


def test_packed_calls_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    module: FakeModule = install(monkeypatch)
    q, k, v = (x[0] for x in inputs(torch.bfloat16))
    offsets, out = torch.zeros(3, dtype=torch.int32), torch.zeros(0, 4, 72).bfloat16()
    assert fh.flash_attn_varlen_func(q[:0], k, v, offsets, offsets, 0, 0, out=out) is out
    assert module.forward_calls == []


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_packed(dynamic: bool) -> None:
    compiled = torch.compile(packed_call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    q, k, v = (x[0] for x in inputs())
    out = torch.zeros(9, 4, 72)
    with torch.no_grad():
        compiled(q, k, v, out=out)
    assert torch.equal(out, packed_call(q, k, v))
