"""8-bit calls of the public functions: gradients, packed sequences, raw tensors, operators, compilation, refusals."""

from __future__ import annotations

import math
import re

import pytest
import torch
from helpers import assert_close
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flashhopper as fh
from flashhopper.fp8 import emulate, operators

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]
RECIPES = {"accurate": fh.Fp8Recipe.accurate(), "e4m3": fh.Fp8Recipe.e4m3(), "paper": fh.Fp8Recipe.paper()}
E4M3 = torch.float8_e4m3fn


def inputs(requires_grad: bool = False, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    shapes = ((2, 9, 4, 40), (2, 140, 2, 40), (2, 140, 2, 24))
    return [torch.randn(shape).to(dtype).requires_grad_(requires_grad) for shape in shapes]


def raw() -> list[torch.Tensor]:
    return [x.to(E4M3) for x in inputs()]


def packed(requires_grad: bool = False) -> tuple[list[torch.Tensor], tuple[object, ...]]:
    tensors = [torch.randn(n, h, 24).bfloat16().requires_grad_(requires_grad) for n, h in ((9, 4), (150, 2), (150, 2))]
    return tensors, (torch.tensor([0, 4, 4, 9]).int(), torch.tensor([0, 0, 140, 150]).int(), 5, 140)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_call_is_quantise_and_attend(recipe: fh.Fp8Recipe, dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype=dtype)
    out, lse = fh.flash_attn_func(q, k, v, 0.2, True, fp8=recipe, return_lse=True)
    assert (out.dtype, out.shape, lse.dtype) == (dtype, (2, 9, 4, 24), torch.float32)
    expected = emulate.attention(fh.quantize_fp8(q, k, v, recipe), 0.2, True)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    qkv = torch.cat([torch.randn(2, 9, 4, 40), torch.randn(2, 9, 4, 40)], dim=2).to(dtype)
    fused = fh.flash_attn_qkvpacked_func(qkv, num_heads_q=4, fp8=recipe)
    assert torch.equal(fused, fh.flash_attn_func(qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 6:], fp8=recipe))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_the_gradient_is_straight_through(recipe: fh.Fp8Recipe) -> None:
    """It is the 16-bit backward with the 8-bit out and lse, and close to the exact gradient."""
    q, k, v = inputs(requires_grad=True)
    out, lse = fh.flash_attn_func(q, k, v, causal=True, fp8=recipe, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    saved = [x.detach() for x in (q, k, v, out, lse)]
    numbers = (None, 40**-0.5, -1, 0, 0.0, 0, False, "auto")
    for a, b in zip(found, torch.ops.flashhopper.backward(dout, dlse, *saved, *numbers), strict=False):
        assert torch.equal(a, b)
    exact_out, exact_lse = fh.reference_attention(q, k, v, causal=True)
    exact = torch.autograd.grad((exact_out, exact_lse), (q, k, v), (dout.double(), dlse.double()))
    for a, b in zip(found, exact, strict=True):
        assert (a - b).norm() <= 0.1 * b.norm()
    only = torch.autograd.grad(fh.flash_attn_func(q, k, v, fp8=recipe, return_lse=True)[1].sum(), (q, k))
    assert all(torch.isfinite(x).all() for x in only)


def test_gradients_are_never_nan() -> None:
    """Scores so large that quantising moves them by more than an exponential's range; rows and calls without keys."""
    usual = inputs()
    q, k, v = ((x * 30).requires_grad_() for x in usual)
    for recipe in RECIPES.values():
        for scale in (1.0, 100.0):
            out = fh.flash_attn_func(q, k, v, scale, fp8=recipe)
            assert torch.isfinite(out).all()
            for x in torch.autograd.grad(out.float().square().sum(), (q, k, v)):
                assert not torch.isnan(x).any()
        for keys in (0, 4):  # of nine queries five see nothing
            few = [x.detach()[:, :rows].requires_grad_() for x, rows in zip(usual, (9, keys, keys), strict=True)]
            out = fh.flash_attn_func(*few, causal=True, fp8=recipe)
            assert (out[:, : 9 - keys] == 0).all()
            for x in torch.autograd.grad(out.sum(), few):
                assert torch.isfinite(x).all()


def test_a_gradient_that_was_not_finite_stays_visible() -> None:
    """Gradient scalers look for it."""
    q, k, v = inputs(requires_grad=True)
    out = fh.flash_attn_func(q, k, v, fp8=fh.Fp8Recipe())
    dout = torch.zeros_like(out)
    dout[0, 0, 0, 0] = math.nan
    assert any(torch.isnan(x).any() for x in torch.autograd.grad(out, (q, k, v), dout))


def test_packed_sequences_are_quantised_each_on_its_own() -> None:
    (q, k, v), rest = packed(requires_grad=True)
    out, lse = fh.flash_attn_varlen_func(q, k, v, *rest, causal=True, fp8=fh.Fp8Recipe(), return_lse=True)
    assert (out[:4] == 0).all()
    assert (lse[:, :4] == -math.inf).all()
    one = [x[None, rows] for x, rows in ((q, slice(4, 9)), (k, slice(140, 150)), (v, slice(140, 150)))]
    expected, expected_lse = fh.flash_attn_func(*one, causal=True, fp8=fh.Fp8Recipe(), return_lse=True)
    assert torch.equal(out[4:], expected[0])
    assert torch.equal(lse[:, 4:], expected_lse[0])
    found = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    for a, b in zip(found, torch.autograd.grad(expected.float().square().sum(), (q, k, v)), strict=True):
        assert torch.equal(a, b)
    used = {"seqused_k": torch.tensor([0, 100, 10]).int()}
    k = k.detach().clone()
    k[100:140] = math.nan
    assert torch.isfinite(fh.flash_attn_varlen_func(q, k, v, *rest, fp8=fh.Fp8Recipe(), **used)).all()


def test_raw_tensors_and_their_scales() -> None:
    q8, k8, v8 = raw()
    plain = [x.float() for x in (q8, k8, v8)]

    def check(given: tuple[torch.Tensor | None, ...], factors: list[torch.Tensor | float], **options: object) -> None:
        out, lse = fh.flash_attn_fp8_func(q8, k8, v8, *given, causal=True, return_lse=True, **options)
        ref, ref_lse = fh.reference_attention(*(x * f for x, f in zip(plain, factors, strict=True)), causal=True)
        assert out.dtype == options.get("out_dtype", torch.bfloat16)
        assert_close(lse, ref_lse, 2e-2)  # of weights as they were rounded
        assert (out.double() - ref).norm() <= 0.04 * ref.norm()

    check((None, None, None), [1.0, 1.0, 1.0], scales=1.0)
    check((None, None, None), [0.5, 0.5, 0.5], scales=0.5, out_dtype=torch.float16)
    # FlashAttention-3's: (batch, kv_heads), a query scale for the group.
    a, b, c = (torch.rand(2, 2) + 0.5 for _ in range(3))
    group = a.repeat_interleave(2, dim=1)[:, None, :, None]
    check((a, b, c), [group, b[:, None, :, None], c[:, None, :, None]])
    check((a, None, c), [group, 1.0, c[:, None, :, None]], scales=1.0)
    # Blocks: a row of queries, 128 keys.
    rows, blocks, values = torch.rand(2, 4, 9) + 0.5, torch.rand(2, 2, 2) + 0.5, torch.rand(2, 2, 2) + 0.5
    each = [x.repeat_interleave(128, dim=2)[..., :140].transpose(1, 2)[..., None] for x in (blocks, values)]
    check((rows, blocks, values), [rows.transpose(1, 2)[..., None], *each])
    keys = torch.rand(2, 2, 140) + 0.5
    check((rows, keys, values), [rows.transpose(1, 2)[..., None], keys.transpose(1, 2)[..., None], each[1]])
    none = fh.flash_attn_fp8_func(q8, k8[:, :0], v8[:, :0], a, b, c)
    assert (none == 0).all()
    whole = [(x.float() * 9).round().clamp(-127, 127).to(torch.int8) for x in (q8, k8)]
    out = fh.flash_attn_fp8_func(*whole, v8, scales=0.1)
    ref, _ = fh.reference_attention(*(x.float() * 0.1 for x in (*whole, v8)))
    assert (out.double() - ref).norm() <= 0.04 * ref.norm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {},
            "q_descale is missing: 8-bit data mean nothing without their scale; pass a float32 tensor (2, 2), or",
        ),
        ({"q_descale": torch.ones(2, 2)}, "k_descale is missing"),
        ({"scales": 0.0}, "scales is 0.0: must be a positive finite float; pass scales=1.0"),
        ({"scales": True}, "scales is True: must be a positive finite float"),
        (
            {"q8": torch.zeros(2, 9, 4, 40).half()},
            "q8 has dtype torch.float16: must be float8_e4m3fn; 16-bit tensors go to",
        ),
        ({"v8": torch.zeros(2, 140, 2, 24).char()}, "v8 has dtype torch.int8: must be float8_e4m3fn"),
        (
            {"k8": torch.zeros(2, 140, 2, 40).char()},
            "k8 has dtype torch.int8, q8 has torch.float8_e4m3fn: must be equal",
        ),
        ({"k8": torch.zeros(2, 140, 3, 40).to(E4M3)}, "v has 2 heads, k has 3: must be equal"),
        ({"q8": None}, "q8 is a NoneType: must be a torch.Tensor of dtype float8_e4m3fn"),
        ({"q_descale": 1.0}, "q_descale is of float: must be a float32 tensor; cast with .to(torch.float32)"),
        ({"v_descale": torch.ones(2, 2).half()}, "v_descale is of torch.float16: must be a float32 tensor"),
        (
            {"q_descale": torch.ones(2, 2, 9), "scales": 1.0},
            "q_descale has shape (2, 2, 9): must be (batch, kv_heads) = (2, ",
        ),
        (
            {"k_descale": torch.ones(2, 2, 3), "scales": 1.0},
            "k_descale has 3 blocks for seqlen_k 140: must be 1, or 2 for",
        ),
        (
            {"v_descale": torch.ones(2, 2, 140), "scales": 1.0},
            "v_descale has 140 blocks for seqlen_k 140: must be 1, or 2",
        ),
        (
            {"scales": 1.0, "out_dtype": torch.float32},
            "out_dtype is torch.float32: must be torch.bfloat16 or torch.float16",
        ),
        ({"scales": 1.0, "softmax_scale": math.nan}, "softmax_scale is nan: must be finite"),
    ],
)
def test_raw_errors(change: dict[str, object], message: str) -> None:
    names = ("q8", "k8", "v8")
    arguments = {**dict(zip(names, raw(), strict=True)), **change}
    if "v_descale" in change:
        arguments.setdefault("scales", 1.0)
    if "q_descale" in change and not isinstance(change["q_descale"], torch.Tensor):
        arguments.setdefault("scales", 1.0)
    with pytest.raises(ValueError, match=re.escape(message)):
        fh.flash_attn_fp8_func(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"fp8": True},
            ValueError,
            "fp8 is True: must be a flashhopper.Fp8Recipe or None; pass fp8=flashhopper.Fp8Recipe()",
        ),
        ({"fp8": "e4m3"}, ValueError, "fp8 is 'e4m3': must be a flashhopper.Fp8Recipe or None"),
        (
            {"softcap": 30.0},
            NotImplementedError,
            "softcap=30.0 is not available with fp8: pass softcap=0.0, or fp8=None",
        ),
        ({"sink": torch.zeros(4)}, NotImplementedError, "sink is not available with fp8: pass sink=None, or fp8=None"),
        ({"num_splits": 2}, NotImplementedError, "num_splits=2 is not available"),
        ({"softmax_scale": math.inf}, ValueError, "softmax_scale is inf: must be finite"),
        ({"window_size": 3}, ValueError, "window_size is 3: must be a pair"),
    ],
)
def test_refusals(change: dict[str, object], error: type[Exception], message: str) -> None:
    options = {"fp8": fh.Fp8Recipe(), **change}
    (q, k, v), rest = packed()
    with pytest.raises(error, match=re.escape(message)):
        fh.flash_attn_func(*inputs(), **options)  # type: ignore[arg-type]
    with pytest.raises(error, match=re.escape(message)):
        fh.flash_attn_varlen_func(q, k, v, *rest, **options)  # type: ignore[arg-type]
    with pytest.raises(error, match=re.escape(message)):
        fh.explain(*inputs(), **options)  # type: ignore[arg-type]


def test_refused_dtypes_sizes_and_gradients() -> None:
    recipe = fh.Fp8Recipe()
    with pytest.raises(
        ValueError, match=r"q has dtype torch\.float32: with fp8 it must be one of float16, bfloat16; cast"
    ):
        fh.flash_attn_func(*(x.float() for x in inputs()), fp8=recipe)
    wide = torch.zeros(1, 2, 1, 264).half()
    with pytest.raises(ValueError, match="head_dim is 264: 8-bit attention takes 1 to 256; pass fp8=None"):
        fh.flash_attn_func(wide, wide, wide, fp8=recipe)
    q, k, v = inputs(requires_grad=True)
    with pytest.raises(
        RuntimeError, match="quantize_fp8 and flash_attn_fp8_func have no gradient: use flash_attn_func"
    ):
        fh.quantize_fp8(q, k, v).k_scale.sum().backward()
    with torch.no_grad():
        fh.quantize_fp8(q, k, v)
    q8, k8, v8 = (x.requires_grad_() for x in raw())
    with pytest.raises(ValueError, match="q8 requires a gradient, which 8-bit tensors do not have here"):
        fh.flash_attn_fp8_func(q8, k8, v8, scales=1.0)
    out = fh.flash_attn_func(q, k, v, fp8=recipe)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()
    with pytest.raises(RuntimeError, match="no vmap rule"):
        torch.vmap(lambda x: fh.flash_attn_func(x, k.detach(), v.detach(), fp8=recipe))(q.detach()[None])


def test_autocast() -> None:
    q, k, v = (x.float() for x in inputs())
    with torch.autocast("cpu", torch.bfloat16):
        out = fh.flash_attn_func(q, k, v, fp8=fh.Fp8Recipe())
    assert torch.equal(out, fh.flash_attn_func(*(x.bfloat16() for x in (q, k, v)), fp8=fh.Fp8Recipe()))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad: bool) -> None:
    q, k, v = inputs(requires_grad)
    code = fh.Fp8Recipe().code
    numbers = (0.25, -1, 0, 0)
    torch.library.opcheck(operators.fp8_forward_op, (q, k, v, code, *numbers, False, "auto"))
    (q, k, v), (cu_q, cu_k, max_q, max_k) = packed(requires_grad)
    packing = (cu_q, cu_k, None, torch.tensor([0, 100, 10]).int(), max_q, max_k)
    # Offsets drawn by the test harness would be no offsets, so the dynamic-shape test, which does that, is left out.
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (q, k, v, code, *packing, *numbers, False, "auto")
    torch.library.opcheck(operators.fp8_varlen_forward_op, arguments, test_utils=utils)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_opcheck_of_the_halves(recipe: fh.Fp8Recipe) -> None:
    q, k, v = inputs()
    utils = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operators.quantize_op, (q, k, v, recipe.code, "auto"), test_utils=("test_schema", *utils))
    # The harness's test of the schema compares inputs by allclose, which has no 8-bit floats.
    tensors = operators.quantize_op(q, k, v, recipe.code, "auto")
    arguments = (*tensors, recipe.code, 40, 24, torch.bfloat16, 0.25, -1, 0, 0, "auto")
    torch.library.opcheck(operators.forward8_op, arguments, test_utils=utils)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_fakes_tell_the_truth(recipe: fh.Fp8Recipe) -> None:
    q, k, v = inputs()
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    mode = FakeTensorMode()
    with mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        found = [*operators.quantize_op(*fake, recipe.code, "auto")]
        found += fh.flash_attn_func(*fake, fp8=recipe, return_lse=True)
        found.append(fh.flash_attn_fp8_func(*(x.to(E4M3) for x in fake), scales=1.0))
    real = [*operators.quantize_op(q, k, v, recipe.code, "auto")]
    real += fh.flash_attn_func(q, k, v, fp8=recipe, return_lse=True)
    real.append(fh.flash_attn_fp8_func(*(x.to(E4M3) for x in (q, k, v)), scales=1.0))
    for a, b in zip(real, found, strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    recipe = fh.Fp8Recipe.accurate()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = fh.flash_attn_func(q, k, v, causal=True, fp8=recipe, return_lse=True)
        return out.float().sum(-1).transpose(1, 2) + lse

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for shift in (0, 5):
        q, k, v = (
            torch.randn(2, n + shift, h, 24).bfloat16().requires_grad_() for n, h in ((9, 4), (130, 2), (130, 2))
        )
        result, expected = compiled(q, k, v), attend(q, k, v)
        assert torch.equal(result, expected)
        found = torch.autograd.grad(result.square().sum(), (q, k, v))
        for a, b in zip(found, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True):
            assert_close(a, b, 1e-2)


def test_compile_the_rest() -> None:
    (q, k, v), rest = packed()
    for function in (
        lambda q, k, v: fh.flash_attn_varlen_func(q, k, v, *rest, fp8=fh.Fp8Recipe.e4m3()),
        lambda q, k, v: fh.quantize_fp8(q[None], k[None], v[None]).k_scale,
        lambda q, k, v: fh.flash_attn_fp8_func(*(x[None].to(E4M3) for x in (q, k, v)), scales=1.0),
    ):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(q, k, v), function(q, k, v))


def test_flop_counter() -> None:
    q, k, v = inputs(requires_grad=True)
    (packed_q, packed_k, packed_v), rest = packed()
    kept = 9 * 140
    with FlopCounterMode(display=False) as counter:
        out = fh.flash_attn_func(q, k, v, fp8=fh.Fp8Recipe())
        assert counter.get_total_flops() == 2 * 2 * kept * 4 * (40 + 24)
        out.sum().backward()
        assert counter.get_total_flops() == 2 * 2 * kept * 4 * (40 + 24 + 3 * 40 + 2 * 24)
    with FlopCounterMode(display=False) as counter:
        fh.flash_attn_fp8_func(*raw(), scales=1.0)
        assert counter.get_total_flops() == 2 * 2 * kept * 4 * (40 + 24)
    with FlopCounterMode(display=False) as counter:
        fh.flash_attn_varlen_func(packed_q, packed_k, packed_v, *rest, fp8=fh.Fp8Recipe())
        assert counter.get_total_flops() == 2 * 5 * 10 * 4 * (24 + 24)
    assert fh.explain(q, k, v, fp8=fh.Fp8Recipe()).flops == 2 * 2 * kept * 4 * (40 + 24)


def test_explain() -> None:
    plan = fh.explain(*inputs(), causal=True, fp8=fh.Fp8Recipe())
    text = str(plan)
    assert plan.backend == "tiled"
    assert (plan.head_dim, plan.head_dim_v, plan.tile_n) == (64, 64, 128)
    assert "q is on cpu, not on a CUDA device" in plan.why
    assert "recipe     int8 QK^T, e4m3 PV, rotated, keys smoothed" in text
    assert "quantises  torch ops: q is on cpu" in text
    assert "emulated in torch ops" in text
    assert "gradients  straight-through; tiled engine" in text
    with fh.set_backend("tiled"):
        assert fh.explain(*inputs(), fp8=fh.Fp8Recipe()).quantizer == "torch ops: asked for by name"
    assert "recipe" not in str(fh.explain(*inputs()))
