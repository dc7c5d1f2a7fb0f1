"""out= on the Hopper kernels: they write to the memory given and nowhere else, in graphs too, and allocate nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_support import DTYPES, GUARD, NAN, assert_equal_bits, draw, judge

import flashhopper

MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def _guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN between guards of NaN, and the whole of it."""
    count = torch.Size(shape).numel()
    store = torch.full((count + 2 * GUARD,), NAN, dtype=dtype, device="cuda")
    return store[GUARD : GUARD + count].view(shape), store


@MASKS
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (40, 72)], ids=str)
def test_results_are_where_they_should_be(dims: tuple[int, int], causal: bool) -> None:
    for index, (seqlen_q, seqlen_k) in enumerate(((1, 1), (333, 401), (129, 64), (300, 77))):
        q, k, v = draw(index, 2, seqlen_q, seqlen_k, 4, 2, *dims, dtype=DTYPES[index % 2])
        expected, expected_lse = flashhopper.flash_attn_func(q, k, v, causal=causal, return_lse=True)
        for _ in range(3):  # the first call prepares, the next ones remember
            out, store = _guarded(expected.shape, q.dtype)
            result, lse = flashhopper.flash_attn_func(q, k, v, causal=causal, out=out, return_lse=True)
            assert result is out
            assert_equal_bits(out, expected)
            assert_equal_bits(lse, expected_lse)
            assert store[:GUARD].isnan().all()
            assert store[-GUARD:].isnan().all()
        assert judge(out, lse, q, k, v, causal).problem() is None


def test_no_memory_is_allocated_for_it() -> None:
    q, k, v = draw(1, 1, 8192, 8192, 8, 8, 128)
    out = torch.empty_like(q)
    flashhopper.flash_attn_func(q, k, v, out=out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flashhopper.flash_attn_func(q, k, v, out=out)
    assert torch.cuda.max_memory_allocated() - before <= 1 << 20


@MASKS
def test_in_a_graph(causal: bool) -> None:
    q, k, v = draw(2, 2, 700, 700, 8, 2, 128)
    out = torch.full_like(q, NAN)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        flashhopper.flash_attn_func(q, k, v, causal=causal, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashhopper.flash_attn_func(q, k, v, causal=causal, out=out)
    for seed in (3, 4):
        for target, source in zip((q, k, v), draw(seed, 2, 700, 700, 8, 2, 128), strict=True):
            target.copy_(source)
        out.fill_(NAN)
        graph.replay()
        assert_equal_bits(out, flashhopper.flash_attn_func(q, k, v, causal=causal))


def test_a_misaligned_address_is_refused_in_packed_calls_too() -> None:
    arguments = _packed(12, 64, 64)
    store = torch.full((310 * 4 * 64 + 8,), NAN, dtype=arguments[0].dtype, device="cuda")
    with pytest.raises(ValueError, match="out cannot be written in 16-byte pieces"):
        flashhopper.flash_attn_varlen_func(*arguments, out=store[1:-7].view(310, 4, 64))
    assert store.isnan().all()


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_a_misaligned_address_is_refused_by_name(softcap: float) -> None:
    q, k, v = draw(5, 1, 64, 64, 2, 2, 64)
    store = torch.full((q.numel() + 8,), NAN, dtype=q.dtype, device="cuda")
    with pytest.raises(ValueError, match="out cannot be written in 16-byte pieces"):
        flashhopper.flash_attn_func(q, k, v, softcap=softcap, out=store[1 : 1 + q.numel()].view(q.shape))
    assert store.isnan().all()


@pytest.mark.parametrize("option", [{"window_size": (40, 0)}, {"softcap": 2.0}], ids=str)
def test_with_options(option: dict[str, object]) -> None:
    q, k, v = draw(6, 2, 200, 300, 4, 2, 64)
    out, store = _guarded(q.shape, q.dtype)
    assert flashhopper.flash_attn_func(q, k, v, out=out, **option) is out  # type: ignore[arg-type]
    assert_equal_bits(out, flashhopper.flash_attn_func(q, k, v, **option))  # type: ignore[arg-type]
    assert store[:GUARD].isnan().all()
    assert store[-GUARD:].isnan().all()


def _packed(seed: int, head_dim: int, head_dim_v: int) -> tuple[Any, ...]:
    """Sequences without queries, without keys, and rows of no sequence at the end."""
    q, k, v = (x[0] for x in draw(seed, 1, 310, 400, 4, 2, head_dim, head_dim_v))
    offsets_q, offsets_k = (
        torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 100, 100, 171, 300], [0, 0, 33, 300, 400])
    )
    return q, k, v, offsets_q, offsets_k, 129, 267


@MASKS
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"window_size": (40, 0)}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (40, 72)], ids=str)
def test_packed(dims: tuple[int, int], options: dict[str, Any], causal: bool) -> None:
    arguments = _packed(7, *dims)
    expected, expected_lse = flashhopper.flash_attn_varlen_func(*arguments, causal=causal, return_lse=True, **options)
    out, store = _guarded((310, 4, dims[1]), arguments[0].dtype)
    result, lse = flashhopper.flash_attn_varlen_func(*arguments, causal=causal, out=out, return_lse=True, **options)
    assert result is out
    assert_equal_bits(out, expected)
    assert_equal_bits(lse, expected_lse)
    assert not out.isnan().any()
    assert store[:GUARD].isnan().all()
    assert store[-GUARD:].isnan().all()


def test_packed_calls_allocate_no_memory_for_it() -> None:
    q, k, v = (x[0] for x in draw(8, 1, 32768, 32768, 8, 8, 128))
    offsets = torch.tensor([0, 32768], dtype=torch.int32, device="cuda")
    arguments = (q, k, v, offsets, offsets, 32768, 32768)
    out = torch.empty_like(q)
    flashhopper.flash_attn_varlen_func(*arguments, causal=True, out=out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flashhopper.flash_attn_varlen_func(*arguments, causal=True, out=out)
    assert torch.cuda.max_memory_allocated() - before < out.nbytes // 8  # lse, and the list of blocks


def test_packed_in_a_graph() -> None:
    arguments = _packed(9, 128, 128)
    out = torch.full((310, 4, 128), NAN, dtype=arguments[0].dtype, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        flashhopper.flash_attn_varlen_func(*arguments, causal=True, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashhopper.flash_attn_varlen_func(*arguments, causal=True, out=out)
    for seed in (10, 11):
        for target, source in zip(arguments[:3], _packed(seed, 128, 128)[:3], strict=True):
            target.copy_(source)
        out.fill_(NAN)
        graph.replay()
        assert_equal_bits(out, flashhopper.flash_attn_varlen_func(*arguments, causal=True))
