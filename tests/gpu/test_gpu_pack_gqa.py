"""Query heads that share tiles (pack_gqa): against float64, and against tiles of one head bit for bit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from gpu_support import DTYPES, Tensors, assert_equal_bits, draw, poison_free_memory
from options_support import CAUSAL, PLAIN, Options, dense_problem, launch

import flashhopper

GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 48, 64, 71, 80, 128)  # 71 has no divisor that fits a warpgroup
LENGTHS = (1, 2, 7, 8, 9, 16, 17, 63, 64, 65, 127, 130)
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]


def packed_problem(tensors: Tensors, options: Options) -> str | None:
    """One launch with shared tiles held to the 16-bit rule, and to the bits of tiles of one head."""
    shared = replace(options, pack_gqa=True)
    alone = launch(tensors, replace(options, pack_gqa=False))
    for mine, right in zip(launch(tensors, shared), alone, strict=True):
        assert_equal_bits(mine, right)
    return dense_problem(tensors, shared)


@pytest.mark.parametrize("group", [group for group in GROUPS if group != 71])
def test_groups_and_lengths(group: int) -> None:
    """Warpgroups that heads fill and that they do not, positions that end within a warpgroup, one and two KV heads."""
    for i, seqlen_q in enumerate(LENGTHS):
        kv_heads, head_dim = (1, 128) if i % 2 or group > 16 else (2, 64)
        tensors = draw(group + seqlen_q, 2, seqlen_q, 200 + 37 * i, group * kv_heads, kv_heads, head_dim)
        problem = packed_problem(tensors, (PLAIN, CAUSAL)[i // 2 % 2])
        assert problem is None, f"seqlen_q {seqlen_q}: {problem}"


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_kernel(dims: tuple[int, int], dtype: torch.dtype) -> None:
    for group, seqlen_q, options in ((8, 5, PLAIN), (8, 50, CAUSAL), (7, 130, CAUSAL), (3, 33, Options(90, 4))):
        tensors = draw(sum(dims), 2, seqlen_q, 413, 2 * group, 2, *dims, dtype=dtype)
        problem = packed_problem(tensors, options)
        assert problem is None, f"group {group}, seqlen_q {seqlen_q}: {problem}"


@pytest.mark.parametrize("group", [4, 7, 16])
def test_windows(group: int) -> None:
    """As many keys as queries, fewer, more; rows and tiles that see nothing."""
    for seqlen_q, seqlen_k in ((130, 130), (100, 30), (20, 500), (1, 300)):
        tensors = draw(group + seqlen_k, 2, seqlen_q, seqlen_k, 2 * group, 2, 128)
        for left, right in ((-1, 0), (0, 0), (17, 0), (64, 64), (-1, 5), (100, -1)):
            problem = packed_problem(tensors, Options(left, right))
            assert problem is None, f"Sq {seqlen_q} Sk {seqlen_k} window ({left}, {right}): {problem}"


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_long_queries(dims: tuple[int, int]) -> None:
    """As causal and window calls share tiles by themselves: many tiles, clusters of them, rows without keys, groups
    that leave rows of a tile unused.
    """
    shapes = ((8, 2100, 2100), (4, 1500, 400), (7, 700, 2100), (3, 1030, 1030))
    for i, (group, seqlen_q, seqlen_k) in enumerate(shapes):
        tensors = draw(group, 1, seqlen_q, seqlen_k, group, 1, *dims, dtype=DTYPES[i % 2])
        sink = torch.randn(group, generator=torch.Generator("cuda").manual_seed(i), device="cuda")
        for options in (CAUSAL, Options(127, 0), Options(-1, 300), Options(500, 70, 20.0, sink)):
            problem = packed_problem(tensors, options)
            assert problem is None, f"group {group}, Sq {seqlen_q} Sk {seqlen_k}, {options}: {problem}"


def test_no_keys() -> None:
    """Rows get 0 and their own head's sink, or -inf without one."""
    tensors, sink = draw(3, 2, 50, 0, 14, 2, 64), torch.randn(14, device="cuda")
    for logits in (None, sink):
        out, lse = launch(tensors, Options(sink=logits, pack_gqa=True))
        assert not out.any()
        expected = torch.full_like(sink, -torch.inf) if logits is None else sink
        assert_equal_bits(lse, expected.view(1, 14, 1).expand_as(lse))


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_softcaps_and_sinks(dims: tuple[int, int]) -> None:
    """Each query head of a tile has its own sink; in rows that see nothing, whatever their tile sees, lse is that."""
    for group, seqlen_q, seqlen_k in ((8, 9, 200), (7, 60, 40), (16, 1, 77), (4, 400, 150)):
        tensors = draw(group, 2, seqlen_q, seqlen_k, 2 * group, 2, *dims)
        sink = 4 * torch.randn(2 * group, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
        for softcap in (0.0, 20.0):
            options = Options(-1, 0, softcap, sink)
            problem = packed_problem(tensors, options)
            assert problem is None, f"group {group}, softcap {softcap}: {problem}"
            unseen = launch(tensors, options)[1][:, :, : max(0, seqlen_q - seqlen_k)]
            assert_equal_bits(unseen, sink.view(1, -1, 1).expand_as(unseen))


def views(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Tensors]:
    """The same values in other layouts: heads first, batch innermost, slices of wider tensors with NaN in the gaps."""

    def heads_first(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def batch_inside(x: torch.Tensor) -> torch.Tensor:
        return x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)

    def gaps(x: torch.Tensor) -> torch.Tensor:
        wide = x.new_full((x.size(0), x.size(1) + 3, x.size(2) + 5, x.size(3) + 16), torch.nan)
        view = wide[:, 1:-2, 2:-3, 8:-8]
        view.copy_(x)
        return view

    fused = torch.cat((q, k[:, : q.size(1)], v[:, : q.size(1)]), 2)
    heads, kv_heads = q.size(2), k.size(2)
    made = {f.__name__: (f(q), f(k), f(v)) for f in (heads_first, batch_inside, gaps)}
    made["queries alone"] = (gaps(q), k, heads_first(v))
    made["fused"] = (fused[:, :, :heads], fused[:, :, heads : heads + kv_heads], fused[:, :, heads + kv_heads :])
    return made


@pytest.mark.parametrize("group", [2, 7, 8])
def test_layouts(group: int) -> None:
    for seqlen in (1, 21, 129):
        tensors = draw(group, 3, seqlen, seqlen + 60, 2 * group, 2, 128)
        for name, layout in views(*tensors).items():
            problem = packed_problem(layout, CAUSAL)
            assert problem is None, f"{name}, {seqlen}: {problem}"


def test_random_problems() -> None:
    random_ = random.Random(5)
    for seed in range(40):
        group, kv_heads = random_.choice([g for g in GROUPS if g <= 16]), random_.randint(1, 3)
        dim, seqlen_q = 8 * random_.randint(1, 32), random_.choice((1, random_.randint(2, 40), random_.randint(2, 300)))
        options = Options(random_.choice((-1, -1, 50)), random_.choice((-1, 0, 9)), random_.choice((0.0, 0.0, 15.0)))
        tensors = draw(seed, random_.randint(1, 3), seqlen_q, random_.randint(1, 700), group * kv_heads, kv_heads, dim)
        problem = packed_problem(tensors, options)
        assert problem is None, f"{[tuple(x.shape) for x in tensors]}, {options}: {problem}"


@pytest.mark.parametrize("seqlen_q", [16, 1024])
def test_the_public_function_packs_where_it_pays(seqlen_q: int) -> None:
    """Same bits, same gradients, whoever chooses; also into the caller's memory and again from memory."""
    q, k, v = draw(12, 4, seqlen_q, 1000, 64, 8, 128)
    assert flashhopper.explain(q, k, v, causal=True).packed_heads == 8
    assert flashhopper.explain(q, k, v).packed_heads == (8 if seqlen_q == 16 else 1)
    assert flashhopper.explain(q, k, v, causal=True, pack_gqa=False).packed_heads == 1
    results = []
    for pack_gqa in (False, None, True, False, None, True):
        poison_free_memory()
        out = torch.full_like(q, torch.nan)
        results.append(flashhopper.flash_attn_func(q, k, v, causal=True, pack_gqa=pack_gqa, return_lse=True, out=out))
    for result in results[1:]:
        for mine, right in zip(result, results[0], strict=True):
            assert_equal_bits(mine, right)
    gradients = []
    for pack_gqa in (False, True):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flashhopper.flash_attn_func(*leaves, causal=True, pack_gqa=pack_gqa, deterministic=True)
        gradients.append(torch.autograd.grad(out, leaves, torch.ones_like(q)))
    for mine, right in zip(*gradients, strict=True):
        assert_equal_bits(mine, right)


def test_a_graph_of_a_decode_step() -> None:
    q, k, v = draw(13, 16, 1, 3000, 64, 8, 128)
    expected = flashhopper.flash_attn_func(q, k, v, pack_gqa=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashhopper.flash_attn_func(q, k, v)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert_equal_bits(out, expected)


def test_a_group_of_a_large_prime_is_not_packed() -> None:
    q, k, v = draw(14, 1, 3, 100, 71, 1, 64)
    plan = flashhopper.explain(q, k, v)
    assert (plan.backend, plan.packed_heads) == ("hopper", 1)
    with pytest.raises(ValueError, match="divisor from 2 to 64"):
        flashhopper.flash_attn_func(q, k, v, pack_gqa=True)
    with pytest.raises(ValueError, match="divisor from 2 to 64"):
        launch((q, k, v), Options(pack_gqa=True))


def test_many_tiles() -> None:
    """More tiles than multiprocessors, each with several key blocks, and a margin of them left free."""
    for tensors in (draw(15, 40, 20, 1100, 32, 8, 64), draw(16, 2, 1100, 1100, 16, 2, 128)):
        assert packed_problem(tensors, CAUSAL) is None
        alone = flashhopper.flash_attn_func(*tensors, causal=True, pack_gqa=False)
        for margin in (0, 7, 131):
            mine = flashhopper.flash_attn_func(*tensors, causal=True, sm_margin=margin, pack_gqa=True)
            assert_equal_bits(mine, alone)
