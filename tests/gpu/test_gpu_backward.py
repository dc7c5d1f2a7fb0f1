"""dq, dk and dv of the kernels against float64 autograd over dtypes, head dimensions, masks, ragged lengths and group
sizes (16-bit rule), and gradients through lse.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from gpu_support import (
    DTYPES,
    assert_gradients,
    draw,
    draw_dlse,
    draw_dout,
    gradients,
    is_on_kernels,
    judge_gradients,
)

import flashhopper

pytestmark = pytest.mark.usefixtures("hopper_gradients")

NATIVE = [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)]
PADDED = [
    *[(d, d) for d in (8, 24, 40, 56, 72, 80, 104, 112, 120, 136, 160, 176, 200, 224, 248)],
    *[(128, 64), (96, 40), (40, 64), (136, 128), (160, 96), (192, 64), (256, 64), (200, 256)],
]
LENGTHS = (1, 17, 63, 64, 65, 127, 128, 129, 257, 500, 1000)
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])


def _dims_id(dims: tuple[int, int]) -> str:
    return f"d{dims[0]}" if dims[0] == dims[1] else f"d{dims[0]}v{dims[1]}"


@MASKS
@pytest.mark.parametrize("dims", NATIVE + PADDED, ids=_dims_id)
def test_explain_says_that_the_kernels_serve_it(dims: tuple[int, int], causal: bool) -> None:
    """The other tests prove that the tiled engine does not; explain() must not say otherwise."""
    for dtype in DTYPES:
        assert is_on_kernels(*draw(0, 1, 64, 64, 2, 1, *dims, dtype=dtype), causal)


@MASKS
@DTYPE
@pytest.mark.parametrize("dims", NATIVE + PADDED, ids=_dims_id)
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype, causal: bool) -> None:
    q, k, v = draw(sum(dims), 2, 333, 401, 4, 2, *dims, dtype=dtype)
    assert_gradients(q, k, v, draw_dout(1, q, v), causal)


@MASKS
@pytest.mark.parametrize("dims", NATIVE, ids=_dims_id)
def test_ragged_lengths(dims: tuple[int, int], causal: bool) -> None:
    """Pairs of lengths around tile and warp edges, both ways round: every other pair of each mask, all over two head
    dimensions."""
    problems = []
    for index, (seqlen_q, seqlen_k) in enumerate(itertools.product(LENGTHS, LENGTHS)):
        if (index + NATIVE.index(dims)) % 2:
            continue
        # The rule compares two maxima: over a handful of numbers either may be small by luck.
        batch = max(2, -(-2048 // (2 * min(seqlen_q, seqlen_k) * min(dims))))
        dtype = DTYPES[(index // 2) % 2]
        q, k, v = draw(index, batch, seqlen_q, seqlen_k, 4, 2, *dims, dtype=dtype)
        dout = draw_dout(index, q, v)
        deterministic = index % 3 == 0
        found = gradients(q, k, v, dout, causal, deterministic=deterministic)
        problem = judge_gradients(found, q, k, v, dout, causal)
        if problem:
            problems.append(f"Sq {seqlen_q} Sk {seqlen_k} {dtype} deterministic={deterministic}: {problem}")
    assert not problems, "\n".join(problems)


@MASKS
@pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "deterministic"])
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (2, 1), (3, 3), (8, 1), (8, 4), (16, 2), (24, 3), (71, 1), (64, 8)]
)
def test_groups(heads: int, kv_heads: int, deterministic: bool, causal: bool) -> None:
    """dk and dv are sums over the query heads of a group."""
    for dims in ((64, 64), (128, 128), (192, 128)) if heads < 24 else ((64, 64), (128, 128)):
        q, k, v = draw(heads, 2, 260, 300, heads, kv_heads, *dims)
        assert_gradients(q, k, v, draw_dout(heads, q, v), causal, deterministic=deterministic)


@MASKS
@pytest.mark.parametrize("dims", [(96, 96), (192, 192), (256, 256)], ids=_dims_id)
def test_groups_of_other_head_dims(dims: tuple[int, int], causal: bool) -> None:
    for heads, kv_heads in ((8, 1), (8, 4)):
        q, k, v = draw(heads, 2, 200, 330, heads, kv_heads, *dims)
        assert_gradients(q, k, v, draw_dout(heads, q, v), causal)


@MASKS
@pytest.mark.parametrize("scale", [1e-4, 0.03, 1.0, 3.0])
def test_softmax_scale(scale: float, causal: bool) -> None:
    for head_dim in (64, 128, 256):
        q, k, v = draw(5, 2, 260, 300, 4, 2, head_dim)
        assert_gradients(q, k, v, draw_dout(5, q, v), causal, scale)


@MASKS
@pytest.mark.parametrize("dims", NATIVE, ids=_dims_id)
def test_many_tiles(dims: tuple[int, int], causal: bool) -> None:
    """Several tiles a multiprocessor: persistent loops, scheduler, ring phases across tiles."""
    q, k, v = draw(11, 2, 1500, 1500, 16, 4, *dims)
    dout = draw_dout(11, q, v)
    for deterministic in (False, True):
        assert_gradients(q, k, v, dout, causal, deterministic=deterministic)


@MASKS
@pytest.mark.xdist_group("large")
@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_sequences(head_dim: int, causal: bool) -> None:
    """Many additions into dq, long loops for dk and dv."""
    q, k, v = draw(12, 1, 8192, 8192, 2, 1, head_dim)
    assert_gradients(q, k, v, draw_dout(12, q, v), causal)


@MASKS
@pytest.mark.parametrize(
    "shape", [(64, 1, 1, 1, 1), (16, 1, 3000, 1, 1), (16, 3000, 1, 1, 1), (129, 5, 7, 3, 1), (700, 1, 33, 4, 4)]
)
def test_degenerate_shapes(shape: tuple[int, int, int, int, int], causal: bool) -> None:
    for head_dim in (64, 128, 256):
        q, k, v = draw(13, *shape, head_dim)
        assert_gradients(q, k, v, draw_dout(13, q, v), causal)


@pytest.mark.parametrize("dims", NATIVE, ids=_dims_id)
def test_causal_rows_that_see_nothing(dims: tuple[int, int]) -> None:
    """seqlen_q > seqlen_k: the leading queries have no key at all, and give and get nothing."""
    for seqlen_q, seqlen_k in ((300, 77), (513, 1), (1000, 200), (129, 128), (65, 64)):
        q, k, v = draw(14, 4, seqlen_q, seqlen_k, 4, 2, *dims)
        dout = draw_dout(14, q, v)
        found = gradients(q, k, v, dout, True)
        dead = seqlen_q - seqlen_k
        assert (found[0][:, :dead] == 0).all()
        problem = judge_gradients(found, q, k, v, dout, True)
        assert problem is None, f"Sq {seqlen_q} Sk {seqlen_k}: {problem}"
        # What their dout holds is no matter.
        dout = dout.clone()
        dout[:, :dead] = 3e4
        problem = judge_gradients(gradients(q, k, v, dout, True), q, k, v, dout, True)
        assert problem is None, f"Sq {seqlen_q} Sk {seqlen_k}, large dout of dead rows: {problem}"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_tiles_without_keys(head_dim: int) -> None:
    """Causal, seqlen_q far above seqlen_k: nearly all of dq is zero, and has to be written."""
    seqlen_q, seqlen_k = 4096, 64
    q, k, v = draw(17, 4, seqlen_q, seqlen_k, 16, 4, head_dim)
    dout = draw_dout(17, q, v)
    for deterministic in (False, True):
        dq, dk, dv = gradients(q, k, v, dout, True, deterministic=deterministic)
        dead = seqlen_q - seqlen_k
        assert (dq[:, :dead] == 0).all()
        problem = judge_gradients((dq[:, dead:], dk, dv), q[:, dead:], k, v, dout[:, dead:], True)
        assert problem is None, problem


def test_queries_without_a_gradient() -> None:
    """Causal: only queries from 150 on see the keys from 150 on. Where their dout is zero, so are those gradients."""
    q, k, v = draw(18, 2, 200, 200, 4, 2, 128)
    dout = draw_dout(18, q, v)
    dout[:, 150:] = 0
    _, dk, dv = gradients(q, k, v, dout, True)
    assert (dk[:, 150:] == 0).all()
    assert (dv[:, 150:] == 0).all()


@MASKS
@pytest.mark.parametrize("dims", NATIVE, ids=_dims_id)
@pytest.mark.parametrize("through", ["lse", "both"])
def test_gradient_through_lse(through: str, dims: tuple[int, int], causal: bool) -> None:
    """lse is differentiable, alone and together with out; rows that see nothing have none."""
    for index, (seqlen_q, seqlen_k, heads, kv_heads) in enumerate(
        ((260, 300, 4, 2), (300, 77, 4, 4), (65, 129, 8, 1), (128, 128, 2, 2))
    ):
        q, k, v = draw(20 + index, 3, seqlen_q, seqlen_k, heads, kv_heads, *dims, dtype=DTYPES[index % 2])
        dout = draw_dout(index, q, v) if through == "both" else None
        # An expanded gradient, as a mean's, or one of its own for each row.
        dlse = draw_dlse(index, q) if index % 2 else torch.full((), 0.7, device="cuda").expand(3, heads, seqlen_q)
        if through == "lse":
            dq, dk, dv = gradients(q, k, v, None, causal, dlse=dlse)
            assert not dv.any()
            problem = judge_gradients((dq, dk, dv), q, k, v, None, causal, dlse=dlse)
        else:
            found = gradients(q, k, v, dout, causal, dlse=dlse, deterministic=bool(index % 2))
            problem = judge_gradients(found, q, k, v, dout, causal, dlse=dlse)
        assert problem is None, f"Sq {seqlen_q} Sk {seqlen_k}: {problem}"


@MASKS
def test_no_keys(causal: bool) -> None:
    """out 0, lse -inf, gradient 0."""
    for deterministic in (False, True):
        q, k, v = draw(15, 2, 130, 0, 4, 2, 128)
        dq, dk, dv = gradients(q, k, v, draw_dout(15, q, v), causal, deterministic=deterministic)
        assert (dq == 0).all()
        assert dk.shape == k.shape
        assert dv.shape == v.shape
        dq, *_ = gradients(q, k, v, None, causal, dlse=draw_dlse(15, q))
        assert (dq == 0).all()


@MASKS
@pytest.mark.parametrize("shape", [(2, 0, 300, 4, 2), (0, 5, 5, 4, 2), (2, 0, 0, 4, 2)])
def test_no_queries(shape: tuple[int, int, int, int, int], causal: bool) -> None:
    """Nobody reads the keys: zero gradients, which have to be written."""
    for deterministic in (False, True):
        q, k, v = draw(16, *shape, 64)
        dq, dk, dv = gradients(q, k, v, draw_dout(16, q, v), causal, deterministic=deterministic)
        assert dq.shape == q.shape
        assert (dk == 0).all()
        assert (dv == 0).all()


@MASKS
def test_one_input_wants_a_gradient(causal: bool) -> None:
    """The others come out as None, and the one is right."""
    tensors = draw(19, 2, 200, 300, 4, 2, 128)
    dout = draw_dout(19, tensors[0], tensors[2])
    full = gradients(*tensors, dout, causal, deterministic=True)
    for index in range(3):
        inputs = [x.detach().requires_grad_(i == index) for i, x in enumerate(tensors)]
        out = flashhopper.flash_attn_func(*inputs, causal=causal, deterministic=True)
        out.backward(dout)
        assert [x.grad is None for x in inputs] == [i != index for i in range(3)]
        assert inputs[index].grad is not None
        assert torch.equal(inputs[index].grad, full[index])


@pytest.mark.parametrize("sm_margin", [1, 100, 131])
def test_fewer_multiprocessors(sm_margin: int) -> None:
    """sm_margin holds for the backward too, or is ignored there; the numbers are right either way."""
    q, k, v = draw(21, 2, 700, 700, 8, 2, 128)
    dout = draw_dout(21, q, v)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flashhopper.flash_attn_func(*leaves, causal=True, sm_margin=sm_margin, deterministic=True)
    found = torch.autograd.grad(out, leaves, dout)
    problem = judge_gradients(found, q, k, v, dout, True)
    assert problem is None, problem
