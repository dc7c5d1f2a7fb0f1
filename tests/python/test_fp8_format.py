"""The 8-bit format: recipes, rotation, scales, layouts, rounding, quantise and dequantise."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashhopper as fh
from flashhopper.fp8 import formats, rotation
from flashhopper.fp8.quantize import spread

PROPERTY = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
NAMED = {"accurate": fh.Fp8Recipe.accurate(), "e4m3": fh.Fp8Recipe.e4m3(), "paper": fh.Fp8Recipe.paper()}


def inputs(
    seqlen_q: int = 150, seqlen_k: int = 300, heads: int = 4, kv_heads: int = 2, dim: int = 64, dim_v: int = 64
) -> list[torch.Tensor]:
    shapes = ((2, seqlen_q, heads, dim), (2, seqlen_k, kv_heads, dim), (2, seqlen_k, kv_heads, dim_v))
    return [torch.randn(shape).to(torch.bfloat16) for shape in shapes]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qk_format": "fp8"}, "qk_format is 'fp8': must be 'int8' or 'e4m3'"),
        ({"rotate": 1}, "rotate is 1: must be True or False; pass bool(rotate)"),
        ({"smooth_k": None}, "smooth_k is None: must be True or False"),
        ({"center_v": "yes"}, "center_v is 'yes': must be True or False"),
        ({"two_level": 0}, "two_level is 0: must be True or False"),
        ({"q_block": True}, "q_block is True: must be an int"),
        ({"q_block": -1}, "q_block is -1: must be 0 or more rows"),
        ({"k_block": 64}, "k_block is 64: must be 0, 1 or a multiple of 128 keys"),
        ({"k_block": -128}, "k_block is -128: must be 0, 1 or a multiple of 128 keys"),
        ({"v_block": 1}, "v_block is 1: must be 0 or a multiple of 128 keys"),
        ({"v_block": 128.0}, "v_block is 128.0: must be an int; pass int(v_block)"),
        ({"seed": -1}, "seed is -1: must be between 0 and 2**63 - 1"),
        ({"rotate_block": 8}, "rotate_block is 8: must be 0 or 4"),
        ({"rotate": False, "rotate_block": 4}, "rotate_block is 4: must be 0 or 4, and 0 where rotate is False"),
        ({"power_scales": 1}, "power_scales is 1: must be True or False"),
        ({"power_scales": True}, "power_scales is True with qk_format 'int8' and k_block 128: must be False unless"),
        ({"power_scales": True, "qk_format": "e4m3", "k_block": 0}, "with qk_format 'e4m3' and k_block 0: must be"),
    ],
)
def test_recipe_fields(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        fh.Fp8Recipe(**change)  # type: ignore[arg-type]


def test_recipe_codes_and_words() -> None:
    assert fh.Fp8Recipe() == fh.Fp8Recipe.accurate()
    for recipe in (*NAMED.values(), fh.Fp8Recipe("e4m3", False, False, False, 0, 1, 256, False, 2**63 - 1)):
        assert fh.Fp8Recipe.parse(recipe.code) == recipe
        assert hash(fh.Fp8Recipe.parse(recipe.code)) == hash(recipe)
    assert "int8 QK^T" in str(fh.Fp8Recipe())
    assert "rotated by 4 columns" in str(fh.Fp8Recipe.e4m3())
    assert "k 128 rows in powers of two" in str(fh.Fp8Recipe.paper())
    assert "rotated, keys" in str(fh.Fp8Recipe())
    assert "rotated" not in str(fh.Fp8Recipe(rotate=False))
    for code in ("", "int8,1", "int8,1,1,1,1,128,128,1,1,0", "int8,1,1,1,1,128,128,1,1,0,x"):
        with pytest.raises(ValueError, match=r"recipe is .*: must be Fp8Recipe\.code"):
            fh.Fp8Recipe.parse(code)


@pytest.mark.parametrize("rotate_block", [0, 4])
@pytest.mark.parametrize("columns", sorted(rotation.BLOCK_COLUMNS))
def test_the_rotation_is_orthogonal(columns: int, rotate_block: int) -> None:
    matrix = rotation.rotate(torch.eye(columns, dtype=torch.float64), 5, rotate_block)
    identity = torch.eye(columns, dtype=torch.float64)
    torch.testing.assert_close(matrix @ matrix.mT, identity, rtol=0, atol=1e-12)
    torch.testing.assert_close(rotation.unrotate(matrix, 5, rotate_block), identity, rtol=0, atol=1e-12)
    block = rotate_block or rotation.BLOCK_COLUMNS[columns]
    # Aligned blocks, each full of +-1 / sqrt(block): an outlier of one column is spread over its block.
    outside = torch.block_diag(*(torch.ones(block, block) for _ in range(columns // block))) == 0
    assert (matrix[outside] == 0).all()
    torch.testing.assert_close(matrix[~outside].abs().unique(), torch.tensor([block**-0.5]).double())
    assert not torch.equal(matrix, rotation.rotate(identity, 6, rotate_block))


def test_signs_are_the_same_everywhere() -> None:
    """Written down, so that another process, release or machine is held to them."""
    signs = rotation.signs(2, 64, torch.device("cpu"))
    assert signs.abs().unique().tolist() == [1.0]
    assert (signs[:24] > 0).int().tolist() == SIGNS_OF_SEED_2
    assert -24 < int(signs.sum()) < 24


SIGNS_OF_SEED_2 = [0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1]


def test_rounding_is_the_cast() -> None:
    ranges = [torch.rand(20000) * 448, 2 ** torch.empty(20000).uniform_(-24, 8.8), torch.arange(0, 448, 2**-5)]
    ties = torch.cat([2.0**e * (1 + torch.arange(1, 64, dtype=torch.float32) / 64) for e in range(-10, 8)])
    for x in (*ranges, ties, -ties, torch.zeros(3)):
        assert torch.equal(formats.round_e4m3_(x.clone()), x.to(formats.E4M3).float())


def test_sampled_rows() -> None:
    """Means are over all of up to 512 rows, else over one of every 512th of them; tests/cpp/test_samples.cpp holds
    the kernels to the same rows.
    """
    device = torch.device("cpu")
    for seqlen in (0, 1, 512):
        assert torch.equal(formats.sampled_rows(seqlen, device), torch.arange(seqlen))
    rows = formats.sampled_rows(5000, device)
    assert rows[[1, 300, 511]].tolist() == [12, 2934, 4993]
    assert formats.sampled_rows(1 << 30, device)[411] == 863559268
    q, k, v = inputs(seqlen_k=5000)
    qkv = fh.quantize_fp8(q, k, v, fh.Fp8Recipe.accurate())
    for x, mean in ((k, qkv.k_mean), (v, qkv.v_mean)):
        assert mean is not None
        torch.testing.assert_close(mean[..., : x.shape[-1]].double(), x[:, rows].double().mean(1), rtol=0, atol=1e-6)


def test_key_order() -> None:
    order = formats.permute_keys(torch.arange(32)[None])[0]
    for group in (0, 16):
        for c in range(4):
            expected = [group + 2 * c, group + 2 * c + 1, group + 8 + 2 * c, group + 8 + 2 * c + 1]
            assert order[group + 4 * c : group + 4 * c + 4].tolist() == expected
    x = torch.randn(2, 3, 128)
    assert torch.equal(formats.restore_keys(formats.permute_keys(x)), x)


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ((1, 1), (64, 64)),
        ((64, 64), (64, 64)),
        ((72, 40), (96, 64)),
        ((80, 128), (96, 128)),
        ((136, 128), (192, 128)),
        ((192, 129), (192, 192)),
        ((200, 8), (256, 64)),
    ],
)
def test_computed_head_dims(dims: tuple[int, int], expected: tuple[int, int]) -> None:
    assert formats.computed_head_dims(*dims) == expected


@pytest.mark.parametrize("recipe", NAMED.values(), ids=NAMED.keys())
def test_layout(recipe: fh.Fp8Recipe) -> None:
    q, k, v = inputs(dim=80, dim_v=72)
    qkv = fh.quantize_fp8(q, k, v, recipe)
    data = torch.int8 if recipe.qk_format == "int8" else torch.float8_e4m3fn
    assert (qkv.q.shape, qkv.q.dtype) == ((2, 150, 4, 96), data)
    assert (qkv.k.shape, qkv.k.dtype) == ((2, 300, 2, 96), data)
    assert (qkv.v.shape, qkv.v.dtype) == ((2, 2, 96, 384), torch.float8_e4m3fn)
    assert qkv.q_scale.shape == (2, 4, 150 if recipe.q_block == 1 else 2)
    assert qkv.k_scale.shape == qkv.v_scale.shape == (2, 2, 3)
    assert all(x.is_contiguous() for x in vars(qkv).values() if isinstance(x, torch.Tensor))
    assert (qkv.dtype, qkv.head_dim, qkv.head_dim_v, qkv.seqlen_k) == (torch.bfloat16, 80, 72, 300)
    assert (qkv.lse_shift is None, qkv.k_mean is None) == (not recipe.smooth_k,) * 2
    values = formats.restore_keys(qkv.v.view(torch.uint8))
    assert (values[..., 300:] == 0).all()
    assert (values[:, :, 72:] == 0).all()
    if qkv.lse_shift is not None and qkv.k_mean is not None:
        mean = k.double().mean(1)
        torch.testing.assert_close(qkv.k_mean[..., :80].double(), mean, rtol=0, atol=1e-6)
        shift = torch.einsum("bqhd,bhd->bhq", q.double(), mean.repeat_interleave(2, dim=1))
        torch.testing.assert_close(qkv.lse_shift.double(), shift, rtol=0, atol=1e-4)


@PROPERTY
@given(data=st.data())
def test_round_trip(data: st.DataObject) -> None:
    """Every element comes back to within half a step of its block's scale, whatever the shape and the recipe."""
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    seqlen_q, seqlen_k = data.draw(st.integers(0, 300)), data.draw(st.integers(0, 300))
    dim, dim_v = data.draw(st.sampled_from((8, 64, 72, 128, 136, 256))), data.draw(st.sampled_from((8, 64, 128)))
    recipe = fh.Fp8Recipe(
        data.draw(st.sampled_from(("int8", "e4m3"))),
        *(data.draw(st.booleans()) for _ in range(3)),
        data.draw(st.sampled_from((0, 1, 7, 128))),
        data.draw(st.sampled_from((0, 1, 128, 256))),
        data.draw(st.sampled_from((0, 128, 256))),
        seed=data.draw(st.integers(0, 3)),
    )
    if recipe.rotate and data.draw(st.booleans()):
        recipe = replace(recipe, rotate_block=4)
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    q, k, v = inputs(seqlen_q, seqlen_k, kv_heads * group, kv_heads, dim, dim_v)
    k = k + 3
    qkv = fh.quantize_fp8(q, k, v, recipe)
    sides = (
        (q, qkv.q_scale, recipe.q_block, seqlen_q, recipe.qk_format, recipe.rotate),
        (k, qkv.k_scale, recipe.k_block, seqlen_k, recipe.qk_format, recipe.rotate),
        (v, qkv.v_scale, recipe.v_block, seqlen_k, "e4m3", False),
    )
    for back, (x, scale, block, rows, kind, is_rotated) in zip(qkv.to_reference(), sides, strict=True):
        assert back.shape == x.shape
        if x.numel() == 0:
            continue
        error = (back - x.double()).abs()
        # Half a step: of int8 0.5, of e4m3 at its largest 16. Rotated, errors of a row add up as vectors.
        bound = spread(scale, block, rows).double().transpose(1, 2) * (0.5 if kind == "int8" else 16.0) * 1.001 + 1e-6
        columns = recipe.rotate_block or rotation.BLOCK_COLUMNS[qkv.q.shape[3]] if is_rotated else 1
        assert (error.amax(-1) <= bound * columns**0.5).all()


def test_scales_are_those_of_their_blocks() -> None:
    q, k, v = inputs()
    recipe = fh.Fp8Recipe("e4m3", False, False, False, 128, 0, 128)
    qkv = fh.quantize_fp8(q, k, v, recipe)
    expected = torch.stack([part.float().abs().amax((1, 3)) / 448 for part in (q[:, :128], q[:, 128:])], dim=-1)
    assert torch.equal(qkv.q_scale, expected)
    assert torch.equal(qkv.k_scale, k.float().abs().amax((1, 3))[..., None] / 448)
    int8 = fh.quantize_fp8(q, k, v, fh.Fp8Recipe("int8", False, False, False, 1))
    assert torch.equal(int8.q_scale, (q.float().abs().amax(-1) / 127).transpose(1, 2))
    assert int8.q.abs().max() == 127


@pytest.mark.parametrize("k_block", [1, 128, 256])
def test_equal_keys_of_several_blocks_become_the_same_numbers(k_block: int) -> None:
    """Where their scales are powers of two, which no rounding sees: in blocks without outliers."""
    q, k, v = inputs(seqlen_k=768 + 20)
    k = k.sign() + k / 8
    k[:, 512:] *= 2.5
    k[:, 1::256] = k[:, :1]  # of several blocks, whose largest elements differ
    no = {"rotate": False, "smooth_k": False, "center_v": False}
    recipe = fh.Fp8Recipe(qk_format="e4m3", k_block=k_block, power_scales=True, **no)
    plain = replace(recipe, power_scales=False)
    qkv = fh.quantize_fp8(q, k, v, recipe)
    mantissa, _ = torch.frexp(qkv.k_scale)
    assert (mantissa == 0.5).all()
    assert qkv.k_scale.unique().numel() > 1
    _, back, _ = qkv.to_reference()
    assert torch.equal(back[:, 1], back[:, 257])
    assert torch.equal(back[:, 1], back[:, 513])
    k[:, 300] *= 20  # its block, and no other, now has an outlier, which its own scale makes the largest number
    found, own = (fh.quantize_fp8(q, k, v, x) for x in (recipe, plain))
    if k_block == 1:
        assert (torch.frexp(found.k_scale)[0] == 0.5).all()
        return
    block = 300 // k_block
    assert torch.equal(found.k_scale[..., block], own.k_scale[..., block])
    rest = [i for i in range(found.k_scale.shape[2]) if i != block]
    assert torch.equal(found.k_scale[..., rest], qkv.k_scale[..., rest])
    least = formats.next_power_of_two(torch.tensor([1.0, 1.5, 2.0, 2.0**-40, 3e-30]))
    assert least.tolist() == [1.0, 2.0, 2.0, 2.0**-40, 2.0 ** math.ceil(math.log2(3e-30))]


def test_zeros_and_no_keys() -> None:
    q, k, v = (torch.zeros_like(x) for x in inputs())
    for recipe in NAMED.values():
        qkv = fh.quantize_fp8(q, k, v, recipe)
        assert all((x == 0).all() for x in qkv.to_reference())
        assert torch.isfinite(qkv.v_scale).all()
        empty = fh.quantize_fp8(q, k[:, :0], v[:, :0], recipe)
        assert (empty.v.shape, empty.k_scale.shape) == ((2, 2, 64, 0), (2, 2, 0))
        assert empty.lse_shift is None or (empty.lse_shift == 0).all()


def test_strides_do_not_matter() -> None:
    q, k, v = inputs()
    moved = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for a, b in zip(vars(fh.quantize_fp8(q, k, v)).values(), vars(fh.quantize_fp8(*moved)).values(), strict=True):
        if isinstance(a, torch.Tensor):
            a, b = (x.view(torch.uint8) if x.dtype == formats.E4M3 else x for x in (a, b))
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1)  # means may be summed in another order


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"recipe": True},
            "recipe is True: must be a flashhopper.Fp8Recipe or None; pass recipe=flash",
        ),
        ({"recipe": "accurate"}, "recipe is 'accurate': must be a flashhopper.Fp8Recipe"),
        ({"q": torch.zeros(1, 2, 2, 264).half()}, "head_dim is 264: 8-bit attention takes 1 to 256"),
        ({"q": torch.zeros(1, 2, 2, 8).double()}, "q has dtype torch.float64: with fp8 it must be one of"),
        ({"k": torch.zeros(1, 2, 3, 8).half()}, "v has 2 heads, k has 3: must be equal"),
    ],
)
def test_quantize_errors(change: dict[str, object], message: str) -> None:
    q = change.pop("q", torch.zeros(1, 2, 2, 8).half())
    with pytest.raises(ValueError, match=re.escape(message)):
        fh.quantize_fp8(**{"q": q, "k": q, "v": q, "recipe": None, **change})  # type: ignore[arg-type]
