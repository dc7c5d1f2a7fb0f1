"""Windows, softcap and sinks on the forward kernel, dense: against float64, and against each other bit for bit."""

from __future__ import annotations

import pytest
import torch
from gpu_support import DTYPES, assert_equal_bits, draw, poison_free_memory
from options_support import CAUSAL, Options, Packed, attention, dense_problem, judge, packed_problem

import flashhopper

WIDTHS = (0, 1, 63, 64, 127, 128, 1000)
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
SHAPES = [(300, 300), (300, 77), (77, 300), (1, 500), (513, 1100)]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_windows(head_dim: int, width: int) -> None:
    """8 query heads on one; as many keys as queries, fewer, more."""
    problems = []
    for seqlen_q, seqlen_k in SHAPES:
        q, k, v = draw(width + seqlen_k, 2, seqlen_q, seqlen_k, 8, 1, head_dim)
        for left, right in ((width, 0), (0, width), (width, width), (width, -1), (-1, width)):
            problem = dense_problem((q, k, v), Options(left, right))
            if problem:
                problems.append(f"Sq {seqlen_q} Sk {seqlen_k} window ({left}, {right}): {problem}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_windows_of_every_kernel(dims: tuple[int, int], dtype: torch.dtype) -> None:
    for left, right in ((100, 0), (0, 0), (130, 70)):
        problem = dense_problem(draw(sum(dims), 2, 413, 500, 4, 2, *dims, dtype=dtype), Options(left, right))
        assert problem is None, f"window ({left}, {right}): {problem}"


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_right_bounds_of_many_tiles(dims: tuple[int, int]) -> None:
    """Beyond the diagonal, with and without a left bound, where neighbouring tiles end at different keys: as many keys
    as queries, fewer, more; one head a tile and two.
    """
    for i, (seqlen_q, seqlen_k) in enumerate(((2100, 2100), (2100, 700), (700, 2100))):
        tensors = draw(i, 1, seqlen_q, seqlen_k, 2, 1, *dims, dtype=DTYPES[i % 2])
        for left, right in ((-1, 1), (-1, 127), (-1, 600), (300, 200)):
            for pack_gqa in (False, True):
                problem = dense_problem(tensors, Options(left, right, pack_gqa=pack_gqa))
                assert problem is None, f"Sq {seqlen_q} Sk {seqlen_k} ({left}, {right}) {pack_gqa}: {problem}"


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_a_window_of_the_whole_sequence_is_causal(dims: tuple[int, int]) -> None:
    """Also where the module itself gets it, past the public function's own rule."""
    from options_support import launch

    for seqlen_q, seqlen_k in ((300, 300), (300, 500), (500, 300)):
        tensors = draw(9, 2, seqlen_q, seqlen_k, 4, 2, *dims)
        for left in (seqlen_k - 1, seqlen_k, 10 * seqlen_k):
            for mine, right in zip(launch(tensors, Options(left, 0)), launch(tensors, CAUSAL), strict=True):
                assert_equal_bits(mine, right)


def test_a_packed_window_of_the_longest_sequence_is_causal() -> None:
    q, k, v = (x[0] for x in draw(10, 1, 700, 700, 4, 2, 128))
    cu = torch.tensor([0, 300, 700]).int().cuda()
    causal = flashhopper.flash_attn_varlen_func(q, k, v, cu, cu, 400, 400, causal=True)
    assert_equal_bits(flashhopper.flash_attn_varlen_func(q, k, v, cu, cu, 400, 400, window_size=(400, 0)), causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("softcap", [0.5, 15.0, 50.0])
def test_softcap(softcap: float, dims: tuple[int, int], dtype: torch.dtype) -> None:
    q, k, v = draw(sum(dims), 2, 300, 345, 4, 2, *dims, dtype=dtype)
    for right in (-1, 0):
        problem = dense_problem((q, k, v), Options(right=right, softcap=softcap))
        assert problem is None, problem


def test_softcap_of_large_scores() -> None:
    """Scores up to thousands: the cap saturates, nothing overflows."""
    for scale, softcap in ((3.0, 30.0), (100.0, 1.0), (1.0, 1000.0), (1e-3, 1e-3)):
        q, k, v = draw(4, 2, 200, 200, 2, 2, 128, dtype=torch.float16)
        problem = dense_problem((3 * q, 3 * k, v), Options(softcap=softcap, scale=scale))
        assert problem is None, f"scale {scale}, softcap {softcap}: {problem}"


def test_a_wide_cap_changes_next_to_nothing() -> None:
    q, k, v = draw(5, 2, 200, 200, 2, 2, 64)
    _, plain = flashhopper.flash_attn_func(q, k, v, return_lse=True)
    _, capped = flashhopper.flash_attn_func(q, k, v, softcap=1000.0, return_lse=True)
    assert 0 < (plain - capped).abs().max().item() < 1e-3


SINKS = {"normal": None, "far above": 60.0, "far below": -60.0, "none": -torch.inf}


def sinks(kind: str, heads: int) -> torch.Tensor:
    value = SINKS[kind]
    return torch.randn(heads, device="cuda") if value is None else torch.full((heads,), value, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_sinks(dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Causal with more queries than keys: rows that see nothing give 0 and the sink's logit."""
    for kind in SINKS:
        for softcap in (0.0, 20.0):
            tensors = draw(sum(dims), 2, 300, 200, 16, 2, *dims, dtype=dtype)
            problem = dense_problem(tensors, Options(right=0, softcap=softcap, sink=sinks(kind, 16)))
            assert problem is None, f"{kind}, softcap {softcap}: {problem}"


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v = draw(6, 2, 300, 300, 4, 2, 128)
    expected = flashhopper.flash_attn_func(q, k, v, causal=True, return_lse=True)
    found = flashhopper.flash_attn_func(q, k, v, causal=True, sink=sinks("none", 4), return_lse=True)
    for mine, right in zip(found, expected, strict=True):
        assert_equal_bits(mine, right)


def test_sinks_of_16_bits_and_of_no_keys() -> None:
    q, k, v = draw(7, 2, 50, 0, 4, 2, 64)
    sink = torch.randn(4, device="cuda", dtype=torch.float16)
    poison_free_memory()
    out, lse = flashhopper.flash_attn_func(q, k, v, sink=sink, return_lse=True)
    assert not out.any()
    assert_equal_bits(lse, sink.float().view(1, 4, 1).expand_as(lse))


def test_rows_that_do_not_exist_have_no_sink() -> None:
    tensors = [x[0] for x in draw(8, 1, 300, 300, 4, 2, 64)]
    batch = Packed(*tensors, [200, 90, 5], [100, 190, 0], [100, 0, 5], [100, 7, 0])
    problem = packed_problem(batch, Options(right=0, softcap=10.0, sink=sinks("normal", 4)))
    assert problem is None, problem


def test_all_at_once_by_the_public_function() -> None:
    q, k, v = draw(9, 2, 413, 500, 8, 2, 128)
    options = Options(200, 3, 25.0, torch.randn(8, device="cuda"))
    poison_free_memory()
    found = flashhopper.flash_attn_func(q, k, v, return_lse=True, **options.public())
    exact = flashhopper.reference_attention(q, k, v, None, False, (200, 3), 25.0, sink=options.sink)
    problem = judge(found, exact, attention(q, k, v, options, q.dtype)[0])
    assert problem is None, problem


def test_gradients_with_options() -> None:
    """Whichever engine has them: those of the forward that ran."""
    flashhopper.set_backend("auto")
    q, k, v = draw(10, 2, 150, 130, 4, 2, 64)
    sink = torch.randn(4, device="cuda")
    leaves = [x.requires_grad_() for x in (q, k, v, sink)]
    out = flashhopper.flash_attn_func(q, k, v, window_size=(60, 0), softcap=20.0, sink=sink)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, dout)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    exact, _ = attention(*doubles[:3], Options(60, 0, 20.0, doubles[3]), torch.float64)
    for mine, right in zip(found, torch.autograd.grad(exact, doubles, dout.double()), strict=True):
        assert (mine.double() - right).abs().max().item() < 0.02 * right.abs().max().item() + 0.01


def test_explain() -> None:
    q, k, v = draw(11, 1, 200, 200, 4, 2, 64)
    plan = flashhopper.explain(q, k, v, window_size=(64, 0), softcap=30.0, sink=torch.zeros(4, device="cuda"))
    assert plan.backend == "hopper"
    assert plan.config.startswith("fwd_hd64")
