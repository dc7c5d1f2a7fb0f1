"""The 8-bit attention kernel against the emulation of its arithmetic and against float64 (fp8_support.py says how
close): every head dimension, recipe, mask, length, group, and what may not happen to finite inputs.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from fp8_support import OUT_LIMIT, RECIPES, Case, attend, check_case, draw8, judge8, quantized
from gpu_support import DTYPES, materialised

import flashhopper
from flashhopper.fp8 import emulate
from flashhopper.fp8 import quantize as torch_quantizer

MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (72, 72), (40, 40), (128, 40), (104, 200))
ROWS = ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256))  # of the table of kernels
CHUNKS, PER_CHUNK = 16, 12
EDGES = (1, 2, 7, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 383, 384, 385, 511, 512, 513)


@MASKS
@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_head_dim_and_recipe(dims: tuple[int, int], recipe: str, causal: bool) -> None:
    for dtype, quantizer in zip(DTYPES, ("kernel", "torch"), strict=True):
        check_case(Case(recipe=recipe, causal=causal, dtype=dtype, quantizer=quantizer).with_dims(dims))


@MASKS
@pytest.mark.parametrize("dims", ROWS, ids=str)
def test_lengths(dims: tuple[int, int], causal: bool) -> None:
    """Around the tiles of 64, 128 and 192, on both sides, and more queries than keys."""
    pairs = (
        (1, 1),
        (1, 129),
        (1, 1000),
        (63, 64),
        (65, 63),
        (127, 128),
        (129, 127),
        (192, 384),
        (193, 385),
        (500, 100),
    )
    for recipe in ("accurate", "e4m3"):
        for seed, (seqlen_q, seqlen_k) in enumerate(pairs):
            check_case(Case(2, seqlen_q, seqlen_k, recipe=recipe, causal=causal).with_dims(dims), seed)


@MASKS
@pytest.mark.parametrize("dims", ROWS, ids=str)
@pytest.mark.parametrize("recipe", ["accurate", "paper", "whole heads"])
def test_no_keys_and_no_queries(recipe: str, dims: tuple[int, int], causal: bool) -> None:
    case = Case(recipe=recipe, causal=causal).with_dims(dims)
    for change in ({"seqlen_k": 0}, {"seqlen_k": 0, "seqlen_q": 1}, {"seqlen_q": 0}, {"batch": 0}):
        empty = replace(case, **change)  # type: ignore[arg-type]
        qkv = quantized(empty, *draw8(empty))
        out, lse = attend(qkv, causal)
        assert (out.shape, lse.shape) == ((empty.batch, empty.seqlen_q, 4, dims[1]), (empty.batch, 4, empty.seqlen_q))
        assert not out.any()
        assert (lse == -math.inf).all()


@pytest.mark.parametrize("dims", ROWS, ids=str)
def test_rows_without_keys_get_no_mean(dims: tuple[int, int]) -> None:
    """Centred values far from 0: their mean joins the rows that see a key, and only those."""
    case = Case(2, 700, 150, causal=True, dtype=torch.float16).with_dims(dims)
    qkv = quantized(case, *draw8(case, mean=8.0))
    assert qkv.v_mean is not None
    out, lse = attend(qkv, True)
    assert not out[:, :550].any()
    assert (lse[:, :, :550] == -math.inf).all()
    assert lse[:, :, 550:].isfinite().all()
    assert judge8(qkv, out, lse, True) is None
    # The first row that sees a key sees one: v itself, of which e4m3 has 3 bits beside the mean.
    mean = qkv.v_mean[..., : dims[1]].repeat_interleave(2, dim=1)
    first = quantized(case, *draw8(case, mean=8.0)).to_reference()[2][:, 0].repeat_interleave(2, dim=1)
    assert (out[:, 550].double() - first).abs().max() <= 2**-9 * (first.abs().max() + mean.abs().max())


@MASKS
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (6, 3), (1, 1), (9, 3)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_grouped_queries(head_dim: int, heads: tuple[int, int], causal: bool) -> None:
    case = Case(3, 200, 300, *heads, head_dim, head_dim, recipe="e4m3" if causal else "accurate", causal=causal)
    check_case(case)


@MASKS
@pytest.mark.parametrize("dims", ROWS, ids=str)
def test_many_tiles_a_cta(dims: tuple[int, int], causal: bool) -> None:
    """Some 400 tiles, on 132 multiprocessors and on a few: CTAs go from tile to tile, also past ones without keys."""
    for seqlen_q, seqlen_k in ((1000, 1100), (1000, 300)):
        case = Case(4, seqlen_q, seqlen_k, 12, 3, recipe="paper" if causal else "accurate", causal=causal)
        case = case.with_dims(dims)
        qkv = quantized(case, *draw8(case))
        out, lse = attend(qkv, causal)
        problem = judge8(qkv, out, lse, causal)
        assert problem is None, f"{case}: {problem}"
        for sm_margin in (100, 131):
            again, lse_again = attend(qkv, causal, sm_margin=sm_margin)
            assert torch.equal(again, out)
            assert torch.equal(lse_again, lse)


@pytest.mark.parametrize("window", [(0, 0), (63, 0), (64, 128), (127, -1), (-1, 5), (300, 300)], ids=str)
@pytest.mark.parametrize("dims", ROWS, ids=str)
def test_windows(dims: tuple[int, int], window: tuple[int, int]) -> None:
    for recipe in ("accurate", "e4m3"):
        for seqlen_q, seqlen_k in ((333, 333), (500, 200), (100, 777)):
            case = Case(1, seqlen_q, seqlen_k, recipe=recipe).with_dims(dims)
            qkv = quantized(case, *draw8(case))
            problem = judge8(qkv, *attend(qkv, False, window=window), False, with_exact=False, window=window)
            assert problem is None, f"{case} {window}: {problem}"


@MASKS
@pytest.mark.parametrize("recipe", ["accurate", "e4m3"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_lse_of_smoothed_keys(head_dim: int, recipe: str, causal: bool) -> None:
    """Against float64 of the 16-bit inputs, with a mean of the keys that moves lse by tens: what is left is the
    quantiser's error of a score, a few percent.
    """
    case = Case(recipe=recipe, causal=causal).with_dims((head_dim, head_dim))
    q, k, v = draw8(case, seed=3, mean=6.0)
    _, right = materialised(q, k, v, causal, torch.float64)
    _, unshifted = materialised(q, k - k.float().mean(1, keepdim=True).to(k.dtype), v, causal, torch.float64)
    assert (right - unshifted).abs().max() > 10
    _, lse = attend(quantized(case, q, k, v), causal)
    error = (lse.double() - right).abs()
    # One row of a short causal sequence sees few keys, and its own error of a score.
    assert error.max() <= 0.4
    assert error.square().mean().sqrt() <= 0.06


@MASKS
@pytest.mark.parametrize("scale", [1e-4, 0.02, 0.5])
@pytest.mark.parametrize("recipe", ["accurate", "e4m3"])
def test_softmax_scale(recipe: str, scale: float, causal: bool) -> None:
    """Large scores have more than one rounding of e4m3 products between them: there the rows' largest weight rules."""
    case = Case(recipe=recipe, causal=causal, scale=scale)
    qkv = quantized(case, *draw8(case))
    out, lse = attend(qkv, causal, scale)
    if scale < 0.1:
        problem = judge8(qkv, out, lse, causal, scale)
        assert problem is None, problem
        return
    exact_out, exact_lse = materialised(*qkv.to_reference(), causal, torch.float64, scale)
    assert out.isfinite().all()
    assert (out.double() - exact_out).norm() <= 0.1 * exact_out.norm()
    if qkv.lse_shift is None:
        assert (lse.double() - exact_lse).abs().max() <= 0.1


def test_block_scales_of_very_different_size() -> None:
    """A scale of the wrong block of keys or values would show at once."""
    for dims in ROWS:
        case = Case(1, 150, 640, recipe="query blocks", quantizer="torch", dtype=torch.float16).with_dims(dims)
        q, k, v = draw8(case)
        for block in range(5):
            v[:, 128 * block : 128 * block + 128] *= (0.03, 1.0, 0.3, 3.0, 0.1)[block]
            k[:, 128 * block : 128 * block + 128] *= (0.01, 1.0, 0.1, 0.5, 0.001)[block]
        qkv = quantized(case, q, k, v)
        assert qkv.v_scale.max() > 30 * qkv.v_scale.min()
        problem = judge8(qkv, *attend(qkv, False), False)
        assert problem is None, f"{dims}: {problem}"


@pytest.mark.parametrize("kind", ["zeros", "tiny", "constant", "outliers", "large values", "one key"])
@pytest.mark.parametrize("recipe", ["paper", "e4m3", "accurate", "whole heads"])
def test_finite_inputs_give_finite_outputs(recipe: str, kind: str) -> None:
    for dims in ((64, 64), (128, 128), (256, 256)):
        for dtype in DTYPES:
            case = Case(1, 300, 1 if kind == "one key" else 400, recipe=recipe, causal=True, dtype=dtype)
            q, k, v = draw8(case.with_dims(dims))
            if kind == "zeros":
                q, k, v = (torch.zeros_like(x) for x in (q, k, v))
            elif kind == "tiny":
                q, k, v = (x * 1e-6 for x in (q, k, v))
            elif kind == "constant":
                q, k, v = (torch.full_like(x, 3.0) for x in (q, k, v))
            elif kind == "outliers":  # scores of thousands
                for x in (q, k, v):
                    x[:, ::7, :, 5] = 300.0
            elif kind == "large values":
                v = v * (6e4 / v.abs().max())
            qkv = quantized(case.with_dims(dims), q, k, v)
            out, lse = attend(qkv, True)
            assert out.isfinite().all()
            assert (lse.isfinite() | (lse == -math.inf)).all()
            # Outputs are averages of values, up to their rounding to e4m3 and that of the weights.
            assert out.double().abs().max() <= 1.2 * v.double().abs().max() + 1e-6
            if kind == "constant":
                assert (out.double()[:, -1] - 3.0).abs().max() <= 0.03


def _problem(rng: random.Random) -> Case:
    def length() -> int:
        return rng.choice(EDGES) if rng.random() < 0.6 else rng.randint(1, 900)

    head_dim, head_dim_v = rng.choice(DIMS) if rng.random() < 0.6 else [8 * rng.randint(1, 32) for _ in range(2)]
    kv_heads = rng.choice([1, 1, 2, 3])
    seqlen_q, seqlen_k = length(), length()
    return Case(
        *(rng.choice([1, 1, 2, 3]), seqlen_q, seqlen_q if rng.random() < 0.3 else seqlen_k),
        *(kv_heads * rng.choice([1, 1, 2, 3, 4, 8]), kv_heads, head_dim, head_dim_v),
        *(rng.choice(list(RECIPES)), rng.random() < 0.5, rng.choice(DTYPES), rng.choice([None, None, 0.02])),
        rng.choice(["kernel", "torch"]),
    )


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_problems(chunk: int) -> None:
    rng = random.Random(40_000 + chunk)
    problems = []
    for index in range(PER_CHUNK):
        case = _problem(rng)
        qkv = quantized(case, *draw8(case, seed=rng.randrange(2**31)))
        problem = judge8(qkv, *attend(qkv, case.causal, case.scale), case.causal, case.scale)
        if problem:
            problems.append(f"{index}: {case}: {problem}")
    assert not problems, f"{len(problems)} of {PER_CHUNK} wrong\n" + "\n".join(problems)


@MASKS
def test_the_public_function_is_quantiser_and_kernel(causal: bool) -> None:
    for recipe in RECIPES:
        case = Case(recipe=recipe, causal=causal)
        q, k, v = draw8(case)
        out, lse = flashhopper.flash_attn_func(q, k, v, causal=causal, fp8=RECIPES[recipe], return_lse=True)
        expected, expected_lse = attend(quantized(case, q, k, v), causal)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
        exact_out, _ = materialised(q, k, v, causal, torch.float64)
        # Of the 16-bit inputs: what the recipe costs (docs/numerics.md) and, most of it, e4m3 probabilities.
        assert (out.double() - exact_out).norm() <= 6 * OUT_LIMIT["e4m3"] * exact_out.norm()


@pytest.mark.parametrize(("small", "size"), [(0.0, 1.0), (2.0**-20, 1.0), (0.0, 1e30)], ids=["zeros", "tiny", "huge"])
@pytest.mark.parametrize("recipe", ["accurate", "e4m3"])
@pytest.mark.parametrize("dims", ROWS, ids=str)
def test_blocks_of_small_values_keep_their_weight(
    dims: tuple[int, int], recipe: str, small: float, size: float
) -> None:
    """Keys whose values are (nearly) zero still share the softmax, and sums in the unit of their scale stay finite."""
    case = Case(1, 256, 640, recipe=recipe).with_dims(dims)
    q, k, v = draw8(case, seed=11, mean=1.0)
    v[:, 128:256] *= small
    v[:, 512:] *= small
    v *= size
    for center in (False, True):
        out, _ = flashhopper.flash_attn_func(q, k, v, fp8=replace(RECIPES[recipe], center_v=center), return_lse=True)
        expected, _ = materialised(q, k, v, False, torch.float64)
        error = (out.double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
        assert error < 0.1, f"relative rmse {error:.2e}, center_v={center}"


@pytest.mark.parametrize("qk_format", ["int8", "e4m3"])
@pytest.mark.parametrize("dims", ROWS, ids=str)
def test_many_small_weights_beside_a_large_one(dims: tuple[int, int], qk_format: str) -> None:
    """Each rounds to zero beside the largest, 20 bits above them; together they are a share of the row and all of its
    output. They are equal, so those that share a block with none larger round alike, by up to 6 %.
    """
    for large in (8191, 3000, 0):
        q = torch.zeros(1, 130, 1, dims[0], device="cuda", dtype=torch.bfloat16)
        k, v = (torch.zeros(1, 8192, 1, dim, device="cuda", dtype=torch.bfloat16) for dim in dims)
        q[..., 0], k[:, large, :, 0] = 16.0, 20 * math.log(2) / 2  # times the scale of 1 / 8
        v[:] = 1.0
        v[:, large // 128 * 128 :][:, :128] = 0.0
        v[:, :256] *= 2.0**-30  # sums change their unit as well as their reference
        recipe = flashhopper.Fp8Recipe(qk_format, rotate=False, smooth_k=False, center_v=False)
        qkv = torch_quantizer.quantize(q, k, v, recipe)
        out, lse = attend(qkv, False, 0.125)
        expected, expected_lse = materialised(*qkv.to_reference(), False, torch.float64, 0.125)
        assert (lse.double() - expected_lse).abs().max() <= 1e-3
        assert ((out.double() - expected).abs() <= 0.07 * expected.abs()).all()


@pytest.mark.parametrize("dims", ROWS, ids=str)
def test_lse_does_not_drift_over_a_thousand_blocks(dims: tuple[int, int]) -> None:
    """Sums are multiplied by a fresh exponential in every block, good to 2 units in the last place: 2e-4 after a
    thousand. Up to 8e-4 were seen; the rest is taken for what tensor cores cut off small weights beside large ones.
    """
    case = Case(1, 128, 131072, 1, 1).with_dims(dims)
    qkv = quantized(case, *draw8(case))
    _, lse = attend(qkv, False)
    _, expected = emulate.attention(qkv)
    assert (lse - expected).abs().max() <= 2e-3
