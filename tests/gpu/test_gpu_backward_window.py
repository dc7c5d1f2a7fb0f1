"""Gradients of sliding windows by the kernels: bounds around tile edges, lengths that differ, grouped heads, rows and
keys that see nothing, the deterministic order.
"""

from __future__ import annotations

import pytest
import torch
from gpu_support import DTYPES, assert_equal_bits, draw, draw_dlse, draw_dout
from gradient_support import Options, assert_right, gradients

import flashhopper

pytestmark = pytest.mark.usefixtures("hopper_gradients")
NATIVE = [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)]
SIZES = (0, 1, 63, 64, 127, 128, 1000)
LENGTHS = ((300, 413), (513, 200))  # the second: rows that see nothing


@pytest.mark.parametrize("kind", ["left", "right", "both"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_windows_of_grouped_heads(head_dim: int, kind: str) -> None:
    """FA 1366: (w, 0), (0, w), (w, w), eight query heads on one KV head, Sq and Sk differ."""
    for index, size in enumerate(SIZES):
        window = {"left": (size, 0), "right": (0, size), "both": (size, size)}[kind]
        seqlen_q, seqlen_k = LENGTHS[index % 2]
        q, k, v = draw(index, 1, seqlen_q, seqlen_k, 8, 1, head_dim, dtype=DTYPES[index % 2])
        assert_right(q, k, v, draw_dout(index, q, v), Options(window, deterministic=index % 3 == 0))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", NATIVE, ids=str)
def test_head_dims(dims: tuple[int, int], deterministic: bool) -> None:
    for index, window in enumerate(((70, 0), (33, 100), (-1, 40), (150, -1))):
        seqlen_q, seqlen_k = LENGTHS[index % 2]
        q, k, v = draw(index, 2, seqlen_q, seqlen_k, 4, 2, *dims, dtype=DTYPES[index % 2])
        dlse = draw_dlse(index, q) if index > 1 else None
        assert_right(q, k, v, draw_dout(index, q, v), Options(window, deterministic=deterministic), dlse)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_window_as_long_as_the_keys_is_causal(head_dim: int) -> None:
    """(S, 0) and causal give the same bits, and so does the longest window that is one."""
    q, k, v = draw(1, 2, 300, 300, 4, 2, head_dim)
    dout = draw_dout(1, q, v)
    expected = gradients(q, k, v, dout, Options((-1, 0), deterministic=True))
    for left in (299, 300, 1 << 20):
        for mine, right in zip(gradients(q, k, v, dout, Options((left, 0), deterministic=True)), expected, strict=True):
            assert_equal_bits(mine, right)
    # One key less is another mask, in one element.
    found = gradients(q, k, v, dout, Options((298, 0), deterministic=True))
    assert not torch.equal(found[0][:, -1], expected[0][:, -1])
    assert_equal_bits(found[0][:, :-1], expected[0][:, :-1])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_queries_and_keys_that_see_nothing_get_zero(head_dim: int) -> None:
    """Queries before the first key, and keys that all queries have left behind, whole blocks of them."""
    q, k, v = draw(2, 2, 700, 200, 4, 2, head_dim)
    found = assert_right(q, k, v, draw_dout(2, q, v), Options((50, 10)))
    assert not found[0][:, : 700 - 200 - 10].any()
    q, k, v = draw(3, 2, 100, 900, 4, 2, head_dim)
    found = assert_right(q, k, v, draw_dout(3, q, v), Options((50, 0)))
    for gradient in found[1:]:
        assert not gradient[:, : 900 - 100 - 50].any()
        assert gradient[:, 900 - 100 - 50 :].any()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_tiles(head_dim: int) -> None:
    """Short tiles, many a multiprocessor: those without a query between others."""
    q, k, v = draw(4, 2, 2500, 3000, 16, 4, head_dim)
    for deterministic in (False, True):
        assert_right(q, k, v, draw_dout(4, q, v), Options((200, 0), deterministic=deterministic))


@pytest.mark.parametrize("dims", NATIVE, ids=str)
def test_deterministic_gradients_have_the_same_bits_every_time(dims: tuple[int, int]) -> None:
    q, k, v = draw(5, 2, 1000, 1100, 8, 2, *dims)
    dout, dlse = draw_dout(5, q, v), draw_dlse(5, q)
    for window in ((200, 0), (130, 64), (0, 300)):
        options = Options(window, deterministic=True)
        expected = gradients(q, k, v, dout, options, dlse)
        for _ in range(20):
            for mine, right in zip(gradients(q, k, v, dout, options, dlse), expected, strict=True):
                assert_equal_bits(mine, right)


def test_explain_says_that_the_kernels_serve_it() -> None:
    flashhopper.set_backend("auto")
    q, k, v = draw(6, 1, 200, 200, 4, 2, 64)
    assert flashhopper.explain(q, k, v, window_size=(64, 0)).gradients.startswith("hopper")
