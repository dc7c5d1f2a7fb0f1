"""The kernel against float64 over dtypes, head dimensions, masks, ragged lengths and group sizes (16-bit rule)."""

from __future__ import annotations

import itertools

import pytest
import torch
from gpu_support import DTYPES, assert_attends, draw, judge, poisoned_forward

import flashhopper

HEAD_DIMS = [
    *[(d, d) for d in (8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128)],
    *[(d, d) for d in (136, 152, 160, 176, 192, 200, 224, 240, 248, 256)],
    *[(192, 128), (128, 64), (64, 128), (96, 40), (256, 64), (40, 256), (136, 128)],
]
NATIVE = [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)]
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 193, 257, 700)
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def _dims_id(dims: tuple[int, int]) -> str:
    return f"d{dims[0]}" if dims[0] == dims[1] else f"d{dims[0]}v{dims[1]}"


@MASKS
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=_dims_id)
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype, causal: bool) -> None:
    assert_attends(*draw(sum(dims), 2, 333, 401, 4, 2, *dims, dtype=dtype), causal)


@MASKS
@pytest.mark.parametrize("dims", NATIVE, ids=_dims_id)
def test_ragged_lengths(dims: tuple[int, int], causal: bool) -> None:
    """Every pair of lengths around tile and warp edges, both ways round, at once."""
    problems = []
    for index, (seqlen_q, seqlen_k) in enumerate(itertools.product(LENGTHS, LENGTHS)):
        dtype = DTYPES[index % 2]
        q, k, v = draw(index, 2, seqlen_q, seqlen_k, 4, 2, *dims, dtype=dtype)
        problem = judge(*poisoned_forward(q, k, v, causal), q, k, v, causal).problem()
        if problem:
            problems.append(f"Sq {seqlen_q} Sk {seqlen_k} {dtype}: {problem}")
    assert not problems, "\n".join(problems)


@MASKS
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (3, 1), (8, 1), (8, 2), (12, 4), (24, 8), (71, 1), (64, 8), (6, 6)]
)
def test_groups(heads: int, kv_heads: int, causal: bool) -> None:
    for head_dim in (64, 128):
        assert_attends(*draw(heads, 2, 260, 300, heads, kv_heads, head_dim), causal)


@MASKS
@pytest.mark.parametrize("scale", [1e-4, 0.03, 1.0, 3.0])
def test_softmax_scale(scale: float, causal: bool) -> None:
    assert_attends(*draw(5, 2, 260, 300, 4, 2, 128), causal, scale)


@MASKS
@pytest.mark.parametrize("dims", NATIVE, ids=_dims_id)
def test_many_tiles(dims: tuple[int, int], causal: bool) -> None:
    """Several tiles a multiprocessor: persistent loop, scheduler, ring phases across tiles."""
    assert_attends(*draw(11, 3, 1500, 1500, 24, 8, *dims), causal)


def test_many_heads_of_192_and_128() -> None:
    """Latent attention's prefill shape."""
    assert_attends(*draw(21, 1, 1024, 1024, 128, 128, 192, 128), True)


@MASKS
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_sequences(head_dim: int, causal: bool) -> None:
    q, k, v = draw(12, 1, 8192, 8192, 2, 1, head_dim)
    out, lse = poisoned_forward(q, k, v, causal)
    for rows in (slice(0, 256), slice(4000, 4256), slice(8192 - 256, 8192)):
        # The rows of a causal problem are a causal problem whose keys end where the last of them looks.
        stop = rows.stop if causal else 8192
        problem = judge(out[:, rows], lse[:, :, rows], q[:, rows], k[:, :stop], v[:, :stop], causal).problem()
        assert problem is None, f"rows {rows}: {problem}"
    assert not out.isnan().any()


@MASKS
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 1), (1, 1, 9000, 1, 1), (1, 9000, 1, 1, 1), (129, 5, 7, 3, 1), (700, 1, 33, 4, 4)]
)
def test_degenerate_shapes(shape: tuple[int, int, int, int, int], causal: bool) -> None:
    for head_dim in (64, 128, 256):
        assert_attends(*draw(13, *shape, head_dim), causal)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_causal_rows_that_see_nothing(head_dim: int) -> None:
    """seqlen_q > seqlen_k: the leading queries have no key at all."""
    for seqlen_q, seqlen_k in ((300, 77), (513, 1), (1000, 200), (129, 128), (65, 64)):
        q, k, v = draw(14, 2, seqlen_q, seqlen_k, 4, 2, head_dim)
        out, lse = poisoned_forward(q, k, v, True)
        dead = seqlen_q - seqlen_k
        assert (out[:, :dead] == 0).all()
        assert (lse[:, :, :dead] == -float("inf")).all()
        problem = judge(out, lse, q, k, v, True).problem()
        assert problem is None, f"Sq {seqlen_q} Sk {seqlen_k}: {problem}"


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_many_tiles_without_keys(head_dim: int) -> None:
    """Causal, seqlen_q far above seqlen_k: each CTA meets a row of empty tiles behind one with keys."""
    seqlen_q, seqlen_k = 4096, 64
    q, k, v = draw(17, 4, seqlen_q, seqlen_k, 16, 4, head_dim)
    out, lse = poisoned_forward(q, k, v, True)
    dead = seqlen_q - seqlen_k
    assert (out[:, :dead] == 0).all()
    assert (lse[:, :, :dead] == -float("inf")).all()
    tail = q[:, dead:].contiguous()
    problem = judge(out[:, dead:], lse[:, :, dead:], tail, k, v, True).problem()
    assert problem is None, problem


@MASKS
def test_no_keys(causal: bool) -> None:
    q, k, v = draw(15, 2, 130, 0, 4, 2, 128)
    out, lse = flashhopper.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert lse.shape == (2, 4, 130)
    assert (lse == -float("inf")).all()


@MASKS
@pytest.mark.parametrize("shape", [(2, 0, 5, 4, 2), (0, 5, 5, 4, 2), (2, 0, 0, 4, 2)])
def test_nothing_to_do(shape: tuple[int, int, int, int, int], causal: bool) -> None:
    q, k, v = draw(16, *shape, 64)
    out, lse = flashhopper.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (shape[0], shape[3], shape[1])


@MASKS
def test_public_function_is_the_kernel(causal: bool) -> None:
    q, k, v = draw(17, 2, 300, 300, 4, 2, 128)
    out, lse = flashhopper.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    raw_out, raw_lse = poisoned_forward(q, k, v, causal)
    assert torch.equal(out, raw_out)
    assert torch.equal(lse, raw_lse)


def test_window_of_the_whole_sequence_is_causal() -> None:
    q, k, v = draw(22, 2, 200, 300, 4, 2, 128)
    causal = flashhopper.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flashhopper.flash_attn_func(q, k, v, window_size=(300, 0)), causal)
    assert torch.equal(flashhopper.flash_attn_func(q, k, v, window_size=(-1, 0)), causal)


@pytest.mark.parametrize("sm_margin", [1, 100, 131])
def test_fewer_multiprocessors(sm_margin: int) -> None:
    """The grid shrinks, the numbers do not change."""
    q, k, v = draw(18, 2, 1000, 1000, 8, 2, 128)
    assert torch.equal(poisoned_forward(q, k, v, True, sm_margin=sm_margin)[0], poisoned_forward(q, k, v, True)[0])


@MASKS
def test_time_grows_with_work(causal: bool) -> None:
    """Twelve query heads on one key head: a schedule that leaves the GPU idle takes the same time at 128 and 4096."""
    times = []
    for seqlen in (2048, 16384):
        q, k, v = draw(19, 1, seqlen, seqlen, 12, 1, 128)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flashhopper.flash_attn_func(q, k, v, causal=causal)
        start.record()
        for _ in range(5):
            flashhopper.flash_attn_func(q, k, v, causal=causal)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    assert times[1] > 8 * times[0], f"64 times the work took {times[1] / times[0]:.1f} times as long"
