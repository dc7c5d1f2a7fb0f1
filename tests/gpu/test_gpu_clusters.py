"""Clusters of the forward: neighbouring tiles that load keys for one another give what a tile alone gives.

Lengths with many query blocks, an odd last one, blocks whose neighbour sees more keys, and blocks that see none.
"""

from __future__ import annotations

import pytest
import torch
from gpu_support import DTYPES, assert_attends, assert_equal_bits, draw, judged, poison_free_memory, poisoned_forward
from options_support import Packed, draw_packed

import flashhopper

SHARED = [(128, 128), (192, 192), (192, 128), (256, 256)]  # head dimensions whose kernels have clusters
LENGTHS = [(2048, 2048), (2100, 2100), (2304, 300), (2100, 5), (256, 2500), (1000, 1000), (2049, 2177), (700, 3300)]
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
DIMS = pytest.mark.parametrize("dims", SHARED, ids=lambda dims: f"d{dims[0]}v{dims[1]}")


def _multiprocessors() -> int:
    return torch.cuda.get_device_properties("cuda").multi_processor_count


@MASKS
@DIMS
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda x: f"{x[0]}x{x[1]}")
def test_float64(dims: tuple[int, int], lengths: tuple[int, int], causal: bool) -> None:
    for index, dtype in enumerate(DTYPES):  # heads that share tiles under the mask, and heads that cannot
        assert_attends(*draw(index, 1, *lengths, 4, (2, 4)[index], *dims, dtype=dtype), causal)


@MASKS
@DIMS
@pytest.mark.parametrize("margin", [0, 1, -2, -3])
def test_bits_do_not_depend_on_clusters(dims: tuple[int, int], causal: bool, margin: int) -> None:
    """One multiprocessor has no cluster, more have; with rows without keys too. margin < 0: so many are left."""
    margin = margin % _multiprocessors()
    for seqlen_q, seqlen_k, kv_heads in ((2100, 3600, 2), (4000, 3700, 6)):
        q, k, v = draw(seqlen_q, 2, seqlen_q, seqlen_k, 6, kv_heads, *dims)
        alone = poisoned_forward(q, k, v, causal, sm_margin=_multiprocessors() - 1)
        together = poisoned_forward(q, k, v, causal, sm_margin=margin)
        judged.count += 1
        for a, b in zip(alone, together, strict=True):
            assert_equal_bits(a, b)


@DIMS
@pytest.mark.parametrize("window", [(-1, 37), (-1, 700)], ids=str)
def test_right_bounds_and_caps(dims: tuple[int, int], window: tuple[int, int]) -> None:
    """A bound on the right beyond the diagonal, and a cap; a left bound has no clusters."""
    q, k, v = draw(3, 1, 1500, 3400, 4, 2, *dims)
    sink = torch.randn(4, device="cuda")
    for options in ({}, {"softcap": 20.0, "sink": sink}):
        plan = flashhopper.explain(q, k, v, window_size=window)
        assert (plan.backend, plan.cluster) == ("hopper", 2), plan
        out = flashhopper.flash_attn_func(q, k, v, window_size=window, **options)
        exact, _ = flashhopper.reference_attention(q, k, v, window_size=window, **options)
        judged.count += 1
        assert (out.double() - exact).abs().max() < 2e-2


@DIMS
def test_places_pass_between_neighbours(dims: tuple[int, int]) -> None:
    """Hardly any tile has keys, so that nothing but the letters with places couples the two: none may be lost."""
    shared, alone = (draw(17, 4, 4096, 64, 16, kv_heads, *dims) for kv_heads in (4, 16))  # heads of a tile
    for tensors, margin in ((shared, 0), (alone, 0), (shared, 1), (alone, 0), (alone, 32), (shared, 0)):
        out, lse = poisoned_forward(*tensors, True, sm_margin=margin)
        judged.count += 1
        assert (out[:, :4032] == 0).all()
        assert (lse[..., :4032] == -torch.inf).all()
        assert lse[..., 4032:].isfinite().all()


def _packed(batch: Packed, causal: bool, sm_margin: int) -> tuple[tuple[torch.Tensor, ...], int]:
    """(out, lse), and the size of the clusters."""
    used_q, used_k = batch.used()
    arguments = (batch.q, batch.k, batch.v)
    longest_q, longest_k = batch.longest()
    options = {
        "cu_seqlens_q": batch.cu_q,
        "cu_seqlens_k": batch.cu_k,
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_k,
        "seqused_q": used_q,
        "seqused_k": used_k,
        "causal": causal,
        "sm_margin": sm_margin,
    }
    poison_free_memory()
    found = flashhopper.flash_attn_varlen_func(*arguments, **options, return_lse=True)
    return found, flashhopper.explain(*arguments, **options).cluster


@MASKS
@DIMS
@pytest.mark.parametrize("is_used", [False, True], ids=["all", "used"])
def test_packed_bits_do_not_depend_on_clusters(dims: tuple[int, int], causal: bool, is_used: bool) -> None:
    """Long sequences, with odd numbers of blocks, without queries, with rows that do not exist or see no key."""
    lengths_q = [5000, 0, 8192, 4300, 1, 7800, 9000]
    lengths_k = [5100, 300, 8192, 4301, 9, 130, 9000]
    used_q, used_k = ([n - n * i // 8 for i, n in enumerate(x)] if is_used else None for x in (lengths_q, lengths_k))
    batch = draw_packed(sum(dims), lengths_q, lengths_k, 4, 2, *dims, used_q=used_q, used_k=used_k, behind=700)
    together, cluster = _packed(batch, causal, 1)
    alone, no_cluster = _packed(batch, causal, _multiprocessors() - 1)
    assert (cluster, no_cluster) == (2, 1)
    judged.count += 1
    for a, b in zip(together, alone, strict=True):
        assert_equal_bits(a, b)


@MASKS
@DIMS
@pytest.mark.parametrize("seqlen", [4096, 4200, 300])
def test_packed_batches_of_one_length(dims: tuple[int, int], causal: bool, seqlen: int) -> None:
    """They have clusters where dense ones have, and their bits."""
    q, k, v = draw(seqlen, 3, seqlen, seqlen, 4, 4, *dims)
    expected, expected_lse = flashhopper.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    batch = Packed(*(x.flatten(0, 1) for x in (q, k, v)), [seqlen] * 3, [seqlen] * 3)
    (out, lse), cluster = _packed(batch, causal, 0)
    assert cluster == flashhopper.explain(q, k, v, causal=causal).cluster == (2 if seqlen > 4000 else 1)
    judged.count += 1
    assert_equal_bits(out.view_as(expected), expected)
    assert_equal_bits(lse.view(4, 3, seqlen).transpose(0, 1), expected_lse)


def test_plan() -> None:
    """Which calls have clusters."""
    q, k, v = draw(0, 1, 2048, 2048, 4, 4, 128)
    assert flashhopper.explain(q, k, v).cluster == 2
    assert flashhopper.explain(q, k, v, causal=True).cluster == 1  # half a block of 8.5 is only the neighbour's
    assert flashhopper.explain(*draw(0, 1, 4096, 4096, 4, 4, 128), causal=True).cluster == 2
    assert flashhopper.explain(q, k, v, window_size=(64, 0)).cluster == 1
    assert flashhopper.explain(q[:, :300], k, v).cluster == 1  # three blocks
    assert flashhopper.explain(q[..., :64], k[..., :64], v[..., :64]).cluster == 1


@MASKS
def test_graph(causal: bool) -> None:
    """Clusters in a captured graph, replayed: the counter is left zero."""
    q, k, v = draw(1, 1, 4096, 4096, 8, 8, 128)
    expected = flashhopper.flash_attn_func(q, k, v, causal=causal)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashhopper.flash_attn_func(q, k, v, causal=causal)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        judged.count += 1
        assert_equal_bits(out, expected)
