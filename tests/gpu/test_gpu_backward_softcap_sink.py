"""Gradients through a softcap, of a sink, of both with windows, by the kernels."""

from __future__ import annotations

import pytest
import torch
from gpu_support import DTYPES, assert_equal_bits, draw, draw_dlse, draw_dout
from gradient_support import Options, assert_right, draw_sink, gradients

import flashhopper

pytestmark = pytest.mark.usefixtures("hopper_gradients")
NATIVE = [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)]
WINDOWS = ((-1, -1), (-1, 0), (90, 20))


@pytest.mark.parametrize("dims", NATIVE, ids=str)
def test_softcap(dims: tuple[int, int]) -> None:
    """From hardly a cap to one that all scores run into."""
    for index, softcap in enumerate((1.0, 5.0, 30.0, 50.0)):
        q, k, v = draw(index, 2, 300, 413, 4, 2, *dims, dtype=DTYPES[index % 2])
        options = Options(WINDOWS[index % 3], softcap, deterministic=index % 2 == 1)
        assert_right(3 * q, k, v, draw_dout(index, q, v), options, draw_dlse(index, q) if index > 1 else None)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_softcap_that_caps_nothing(head_dim: int) -> None:
    """At 1000, the largest that the kernels take, it is the identity to five digits."""
    q, k, v = draw(10, 2, 200, 300, 4, 2, head_dim)
    dout = draw_dout(10, q, v)
    assert_right(q, k, v, dout, Options((-1, 0), 1e3))
    plain = gradients(q, k, v, dout, Options((-1, 0), deterministic=True))
    for mine, right in zip(gradients(q, k, v, dout, Options((-1, 0), 1e3, deterministic=True)), plain, strict=True):
        # Rounding to 16 bits may fall to the other side here and there.
        assert (mine.float() - right.float()).abs().max() <= 2**-7 * right.float().abs().max()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_softcap_of_huge_scores(head_dim: int) -> None:
    """Scores up to 1e4: tanh is 1 and its derivative 0 nearly everywhere; weights that underflow give no NaN."""
    q, k, v = (x.half() for x in draw(11, 2, 300, 300, 4, 2, head_dim))
    found = gradients(64 * q, 16 * k, v, draw_dout(11, q, v), Options((-1, 0), 30.0))
    assert all(x.isfinite().all() for x in found)
    # A cap of 300 spreads lse and scores over more than the exponents of a float.
    found = gradients(8 * q, 8 * k, v, draw_dout(11, q, v), Options((-1, 0), 300.0))
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("dims", NATIVE, ids=str)
def test_sink(dims: tuple[int, int]) -> None:
    """FA 1797, with a gradient through lse and without."""
    for index, window in enumerate(WINDOWS):
        q, k, v = draw(20 + index, 2, 300, 413, 4, 2, *dims, dtype=DTYPES[index % 2])
        options = Options(window, sink=draw_sink(index, 4), deterministic=index % 2 == 1)
        assert_right(q, k, v, draw_dout(index, q, v), options, draw_dlse(index, q) if index else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_of_the_sink(dtype: torch.dtype) -> None:
    """Any floating-point dtype; its gradient is of the same."""
    q, k, v = draw(30, 2, 128, 200, 16, 4, 64)
    assert_right(q, k, v, draw_dout(30, q, v), Options(sink=draw_sink(30, 16, dtype)))


def test_rows_that_see_the_sink_alone() -> None:
    """Their lse is the sink, whose weight is 1: the gradient of lse goes to it, and to nothing else."""
    for index, head_dim in enumerate((64, 128, 256)):
        q, k, v = draw(40, 2, 300, 77, 4, 2, head_dim)
        dout, dlse = draw_dout(40, q, v), draw_dlse(40, q)
        sink = draw_sink(40, 4)
        found = assert_right(q, k, v, dout, Options((-1, 0), sink=sink, deterministic=bool(index % 2)), dlse)
        assert not found[0][:, : 300 - 77].any()
        # Only dead rows have a gradient: dsink is their sum.
        alone = dlse.clone()
        alone[:, :, 300 - 77 :] = 0
        *rest, dsink = gradients(q, k, v, torch.zeros_like(dout), Options((-1, 0), sink=sink), alone)
        assert torch.allclose(dsink, alone.sum((0, 2)), rtol=1e-5, atol=1e-4)
        assert not any(x.any() for x in rest)


def test_no_keys_but_a_sink() -> None:
    q, k, v = draw(41, 2, 130, 0, 4, 2, 128)
    dlse = draw_dlse(41, q)
    dq, dk, dv, dsink = gradients(q, k, v, draw_dout(41, q, v), Options(sink=draw_sink(41, 4)), dlse)
    assert not dq.any()
    assert (dk.shape, dv.shape) == (k.shape, v.shape)
    assert torch.allclose(dsink, dlse.sum((0, 2)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_everything_at_once_has_the_same_bits_every_time(head_dim: int) -> None:
    q, k, v = draw(42, 2, 1000, 1100, 8, 2, head_dim)
    dout, dlse = draw_dout(42, q, v), draw_dlse(42, q)
    options = Options((300, 50), 20.0, draw_sink(42, 8), deterministic=True)
    expected = assert_right(q, k, v, dout, options, dlse)
    for _ in range(20):
        for mine, right in zip(gradients(q, k, v, dout, options, dlse), expected, strict=True):
            assert_equal_bits(mine, right)


def test_sums_of_the_sink_are_in_one_order_without_asking() -> None:
    q, k, v = draw(43, 4, 1000, 1000, 16, 4, 64)
    dout, options = draw_dout(43, q, v), Options((-1, 0), sink=draw_sink(43, 16))
    expected = gradients(q, k, v, dout, options)[3]
    for _ in range(5):
        assert_equal_bits(gradients(q, k, v, dout, options)[3], expected)


def test_explain_says_that_the_kernels_serve_it() -> None:
    flashhopper.set_backend("auto")
    q, k, v = draw(44, 1, 200, 200, 4, 2, 64)
    assert flashhopper.explain(q, k, v, softcap=30.0, sink=draw_sink(44, 4)).gradients.startswith("hopper")
