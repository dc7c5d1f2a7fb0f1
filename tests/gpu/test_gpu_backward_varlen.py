"""Gradients of packed sequences by the kernels: lengths around tile edges, empty sequences, used lengths, rows of no
sequence, options, the deterministic order; and that a sequence's gradients are its own.
"""

from __future__ import annotations

import pytest
import torch
from gpu_support import DTYPES, NAN, assert_equal_bits, draw, poison_free_memory
from gradient_support import Options, assert_right, attend, draw_sink, gradients, judge, offsets

import flashhopper

pytestmark = pytest.mark.usefixtures("hopper_gradients")
NATIVE = [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)]
# Tokens of q and k of each sequence.
BATCHES = (
    ((64, 64), (128, 128), (1, 1), (200, 200)),
    ((63, 129), (300, 77), (0, 50), (65, 300), (17, 0), (128, 1)),
    ((0, 0), (500, 500), (0, 0)),
    ((1, 400),),
)
CAUSAL = (-1, 0)


def problem(
    seed: int,
    options: Options,
    heads: int,
    kv_heads: int,
    *dims: int,
    dtype: torch.dtype = torch.bfloat16,
    more: int = 0,
) -> tuple[torch.Tensor, ...]:
    """q, k, v and dout of a packed batch; more: tokens behind the last sequence."""
    total_q, total_k = (sum(pair[side] for pair in options.taken or options.lengths) + more for side in (0, 1))
    q, k, v = (x[0] for x in draw(seed, 1, total_q, total_k, heads, kv_heads, *dims, dtype=dtype))
    generator = torch.Generator(device="cuda").manual_seed(seed + 7_919)
    return q, k, v, torch.randn((total_q, heads, v.size(2)), generator=generator, device="cuda").to(dtype)


def draw_packed_dlse(seed: int, q: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed + 104_729)
    return torch.randn((q.size(1), q.size(0)), generator=generator, device="cuda")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", NATIVE, ids=str)
def test_batches(dims: tuple[int, int], deterministic: bool) -> None:
    for index, lengths in enumerate(BATCHES):
        for window in ((-1, -1), CAUSAL):
            options = Options(window, lengths=lengths, deterministic=deterministic)
            q, k, v, dout = problem(index, options, 4, 2, *dims, dtype=DTYPES[index % 2])
            dlse = draw_packed_dlse(index, q) if index % 2 else None
            assert_right(q, k, v, dout, options, dlse)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_windows_softcap_and_sink(head_dim: int) -> None:
    for index, lengths in enumerate(BATCHES[:2]):
        for window, softcap, has_sink in (((100, 0), 0.0, True), ((40, 70), 30.0, False), ((-1, 0), 10.0, True)):
            sink = draw_sink(index, 8) if has_sink else None
            options = Options(window, softcap, sink, lengths=lengths, deterministic=index == 1)
            q, k, v, dout = problem(index, options, 8, 2, head_dim)
            assert_right(q, k, v, dout, options, draw_packed_dlse(index, q))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_used_lengths(dims: tuple[int, int]) -> None:
    """Rows past the used ones, and behind the last sequence, are not read, whatever they hold, and get gradient 0."""
    taken = ((100, 200), (300, 300), (64, 128), (40, 300), (10, 10))
    used = ((70, 130), (300, 1), (0, 128), (40, 0), (10, 10))
    more = 150
    for deterministic in (False, True):
        options = Options(CAUSAL, lengths=used, taken=taken, deterministic=deterministic)
        q, k, v, dout = problem(1, options, 4, 2, *dims, more=more)
        dlse = draw_packed_dlse(1, q)
        is_used = [torch.zeros(x.size(0), dtype=torch.bool, device="cuda") for x in (q, k)]
        for slices in options.slices():
            for mask, rows in zip(is_used, slices, strict=True):
                mask[rows] = True
        expected = gradients(q, k, v, dout, options, dlse)
        problem_found = judge(expected, q, k, v, dout, options, dlse)
        assert problem_found is None, problem_found
        for x in (q, dout):
            x[~is_used[0]] = NAN
        dlse[:, ~is_used[0]] = NAN
        for x in (k, v):
            x[~is_used[1]] = NAN
        found = gradients(q, k, v, dout, options, dlse)
        for gradient, mask in zip(found, (is_used[0], is_used[1], is_used[1]), strict=True):
            assert not gradient[~mask].any(), "rows that are not used got a gradient"
            assert gradient.isfinite().all()
        for mine, right in zip(found[1:], expected[1:], strict=True):
            assert_equal_bits(mine, right)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_sequence_does_not_feel_its_neighbours(head_dim: int) -> None:
    """dk and dv have the same bits alone and among others, and so has dq in the deterministic order."""
    lengths = ((37, 100), (300, 413), (128, 128), (5, 700))
    options = Options((200, 0), lengths=lengths, deterministic=True)
    q, k, v, dout = problem(2, options, 4, 2, head_dim)
    together = gradients(q, k, v, dout, options)
    for pair, (rows, keys) in zip(lengths, options.slices(), strict=True):
        alone = gradients(q[rows], k[keys], v[keys], dout[rows], Options((200, 0), lengths=(pair,), deterministic=True))
        dense_options = Options((200, 0), deterministic=True)
        dense = gradients(q[None, rows], k[None, keys], v[None, keys], dout[None, rows], dense_options)
        for mine, own, same, part in zip(together, alone, dense, (rows, keys, keys), strict=True):
            assert_equal_bits(mine[part], own)
            assert_equal_bits(own, same[0])


@pytest.mark.parametrize("dims", NATIVE, ids=str)
def test_the_same_bits_every_time(dims: tuple[int, int]) -> None:
    lengths = ((300, 300), (0, 7), (900, 1000), (64, 64), (129, 500))
    options = Options((256, 0), 20.0, draw_sink(3, 8), lengths=lengths, deterministic=True)
    q, k, v, dout = problem(3, options, 8, 2, *dims)
    dlse = draw_packed_dlse(3, q)
    expected = gradients(q, k, v, dout, options, dlse)
    for _ in range(20):
        for mine, right in zip(gradients(q, k, v, dout, options, dlse), expected, strict=True):
            assert_equal_bits(mine, right)


@pytest.mark.parametrize("deterministic", [False, True])
def test_many_sequences(deterministic: bool) -> None:
    """More than the list sorts, most of them short, some empty."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(0, 12, (1500, 2), generator=generator).tolist()
    lengths[700] = [1000, 1200]
    options = Options(CAUSAL, lengths=tuple((a, b) for a, b in lengths), deterministic=deterministic)
    q, k, v, dout = problem(4, options, 2, 1, 64)
    found = gradients(q, k, v, dout, options)
    assert all(x.isfinite().all() for x in found)
    # The rule for the long one alone: the oracle goes one by one.
    rows, keys = options.slices()[700]
    mine = [x[part][None] for x, part in zip(found, (rows, keys, keys), strict=True)]
    one = [x[part][None] for x, part in zip((q, k, v, dout), (rows, keys, keys, rows), strict=True)]
    wrong = judge(mine, one[0], one[1], one[2], one[3], Options(CAUSAL))
    assert wrong is None, wrong


def test_empty_query_sequences() -> None:
    """FA 1254: cu_seqlens_q [0, 0, 1023], cu_seqlens_k [0, 512, 1535]: the backward hung."""
    for deterministic in (False, True):
        options = Options(CAUSAL, lengths=((0, 512), (1023, 1023)), deterministic=deterministic)
        q, k, v, dout = problem(5, options, 2, 2, 128)
        _, dk, dv = assert_right(q, k, v, dout, options)
        assert not dk[:512].any()
        assert not dv[:512].any()


@pytest.mark.parametrize("lengths", [((0, 0), (0, 0)), ((0, 40), (0, 3)), ((40, 0), (3, 0))], ids=str)
def test_nothing_but_empty_sequences(lengths: tuple[tuple[int, int], ...]) -> None:
    options = Options(CAUSAL, lengths=lengths)
    q, k, v, dout = problem(6, options, 2, 2, 64)
    for gradient, x in zip(gradients(q, k, v, dout, options), (q, k, v), strict=True):
        assert gradient.shape == x.shape
        assert not gradient.any()


def test_a_sink_alone() -> None:
    """Sequences without keys, all of them or some: the gradient of lse goes to the sink."""
    for lengths in (((40, 0), (3, 0)), ((40, 0), (30, 30))):
        options = Options(CAUSAL, sink=draw_sink(7, 4), lengths=lengths)
        q, k, v, dout = problem(7, options, 4, 2, 64)
        assert_right(q, k, v, dout, options, draw_packed_dlse(7, q))


def test_strided_inputs() -> None:
    """q, k and v as slices of a fused tensor, whose heads' padding holds NaN."""
    options = Options(CAUSAL, lengths=((100, 100), (37, 37), (300, 300)))
    generator = torch.Generator("cuda").manual_seed(8)
    fused = torch.full((437, 8, 200), NAN, device="cuda", dtype=torch.bfloat16)
    fused[..., :128] = torch.randn(437, 8, 128, device="cuda", generator=generator).bfloat16()
    q, k, v = fused[:, :4, :128], fused[:, 4:6, :128], fused[:, 6:8, :128]
    dout = problem(8, options, 4, 2, 128)[3]
    assert_right(q, k, v, dout.transpose(0, 1).contiguous().transpose(0, 1), options)


def test_a_graph_reads_the_lengths_of_its_replay() -> None:
    """cu_seqlens may change between replays, within the lengths that the capture was told."""
    total, heads, most = 512, 4, 512
    cu = offsets([100, 200, 212])
    options = Options(CAUSAL, lengths=((100, 100), (200, 200), (212, 212)))
    q, k, v, dout = problem(9, options, heads, 2, 64)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> tuple[torch.Tensor, ...]:
        out = flashhopper.flash_attn_varlen_func(*leaves, cu, cu, most, most, causal=True, deterministic=True)
        return torch.autograd.grad(out, leaves, dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        results = step()
    for lengths in ((100, 200, 212), (512, 0, 0), (1, 510, 1)):
        cu.copy_(offsets(lengths))
        for result in results:
            result.detach().fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        wrong = judge(
            results, *(x.detach() for x in leaves), dout, Options(CAUSAL, lengths=tuple((n, n) for n in lengths))
        )
        assert wrong is None, f"{lengths}: {wrong}"
    assert total == sum(lengths)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_host_synchronisation() -> None:
    options = Options(CAUSAL, lengths=((100, 100), (50, 70)))
    q, k, v, dout = problem(10, options, 4, 2, 64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = attend(leaves[0], leaves[1], leaves[2], options)
    torch.autograd.grad(out, leaves, dout, retain_graph=True)
    poison_free_memory()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(out, leaves, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
