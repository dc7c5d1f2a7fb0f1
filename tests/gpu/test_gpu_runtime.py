"""Streams, CUDA graphs, reproducibility, torch.compile, gradients, errors and explain() on the GPU."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
import torch
from gpu_support import DTYPES, assert_equal_bits, draw, judge, materialised, poisoned_forward

import flashhopper
from flashhopper import Fp8Recipe

MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
SLOW_CYCLES = 50_000_000  # some 30 ms of a kernel that only spins


@MASKS
def test_side_stream_behind_a_slow_kernel(causal: bool) -> None:
    """q is written late on the stream of the call: the kernel must wait for it there."""
    source, k, v = draw(1, 2, 300, 300, 4, 2, 128)
    expected = flashhopper.flash_attn_func(source, k, v, causal=causal)
    q = torch.zeros_like(source)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW_CYCLES)
        q.copy_(source)
        out = flashhopper.flash_attn_func(q, k, v, causal=causal)
        assert not stream.query(), "the call waited for the stream: a host synchronisation"
    stream.synchronize()
    assert_equal_bits(out, expected)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_host_synchronisation() -> None:
    q, k, v = draw(2, 2, 300, 300, 4, 2, 128)
    flashhopper.flash_attn_func(q, k, v, causal=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        flashhopper.flash_attn_func(q, k, v, causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_streams_at_once() -> None:
    """Calls that overlap on several streams must not share scheduler state."""
    problems = [draw(10 + i, 4, 700 + 100 * i, 900, 8, (2, 8)[i % 2], *dims) for i, dims in enumerate(DIMS)]
    expected = [flashhopper.flash_attn_func(*p, causal=True) for p in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    results: list[list[torch.Tensor]] = [[] for _ in problems]
    for _ in range(10):
        for stream, problem, result in zip(streams, problems, results, strict=True):
            with torch.cuda.stream(stream):
                result.append(flashhopper.flash_attn_func(*problem, causal=True))
    torch.cuda.synchronize()
    for result, right in zip(results, expected, strict=True):
        for out in result:
            assert_equal_bits(out, right)


def test_threads_at_once() -> None:
    q, k, v = draw(3, 2, 1000, 1000, 8, 2, 128)
    expected = flashhopper.flash_attn_func(q, k, v, causal=True)
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                if not torch.equal(flashhopper.flash_attn_func(q, k, v, causal=True), expected):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@MASKS
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_same_bits_every_time(head_dim: int, causal: bool) -> None:
    q, k, v = draw(4, 2, 1024, 1024, 12, 4, head_dim)
    out, lse = poisoned_forward(q, k, v, causal)
    for _ in range(20):
        again, lse_again = poisoned_forward(q, k, v, causal)
        assert_equal_bits(again, out)
        assert_equal_bits(lse_again, lse)


@MASKS
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_batch_neighbours_do_not_matter(head_dim: int, causal: bool) -> None:
    """The same sequence alone and among 63 others."""
    q, k, v = draw(5, 64, 333, 400, 4, 2, head_dim)
    out, lse = flashhopper.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    for index in (0, 31, 63):
        one = slice(index, index + 1)
        alone, lse_alone = flashhopper.flash_attn_func(q[one], k[one], v[one], causal=causal, return_lse=True)
        assert_equal_bits(alone, out[one])
        assert_equal_bits(lse_alone, lse[one])


@MASKS
def test_head_neighbours_do_not_matter(causal: bool) -> None:
    q, k, v = draw(6, 2, 500, 500, 16, 4, 128)
    out = flashhopper.flash_attn_func(q, k, v, causal=causal)
    group = flashhopper.flash_attn_func(q[:, :, 8:12], k[:, :, 2:3], v[:, :, 2:3], causal=causal)
    assert_equal_bits(group, out[:, :, 8:12].contiguous())


@MASKS
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_cuda_graph(dims: tuple[int, int], causal: bool) -> None:
    """Capture after one warm-up call, replay on new inputs, with eager calls in between."""
    q, k, v = draw(7, 2, 700, 700, 8, 2, *dims)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        flashhopper.flash_attn_func(q, k, v, causal=causal)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flashhopper.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    for seed in (8, 9, 10):
        for target, source in zip((q, k, v), draw(seed, 2, 700, 700, 8, 2, *dims), strict=True):
            target.copy_(source)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        expected, expected_lse = flashhopper.flash_attn_func(q, k, v, causal=causal, return_lse=True)
        assert_equal_bits(out, expected)
        assert_equal_bits(lse, expected_lse)


def test_graphs_at_once() -> None:
    """Two graphs replayed on two streams, and eager calls on a third, share no scheduler state."""
    problems = [draw(30 + i, 4, 900, 900, 8, 2, head_dim) for i, head_dim in enumerate((128, 192, 256))]
    expected = [flashhopper.flash_attn_func(*p, causal=True) for p in problems]
    torch.cuda.synchronize()
    graphs, outputs = [], []
    for problem in problems[:2]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs.append(flashhopper.flash_attn_func(*problem, causal=True))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in problems]
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            eager = flashhopper.flash_attn_func(*problems[2], causal=True)
    torch.cuda.synchronize()
    for out, right in zip((*outputs, eager), expected, strict=True):
        assert_equal_bits(out, right)


@pytest.mark.parametrize("kind", ["dense", "packed", "e4m3", "accurate"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_calls_in_a_chain(head_dim: int, kind: str) -> None:
    """A kernel starts while the one before it ends: each of these calls takes the result of the one before, written at
    its very end, and the last copies run beside the next call.
    """
    source = draw(31, 1, 1100, 1100, 4, 4, head_dim)[0]
    offsets = torch.tensor([0, 300, 301, 1100], dtype=torch.int32, device="cuda")
    recipe = {"e4m3": Fp8Recipe.e4m3(), "accurate": Fp8Recipe.accurate()}.get(kind)

    def chain(pause: Callable[[], None]) -> list[torch.Tensor]:
        x, results = source, []
        for turn in range(24):
            if kind == "packed":
                row = flashhopper.flash_attn_varlen_func(x[0], x[0], x[0], offsets, offsets, 1100, 1100, causal=True)
                x = row[None]
            else:
                x = flashhopper.flash_attn_func(x, x, x, causal=turn % 2 == 0, fp8=recipe)
            pause()
            x = torch.nn.functional.layer_norm(x, (head_dim,))
            results.append(x.clone())
            pause()
        return results

    expected = chain(torch.cuda.synchronize)
    for found, right in zip(chain(lambda: None), expected, strict=True):
        assert_equal_bits(found, right)


def test_allocation_pressure() -> None:
    """Memory that a call used is freed and taken by others while the kernel may still run."""
    q, k, v = draw(33, 4, 1000, 1000, 8, 2, 128)
    expected = flashhopper.flash_attn_func(q, k, v, causal=True)
    for round_ in range(30):
        copies = [x.clone() for x in (q, k, v)]
        out = flashhopper.flash_attn_func(*copies, causal=True)
        del copies
        junk = [torch.full_like(x, float("nan")) for x in (q, k, v, q)]
        if round_ % 10 == 9:
            torch.cuda.empty_cache()
        assert_equal_bits(out, expected)
        del junk


def test_uninitialised_memory_is_overwritten() -> None:
    """torch fills every fresh allocation with NaN in this mode: the public path must write all of out and lse."""
    torch.use_deterministic_algorithms(True)
    try:
        for seqlen_q, seqlen_k, head_dim in ((1, 1, 64), (65, 129, 96), (300, 77, 128), (128, 0, 256)):
            q, k, v = draw(11, 2, seqlen_q, seqlen_k, 4, 2, head_dim)
            out, lse = flashhopper.flash_attn_func(q, k, v, causal=True, return_lse=True)
            assert not out.isnan().any()
            assert not lse.isnan().any()
    finally:
        torch.use_deterministic_algorithms(False)


@MASKS
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "shape", [(2, 300, 300, 4, 2, 128), (2, 200, 77, 4, 4, 64), (1, 77, 200, 8, 1, 96), (1, 130, 130, 2, 2, 256)]
)
def test_gradients(shape: tuple[int, int, int, int, int, int], dtype: torch.dtype, causal: bool) -> None:
    """dq, dk, dv by the 16-bit rule: at most twice the error of 16-bit PyTorch autograd."""
    tensors = draw(12, *shape, dtype=dtype)
    upstream = draw(13, shape[0], shape[1], shape[1], shape[3], shape[3], shape[5], dtype=dtype)[0]

    def gradients(attend: object, kind: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(kind).detach().requires_grad_() for x in tensors]
        out = attend(*leaves)  # type: ignore[operator]
        return list(torch.autograd.grad(out, leaves, upstream.to(kind)))

    ours = gradients(lambda q, k, v: flashhopper.flash_attn_func(q, k, v, causal=causal), dtype)
    exact = gradients(lambda q, k, v: materialised(q, k, v, causal, torch.float64)[0], torch.float64)
    plain = gradients(lambda q, k, v: materialised(q, k, v, causal, dtype)[0], dtype)
    for name, mine, right, yardstick in zip("qkv", ours, exact, plain, strict=True):
        error = (mine.double() - right).abs().max().item()
        allowed = 2 * (yardstick.double() - right).abs().max().item() + 1e-5
        assert error <= allowed, f"d{name}: max error {error:.3e}, allowed {allowed:.3e}"


def test_gradients_without_keys() -> None:
    q, k, v = (x.requires_grad_() for x in draw(14, 2, 130, 0, 4, 2, 128))
    flashhopper.flash_attn_func(q, k, v).sum().backward()
    assert q.grad is not None
    assert (q.grad == 0).all()
    assert k.grad is not None
    assert k.grad.shape == k.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_gradients_of_large_inputs_stay_finite(dtype: torch.dtype) -> None:
    leaves = [(3 * x).detach().requires_grad_() for x in draw(15, 1, 1024, 1024, 4, 4, 128, dtype=dtype)]
    flashhopper.flash_attn_func(*leaves, causal=True).float().square().mean().backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.xdist_group("compile")
def test_compile_fullgraph(backend: str) -> None:
    """GQA, a head dimension of v of its own, changing lengths: one graph, the same bits."""

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashhopper.flash_attn_func(q, k, v, causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for seqlen in (128, 200, 333):
        q, k, v = draw(16, 2, seqlen, seqlen, 8, 2, 192, 128)
        assert_equal_bits(compiled(q, k, v), model(q, k, v))


def test_autocast_takes_float32_inputs() -> None:
    q, k, v = draw(17, 2, 300, 300, 4, 2, 128)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = flashhopper.flash_attn_func(q.float(), k.float(), v.float(), causal=True)
    assert_equal_bits(out, flashhopper.flash_attn_func(q, k, v, causal=True))


def test_memory_is_linear() -> None:
    """No score matrix: a call takes the output, lse and a workspace, nothing else."""
    q, k, v = draw(18, 1, 16384, 16384, 8, 8, 128)
    flashhopper.flash_attn_func(q, k, v, causal=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        out, lse = flashhopper.flash_attn_func(q, k, v, causal=True, return_lse=True)
    kept = out.numel() * 2 + lse.numel() * 4
    assert torch.cuda.max_memory_allocated() - before <= kept + (1 << 20)


def test_float32_is_refused_by_the_kernel_and_says_so() -> None:
    q, k, v = (x.float() for x in draw(19, 1, 64, 64, 2, 2, 64))
    with pytest.raises(RuntimeError, match=r"(?i)float32|dtype"):
        flashhopper.flash_attn_func(q, k, v)
    flashhopper.set_backend("auto")
    assert judge(flashhopper.flash_attn_func(q, k, v), None, q, k, v, False).problem() is None


def test_bad_arguments_name_themselves() -> None:
    q, k, v = draw(20, 2, 64, 64, 8, 2, 64)
    with pytest.raises(ValueError, match="multiple"):
        flashhopper.flash_attn_func(q, k[:, :, :1].expand(-1, -1, 3, -1), v[:, :, :1].expand(-1, -1, 3, -1))
    with pytest.raises(ValueError, match="k"):
        flashhopper.flash_attn_func(q, k[..., :32], v)
    with pytest.raises(ValueError, match="v"):
        flashhopper.flash_attn_func(q, k, v[:, :32])
    with pytest.raises(ValueError, match="dtype"):
        flashhopper.flash_attn_func(q, k.half(), v)
    with pytest.raises(ValueError, match=r"device|cpu"):
        flashhopper.flash_attn_func(q, k.cpu(), v)
    # The device is as healthy as before.
    assert flashhopper.flash_attn_func(q, k, v).isfinite().all()


@pytest.mark.parametrize("extra", [{"softcap": 2000.0}, {"softmax_scale": 0.0}], ids=["softcap", "softmax_scale"])
def test_features_of_the_tiled_engine(extra: dict[str, object]) -> None:
    """Refused by name while the kernel is asked for, computed by the tiled engine otherwise; never ignored."""
    q, k, v = draw(21, 1, 200, 200, 4, 2, 64)
    name = next(iter(extra))
    with pytest.raises(RuntimeError, match=name):
        flashhopper.flash_attn_func(q, k, v, causal=True, **extra)
    flashhopper.set_backend("auto")
    out = flashhopper.flash_attn_func(q, k, v, causal=True, **extra)
    expected = flashhopper.reference_attention(q, k, v, causal=True, **extra)
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert (out.double() - expected).abs().max().item() < 2e-2
    plain = flashhopper.flash_attn_func(q, k, v, causal=True)
    assert not torch.equal(out, plain)


def test_explain_names_the_kernel() -> None:
    q, k, v = draw(22, 2, 1024, 1024, 16, 4, 128)
    plan = flashhopper.explain(q, k, v, causal=True)
    assert plan.backend == "hopper"
    assert plan.config.startswith("fwd_hd128")
    assert plan.config in str(plan)
    assert 0 < plan.grid <= plan.tiles
    assert 0 < plan.smem_bytes <= 227 * 1024
    assert plan.flops == 4 * 2 * 16 * (1024 * 1025 // 2) * 128
    assert not plan.copies


def test_lse_is_the_natural_logarithm() -> None:
    q, k, v = draw(23, 1, 64, 64, 1, 1, 64)
    _, lse = flashhopper.flash_attn_func(q, k, v, return_lse=True)
    scores = (q[0, :, 0].double() @ k[0, :, 0].double().T) / math.sqrt(64)
    assert lse.dtype == torch.float32
    assert (lse[0, 0].double() - scores.logsumexp(-1)).abs().max().item() < 1e-4
