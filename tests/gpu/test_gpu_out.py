"""out= on the Hopper kernels: they write to the memory given and nowhere else, in graphs too, and allocate nothing."""

from __future__ import annotations

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


def test_packed() -> None:
    q, k, v = (x[0] for x in draw(7, 1, 300, 400, 4, 2, 64))
    offsets_q, offsets_k = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 100, 300], [0, 0, 400]))
    arguments = (q, k, v, offsets_q, offsets_k, 200, 400)
    out, store = _guarded(q.shape, q.dtype)
    assert flashhopper.flash_attn_varlen_func(*arguments, causal=True, out=out) is out
    assert_equal_bits(out, flashhopper.flash_attn_varlen_func(*arguments, causal=True))
    assert store[:GUARD].isnan().all()
    assert store[-GUARD:].isnan().all()
