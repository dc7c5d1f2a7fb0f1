"""Packed sequences on the forward kernel: ragged lengths, rows that do not exist, bounds inside one tensor map, order,
graphs, sizes past 32 bits.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from gpu_support import DTYPES, NAN, assert_equal_bits, draw, poison_free_memory
from options_support import (
    CAUSAL,
    PLAIN,
    Options,
    Packed,
    attention,
    draw_packed,
    judge,
    launch,
    offsets,
    packed_attention,
    packed_problem,
    random_batch,
)

import flashhopper
from flashhopper.engine import hopper

MASKS = pytest.mark.parametrize("options", [PLAIN, CAUSAL], ids=["full", "causal"])
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (40, 72), (128, 64)]
LENGTHS_Q = [0, 1, 130, 64, 0, 0, 300, 7, 257, 0]
LENGTHS_K = [5, 1, 0, 300, 0, 9, 129, 200, 257, 0]


def public(batch: Packed, options: Options, **more: object) -> tuple[torch.Tensor, torch.Tensor]:
    used_q, used_k = batch.used()
    poison_free_memory()
    return flashhopper.flash_attn_varlen_func(  # type: ignore[return-value]
        *(batch.q, batch.k, batch.v, batch.cu_q, batch.cu_k, *batch.longest()),
        seqused_q=used_q,
        seqused_k=used_k,
        return_lse=True,
        **options.public(),
        **more,
    )


@MASKS
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_ragged_batches(dims: tuple[int, int], dtype: torch.dtype, options: Options) -> None:
    batch = draw_packed(sum(dims), LENGTHS_Q, LENGTHS_K, 4, 2, *dims, dtype=dtype, behind=3)
    problem = packed_problem(batch, options)
    assert problem is None, problem


@MASKS
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)], ids=str)
def test_lengths_at_the_edges_of_boxes(dims: tuple[int, int], options: Options) -> None:
    """Every sequence lies between rows of NaN that its place holds and that do not exist."""
    edges = [n + d for n in (64, 80, 112, 128, 160, 192, 256) for d in (-1, 0, 1)]
    used_q, used_k = [*edges, *edges[::-1]], [*edges, *edges[3:], *edges[:3]]
    lengths_q, lengths_k = ([n + (i % 3) * 7 for i, n in enumerate(x)] for x in (used_q, used_k))
    batch = draw_packed(sum(dims), lengths_q, lengths_k, 1, 1, *dims, used_q=used_q, used_k=used_k, behind=300)
    problem = packed_problem(batch, options)
    assert problem is None, problem


@MASKS
def test_rows_that_do_not_exist(options: Options) -> None:
    used_q, used_k = [0, 3, 200, 64, 0, 300], [10, 0, 130, 7, 0, 300]
    batch = draw_packed(3, [9, 200, 200, 65, 0, 300], [20, 90, 300, 7, 3, 300], 4, 2, 128, used_q=used_q, used_k=used_k)
    problem = packed_problem(batch, options)
    assert problem is None, problem
    out, lse = public(batch, options)
    exact, exact_lse = flashhopper.reference_attention(
        *(batch.q.nan_to_num(), batch.k.nan_to_num(), batch.v.nan_to_num()),
        causal=options.right == 0,
        cu_seqlens_q=batch.cu_q,
        cu_seqlens_k=batch.cu_k,
        seqused_q=batch.used()[0],
        seqused_k=batch.used()[1],
    )
    assert (out.double() - exact).abs().max().item() < 2e-2
    assert torch.equal(lse.isinf(), exact_lse.isinf())


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (8, 1), (12, 4), (71, 1)])
def test_groups(heads: int, kv_heads: int) -> None:
    for options, head_dim in itertools.product((PLAIN, CAUSAL), (64, 128)):
        problem = packed_problem(draw_packed(heads, LENGTHS_Q, LENGTHS_K, heads, kv_heads, head_dim), options)
        assert problem is None, problem


@MASKS
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_a_uniform_batch_is_the_dense_one(head_dim: int, options: Options) -> None:
    q, k, v = draw(head_dim, 5, 333, 333, 4, 2, head_dim)
    expected, expected_lse = flashhopper.flash_attn_func(q, k, v, causal=options.right == 0, return_lse=True)
    batch = Packed(*(x.flatten(0, 1) for x in (q, k, v)), [333] * 5, [333] * 5)
    out, lse = public(batch, options)
    assert_equal_bits(out.view_as(expected), expected)
    assert_equal_bits(lse.view(4, 5, 333).transpose(0, 1), expected_lse)


@MASKS
def test_a_sequence_does_not_know_its_neighbours(options: Options) -> None:
    rng = random.Random(5)
    lengths = [rng.choice([0, 1, 50, 200, 500]) for _ in range(63)]
    lengths.insert(20, 300)
    batch = draw_packed(8, lengths, lengths, 4, 2, 128)
    alone = slice(sum(lengths[:20]), sum(lengths[:20]) + 300)
    out, lse = public(batch, options)
    expected, expected_lse = public(Packed(batch.q[alone], batch.k[alone], batch.v[alone], [300], [300]), options)
    assert_equal_bits(out[alone], expected)
    assert_equal_bits(lse[:, alone], expected_lse)


def test_strides() -> None:
    """Heads outside rows, and slices of one fused tensor."""
    lengths = [100, 0, 333]
    batch = draw_packed(9, lengths, lengths, 4, 4, 64)
    fused = torch.full((433, 3, 5, 72), NAN, dtype=torch.bfloat16, device="cuda")
    fused[:, 0, :4, :64], fused[:, 1, :4, :64], fused[:, 2, :4, :64] = batch.q, batch.k, batch.v
    expected = public(batch, CAUSAL)
    views = Packed(*(fused[:, i, :4, :64] for i in range(3)), lengths, lengths)
    turned = Packed(
        *(x.transpose(0, 1).contiguous().transpose(0, 1) for x in (batch.q, batch.k, batch.v)), *[lengths] * 2
    )
    for other in (views, turned):
        for mine, right in zip(public(other, CAUSAL), expected, strict=True):
            assert_equal_bits(mine, right)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=str)
def test_batches_without_rows(lengths: list[int]) -> None:
    for behind in (0, 5):
        out, lse = public(draw_packed(1, lengths, lengths, 2, 1, 64, behind=behind), CAUSAL)
        assert out.shape == (behind, 2, 64)
        assert not out.any()
        assert (lse == -torch.inf).all()


def test_offsets_beyond_the_tensors_read_nothing() -> None:
    """They cannot be refused without waiting for the device: they end with the tensors."""
    batch = draw_packed(2, [100, 150], [130, 200], 4, 2, 128)
    expected = launch((batch.q, batch.k, batch.v), PLAIN, batch)
    batch.cu_q[2], batch.cu_k[2] = 2_000_000_000, 1_000_000
    for mine, right in zip(launch((batch.q, batch.k, batch.v), PLAIN, batch), expected, strict=True):
        assert_equal_bits(mine, right)
    for wild in ([-5, 100, 90], [0, 2**31 - 1, 0], [250, 250, -(2**31)]):
        batch.cu_q.copy_(torch.tensor(wild))
        launch((batch.q, batch.k, batch.v), PLAIN, batch)  # writes nothing outside, and ends


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_call_waits_for_the_device() -> None:
    batch = draw_packed(4, LENGTHS_Q, LENGTHS_K, 4, 2, 128)
    public(batch, CAUSAL)
    longest = batch.longest()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        flashhopper.flash_attn_varlen_func(batch.q, batch.k, batch.v, batch.cu_q, batch.cu_k, *longest, causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@MASKS
def test_a_replayed_graph_takes_the_lengths_of_its_replay(options: Options) -> None:
    first, second = [100, 0, 300, 50], [0, 250, 1, 190]
    batch = draw_packed(6, first, first, 8, 2, 128, behind=10)
    used = torch.tensor(first).int().cuda()
    arguments = (batch.q.nan_to_num(), batch.k.nan_to_num(), batch.v.nan_to_num(), batch.cu_q, batch.cu_k, 460, 460)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        flashhopper.flash_attn_varlen_func(*arguments, seqused_k=used, causal=options.right == 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flashhopper.flash_attn_varlen_func(
            *arguments, seqused_k=used, causal=options.right == 0, return_lse=True
        )
    for lengths in (second, first, [441, 0, 0, 0], second):
        batch.cu_q.copy_(offsets(lengths))
        batch.cu_k.copy_(offsets(lengths))
        used.copy_(torch.tensor([n // 2 + n % 2 for n in lengths]))
        out.fill_(NAN)
        lse.fill_(NAN)
        graph.replay()
        expected, expected_lse = flashhopper.flash_attn_varlen_func(
            *arguments, seqused_k=used, causal=options.right == 0, return_lse=True
        )
        assert_equal_bits(out, expected)
        assert_equal_bits(lse, expected_lse)
        assert not out.isnan().any()


def test_a_graph_keeps_its_workspace() -> None:
    """Hundreds of tiles and a sink that is converted: nothing made during capture may take the workspace's place."""
    lengths = [700, 300, 1, 900]
    batch = draw_packed(12, lengths, lengths, 24, 4, 128)
    sink = torch.linspace(-9, -1, 24, device="cuda").bfloat16()
    options = Options(right=0, sink=sink)
    graph = torch.cuda.CUDAGraph()
    expected, expected_lse = public(batch, options)
    dense = [x[None] for x in (batch.q, batch.k, batch.v)]
    right = flashhopper.flash_attn_func(*dense, causal=True, sink=sink)
    cu_q, cu_k = batch.cu_q.clone(), batch.cu_k.clone()
    with torch.cuda.graph(graph):
        out, lse = flashhopper.flash_attn_varlen_func(
            *(batch.q, batch.k, batch.v, cu_q, cu_k, 900, 900), causal=True, sink=sink, return_lse=True
        )
        whole = flashhopper.flash_attn_func(*dense, causal=True, sink=sink)
    for _ in range(3):
        for result in (out, lse, whole):
            result.fill_(NAN)
        graph.replay()
        assert_equal_bits(out, expected)
        assert_equal_bits(lse, expected_lse)
        assert_equal_bits(whole, right)


def test_many_short_sequences() -> None:
    """More than one round of the list: 70000 sequences of two rows, among as many empty ones."""
    q, k, v = draw(11, 70_000, 2, 2, 2, 1, 64)
    lengths = [2, 0] * 70_000
    out, lse = public(Packed(*(x.flatten(0, 1) for x in (q, k, v)), lengths, lengths), CAUSAL)
    expected, expected_lse = flashhopper.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert_equal_bits(out.view_as(expected), expected)
    assert_equal_bits(lse.view(2, 70_000, 2).transpose(0, 1), expected_lse)


@pytest.mark.xdist_group("large")
@pytest.mark.usefixtures("empty_cache")
def test_millions_of_tokens_past_2_31_elements() -> None:
    """Two sequences of 2.1 million tokens, rows of 1024 elements: every offset needs 64 bits."""
    half, row = 2_100_000, 1024
    store = torch.empty((2 * half, row), dtype=torch.bfloat16, device="cuda")
    assert store.numel() > 2**32
    generator = torch.Generator(device="cuda").manual_seed(1)
    q, k, v = (store[:, i * 64 : (i + 1) * 64].unsqueeze(1) for i in range(3))
    for x in (q, k, v):
        x.copy_(torch.empty(x.shape, dtype=x.dtype, device="cuda").normal_(generator=generator))
    options = Options(left=300, right=0)
    out, lse = public(Packed(q, k, v, [half, half], [half, half]), options)
    assert not out.isnan().any()
    for start in (0, half - 200, half, half + 77, 2 * half - 200):
        begin = 0 if start < half else half
        keys, rows = slice(max(begin, start - 300), start + 200), slice(start, start + 200)
        parts = (q[None, rows], k[None, keys], v[None, keys])
        exact = attention(*parts, options, torch.float64)
        plain, _ = attention(*parts, options, torch.bfloat16)
        problem = judge((out[None, rows], lse[None, :, rows]), exact, plain)
        assert problem is None, f"rows from {start}: {problem}"


def test_gradients_come_from_somewhere() -> None:
    """Whichever engine has them, they are those of the sequences."""
    flashhopper.set_backend("auto")
    batch = draw_packed(12, [100, 0, 65], [70, 3, 130], 4, 2, 64)
    leaves = [x.requires_grad_() for x in (batch.q, batch.k, batch.v)]
    out, _ = public(batch, CAUSAL)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, dout)
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    exact, _ = packed_attention(Packed(*exact_leaves, batch.lengths_q, batch.lengths_k), CAUSAL, torch.float64)
    for mine, right in zip(found, torch.autograd.grad(exact, exact_leaves, dout.double()), strict=True):
        assert (mine.double() - right).abs().max().item() < 5e-2


def test_explain() -> None:
    """The workspace is what a call allocates beside its results, and nothing else of the plan is of a dense call."""
    batch = draw_packed(13, [1000, 0, 65, 3000], [700, 3, 130, 3000], 8, 2, 128)
    packing = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), (batch.cu_q, batch.cu_k), strict=True))
    longest = dict(zip(("max_seqlen_q", "max_seqlen_k"), batch.longest(), strict=True))
    plan = flashhopper.explain(batch.q, batch.k, batch.v, causal=True, **packing, **longest)
    assert (plan.backend, plan.is_bound, plan.copies) == ("hopper", True, ())
    assert plan.config.startswith("fwd_hd128")
    assert plan.gradients.startswith("hopper, bwd_hd128")
    assert "list made on the device" in plan.scheduler
    blocks = sum(-(-n // plan.tile_m) for n in batch.lengths_q)
    assert 0 < plan.grid <= 8 * blocks <= plan.tiles
    public(batch, CAUSAL)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    out, lse = flashhopper.flash_attn_varlen_func(
        *(batch.q, batch.k, batch.v), **packing, **longest, causal=True, return_lse=True
    )
    # The rest of the workspace is kept from call to call.
    of_this_call = plan.workspace_bytes - hopper.module.workspace_bytes()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    assert peak - before == out.nbytes + lse.nbytes + of_this_call


CHUNKS, PER_CHUNK = 6, 16


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_batches(chunk: int) -> None:
    rng = random.Random(70_000 + chunk)
    problems = []
    for index in range(PER_CHUNK):
        # Over a handful of numbers the yardstick may be small by luck.
        sizes, window = random_batch(rng, DIMS, least_outputs=4096)
        label = f"{index}: {sizes} {window}"
        batch = draw_packed(sizes.pop("seed"), *sizes.pop("shape"), *sizes.pop("dims"), **sizes)
        sink = torch.randn(batch.q.size(1), device="cuda") if rng.random() < 0.3 else None
        problem = packed_problem(batch, Options(*window, softcap=rng.choice([0.0, 0.0, 15.0]), sink=sink))
        if problem:
            problems.append(f"{label}: {problem}")
    assert not problems, f"{len(problems)} of {PER_CHUNK} wrong\n" + "\n".join(problems)
