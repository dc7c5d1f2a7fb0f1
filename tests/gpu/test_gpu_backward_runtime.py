"""The backward on streams, in threads and graphs, under allocation pressure; reproducibility; memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from gpu_support import (
    DTYPES,
    Tensors,
    assert_equal_bits,
    draw,
    draw_dlse,
    draw_dout,
    gradients,
    judge_gradients,
    poison_free_memory,
)

import flashhopper

pytestmark = pytest.mark.usefixtures("hopper_gradients")
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
NATIVE = [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)]
SLOW_CYCLES = 50_000_000  # some 30 ms of a kernel that only spins
Problem = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
RUNS = 20


def _problem(seed: int, *shape: int) -> Problem:
    q, k, v = draw(seed, *shape)
    return q, k, v, draw_dout(seed, q, v)


def _graph_of(problem: Problem, deterministic: bool = True) -> Callable[[], Tensors]:
    """One causal forward; the call does the backward again and again."""
    leaves = [x.detach().requires_grad_() for x in problem[:3]]
    out = flashhopper.flash_attn_func(*leaves, causal=True, deterministic=deterministic)
    return lambda: torch.autograd.grad(out, leaves, problem[3], retain_graph=True)  # type: ignore[return-value]


def _assert_same(found: Tensors, expected: Tensors) -> None:
    for mine, right in zip(found, expected, strict=True):
        assert_equal_bits(mine, right)


@MASKS
@pytest.mark.parametrize("dims", NATIVE, ids=str)
def test_deterministic_gradients_have_the_same_bits_every_time(dims: tuple[int, int], causal: bool) -> None:
    """deterministic=True with memory that differs from run to run, GQA; through lse as well."""
    q, k, v = draw(1, 2, 1000, 1100, 12, 4, *dims)
    dout, dlse = draw_dout(1, q, v), draw_dlse(1, q)
    expected = gradients(q, k, v, dout, causal, dlse=dlse, deterministic=True)
    for _ in range(RUNS):
        _assert_same(gradients(q, k, v, dout, causal, dlse=dlse, deterministic=True), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_deterministic_beside_other_work(dtype: torch.dtype) -> None:
    """CTAs start in another order when other kernels hold multiprocessors: the bits do not change."""
    q, k, v = draw(2, 2, 1024, 1024, 12, 12, 128, dtype=dtype)
    dout = draw_dout(2, q, v)
    expected = gradients(q, k, v, dout, True, deterministic=True)
    noise = torch.randn(2048, 2048, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(RUNS):
        with torch.cuda.stream(side):
            for _ in range(4):
                noise = (noise @ noise).clamp_(-1, 1)
        _assert_same(gradients(q, k, v, dout, True, deterministic=True), expected)
    torch.cuda.synchronize()


@MASKS
def test_any_order_stays_within_the_rule_every_time(causal: bool) -> None:
    """Without deterministic=True sums of dq may come in any order; the error stays where it was."""
    q, k, v = draw(3, 2, 1000, 1000, 8, 2, 128)
    dout = draw_dout(3, q, v)
    for _ in range(5):
        problem = judge_gradients(gradients(q, k, v, dout, causal), q, k, v, dout, causal)
        assert problem is None, problem


@pytest.mark.parametrize("deterministic", [False, True])
def test_side_stream_behind_a_slow_kernel(deterministic: bool) -> None:
    """dout is written late on the stream of the call: every kernel of the backward must wait for it there."""
    problem = _problem(4, 2, 300, 300, 4, 2, 128)
    expected = gradients(*problem, True, deterministic=True)
    dout = torch.zeros_like(problem[3])
    leaves = [x.detach().requires_grad_() for x in problem[:3]]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out = flashhopper.flash_attn_func(*leaves, causal=True, deterministic=deterministic)
        torch.cuda._sleep(SLOW_CYCLES)
        dout.copy_(problem[3])
        found = torch.autograd.grad(out, leaves, dout)
        assert not stream.query(), "the call waited for the stream: a host synchronisation"
    stream.synchronize()
    if deterministic:
        _assert_same(found, expected)  # type: ignore[arg-type]
    rule = judge_gradients(found, *problem, True)
    assert rule is None, rule


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("deterministic", [False, True])
def test_no_host_synchronisation(deterministic: bool) -> None:
    backward = _graph_of(_problem(5, 2, 300, 300, 4, 2, 128), deterministic)
    backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("deterministic", [False, True])
def test_two_streams_at_once(deterministic: bool) -> None:
    """Calls that overlap on two streams share neither accumulators nor semaphores."""
    problems = [_problem(10 + i, 4, 700 + 100 * i, 700 + 100 * i, 8, 2, (64, 128)[i]) for i in range(2)]
    expected = [gradients(*p, True, deterministic=True) for p in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    results: list[list[Tensors]] = [[], []]
    calls = []
    for stream, problem in zip(streams, problems, strict=True):
        with torch.cuda.stream(stream):
            calls.append(_graph_of(problem, deterministic))
    for _ in range(RUNS):
        for stream, call, result in zip(streams, calls, results, strict=True):
            with torch.cuda.stream(stream):
                result.append(call())
    torch.cuda.synchronize()
    for problem, result, right in zip(problems, results, expected, strict=True):
        if deterministic:
            for found in result:
                _assert_same(found, right)
        else:
            for found in (result[0], result[-1]):
                rule = judge_gradients(found, *problem, True)
                assert rule is None, rule


def test_threads_at_once() -> None:
    problem = _problem(20, 2, 1000, 1000, 8, 2, 128)
    expected = gradients(*problem, True, deterministic=True)
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            call = _graph_of(problem)
            for _ in range(10):
                if not all(torch.equal(a, b) for a, b in zip(call(), expected, strict=True)):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@MASKS
@pytest.mark.parametrize("deterministic", [False, True])
def test_cuda_graph_of_forward_and_backward(deterministic: bool, causal: bool) -> None:
    """Captured together, replayed on new inputs, with eager calls in between."""
    shape = (2, 700, 700, 8, 2, 128)
    q, k, v, dout = static = _problem(30, *shape)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> tuple[torch.Tensor, ...]:
        out = flashhopper.flash_attn_func(*leaves, causal=causal, deterministic=deterministic)
        return torch.autograd.grad(out, leaves, dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        results = step()
    for seed in (31, 32, 33):
        fresh = _problem(seed, *shape)
        with torch.no_grad():
            for target, source in zip(static, fresh, strict=True):
                target.copy_(source)
            for result in results:
                result.fill_(float("nan"))
        graph.replay()
        eager = gradients(*fresh, causal, deterministic=True)
        if deterministic:
            _assert_same(results, eager)  # type: ignore[arg-type]
        rule = judge_gradients(results, *fresh, causal)
        assert rule is None, rule


def test_two_graphs_at_once() -> None:
    """Two graphs replayed on two streams share no workspace."""
    problems = [_problem(40 + i, 2, 900, 900, 8, 2, 128) for i in range(2)]
    expected = [gradients(*p, True, deterministic=True) for p in problems]
    torch.cuda.synchronize()
    graphs, outputs, streams = [], [], [torch.cuda.Stream() for _ in problems]
    for stream, problem in zip(streams, problems, strict=True):
        with torch.cuda.stream(stream):
            call = _graph_of(problem)
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs.append(call())
        graphs.append(graph)
    for _ in range(RUNS):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for found, right in zip(outputs, expected, strict=True):
        _assert_same(found, right)


@pytest.mark.parametrize("deterministic", [False, True])
def test_allocation_pressure(deterministic: bool) -> None:
    """A workspace that is freed while its kernel still runs is taken and filled by others at once."""
    problem = _problem(50, 4, 1000, 1000, 8, 2, 128)
    expected = gradients(*problem, True, deterministic=True)
    for round_ in range(30):
        copies = [x.clone() for x in problem]
        leaves = [x.requires_grad_() for x in copies[:3]]
        out = flashhopper.flash_attn_func(*leaves, causal=True, deterministic=deterministic)
        found = torch.autograd.grad(out, leaves, copies[3])
        del copies, leaves, out
        junk = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 24, 1 << 22, 1 << 20, 1 << 16)]
        poison_free_memory()
        if round_ % 10 == 9:
            torch.cuda.empty_cache()
        if deterministic:
            _assert_same(found, expected)  # type: ignore[arg-type]
        elif round_ % 10 == 0:
            rule = judge_gradients(found, *problem, True)
            assert rule is None, rule
        del junk


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_memory_is_linear(head_dim: int, deterministic: bool) -> None:
    """No score matrix: a backward takes dq, dk, dv, one fp32 accumulator for dq, two fp32 numbers a row, and little
    else; twice the tokens take twice the memory."""
    extra = []
    batch, heads = 1, 8
    for seqlen in (8192, 16384):
        problem = _problem(60, batch, seqlen, seqlen, heads, heads, head_dim)
        backward = _graph_of(problem, deterministic)
        backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = backward()
        torch.cuda.synchronize()
        extra.append(torch.cuda.max_memory_allocated() - before)
        elements = batch * heads * seqlen * head_dim
        kept = sum(x.numel() * x.element_size() for x in results)
        bound = kept + 4 * elements + 8 * batch * heads * seqlen + (4 << 20)
        assert extra[-1] <= bound, f"{seqlen} tokens: {extra[-1]:,} bytes, {bound:,} allowed"
        del problem, backward, results
    assert extra[1] <= 2.05 * extra[0] + (1 << 20)


def test_memory_of_grouped_queries() -> None:
    """dk and dv are summed over a group without a copy for each query head (an fp32 sum for each kv head is fine)."""
    q, k, v, dout = _problem(61, 1, 16384, 16384, 32, 2, 128)
    backward = _graph_of((q, k, v, dout), False)
    backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    backward()
    torch.cuda.synchronize()
    bound = (2 + 4) * q.numel() + (2 + 4) * (k.numel() + v.numel()) + 8 * q.numel() // 128 + (4 << 20)
    assert torch.cuda.max_memory_allocated() - before <= bound
