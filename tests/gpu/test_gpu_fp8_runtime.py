"""The 8-bit kernel as a citizen: the same bits every time, streams, graphs, memory around its tensors, gradients, raw
8-bit calls, and what is refused.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from fp8_support import (
    GUARD_BYTES,
    OUT_LIMIT,
    POISON_BYTE,
    RECIPES,
    Case,
    attend,
    documented_gradients,
    draw8,
    fp8_gradients,
    judge8,
    quantized,
)
from gpu_support import assert_equal_bits, draw_dlse, draw_dout, materialised

import flashhopper
from flashhopper.fp8 import Fp8QKV, Fp8Recipe, formats

E4M3 = torch.float8_e4m3fn
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
SLOW_CYCLES = 50_000_000  # some 30 ms of a kernel that only spins


@MASKS
@HEAD_DIMS
@pytest.mark.parametrize("recipe", ["accurate", "e4m3"])
def test_same_bits_every_time(recipe: str, head_dim: int, causal: bool) -> None:
    case = Case(2, 1000, 1100, 12, 4, head_dim, head_dim, recipe, causal)
    qkv = quantized(case, *draw8(case))
    out, lse = attend(qkv, causal)
    for _ in range(12):
        again, lse_again = attend(qkv, causal)
        assert_equal_bits(again, out)
        assert_equal_bits(lse_again, lse)


@MASKS
@HEAD_DIMS
def test_neighbours_do_not_matter(head_dim: int, causal: bool) -> None:
    """One sequence and one group of heads, alone and among others."""
    case = Case(5, 333, 400, 8, 2, head_dim, head_dim, "accurate", causal)
    qkv = quantized(case, *draw8(case))
    assert qkv.lse_shift is not None
    assert qkv.v_mean is not None
    out, lse = attend(qkv, causal)
    for batch, kv_head in ((0, 1), (4, 0)):
        one, heads, kv = slice(batch, batch + 1), slice(4 * kv_head, 4 * kv_head + 4), slice(kv_head, kv_head + 1)
        some = {"q": qkv.q[one, :, heads], "k": qkv.k[one, :, kv], "v": qkv.v[one, kv]}
        some |= {"q_scale": qkv.q_scale[one, heads], "k_scale": qkv.k_scale[one, kv], "v_scale": qkv.v_scale[one, kv]}
        some |= {"lse_shift": qkv.lse_shift[one, heads], "v_mean": qkv.v_mean[one, kv]}
        alone, lse_alone = attend(replace(qkv, **{name: x.contiguous() for name, x in some.items()}), causal)
        assert_equal_bits(alone, out[one, :, heads].contiguous())
        assert_equal_bits(lse_alone, lse[one, heads].contiguous())


def _between_poison(x: torch.Tensor) -> torch.Tensor:
    """A copy in the midst of a larger allocation whose other bytes are NaN, or -1 in int8."""
    count = x.numel() * x.element_size()
    store = torch.full((count + 2 * GUARD_BYTES,), POISON_BYTE, dtype=torch.uint8, device=x.device)
    store[GUARD_BYTES : GUARD_BYTES + count] = x.contiguous().view(torch.uint8).flatten()
    return store[GUARD_BYTES : GUARD_BYTES + count].view(x.dtype).view(x.shape)


@MASKS
@HEAD_DIMS
@pytest.mark.parametrize("recipe", ["accurate", "paper", "whole heads"])
def test_memory_around_the_inputs_does_not_matter(recipe: str, head_dim: int, causal: bool) -> None:
    """Rows of the last tiles beyond a sequence belong to the next one or to nobody: 1e4-fold keys and NaN there."""
    for seqlen_q, seqlen_k in ((77, 130), (1, 1), (200, 257)):
        case = Case(2, seqlen_q, seqlen_k, 4, 2, head_dim, head_dim, recipe, causal)
        qkv = quantized(case, *draw8(case))
        out, lse = attend(qkv, causal)
        fields = {name: _between_poison(x) for name, x in vars(qkv).items() if isinstance(x, torch.Tensor)}
        poisoned, poisoned_lse = attend(replace(qkv, **fields), causal)
        assert_equal_bits(poisoned, out)
        assert_equal_bits(poisoned_lse, lse)
        # The second sequence as poison of the first.
        for name in ("q", "k"):
            data = getattr(qkv, name).view(torch.uint8)
            data[1] = POISON_BYTE
        again, lse_again = attend(qkv, causal)
        assert_equal_bits(again[0], out[0])
        assert_equal_bits(lse_again[0], lse[0])


@MASKS
def test_side_stream_behind_a_slow_kernel(causal: bool) -> None:
    """q is written late on the stream of the call: quantiser and attention must wait for it there."""
    for recipe in ("accurate", "paper"):
        source, k, v = draw8(Case(causal=causal))
        options = {"causal": causal, "fp8": RECIPES[recipe]}
        expected = flashhopper.flash_attn_func(source, k, v, **options)  # type: ignore[arg-type]
        q = torch.zeros_like(source)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # its memory
            flashhopper.flash_attn_func(q, k, v, **options)  # type: ignore[arg-type]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLOW_CYCLES)
            q.copy_(source)
            out = flashhopper.flash_attn_func(q, k, v, **options)  # type: ignore[arg-type]
            assert not stream.query(), "the call waited for the stream: a host synchronisation"
        stream.synchronize()
        assert_equal_bits(out, expected)


def test_streams_at_once() -> None:
    """Calls that overlap on several streams share no scheduler state."""
    cases = [Case(4, 700 + 100 * i, 900, 8, 2, (64, 128)[i % 2], (64, 128)[i % 2], causal=True) for i in range(4)]
    problems = [quantized(case, *draw8(case, seed=i)) for i, case in enumerate(cases)]
    expected = [attend(qkv, True)[0] for qkv in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    results: list[list[torch.Tensor]] = [[] for _ in problems]
    raw = [_raw_arguments(qkv) for qkv in problems]
    for _ in range(8):
        for stream, (data, descales), result in zip(streams, raw, results, strict=True):
            with torch.cuda.stream(stream):
                result.append(flashhopper.flash_attn_fp8_func(*data, *descales, causal=True))  # type: ignore[arg-type]
    torch.cuda.synchronize()
    plain = [_without_means(qkv) for qkv in problems]
    for result, qkv, right in zip(results, plain, expected, strict=True):
        assert right.isfinite().all()
        alone, _ = attend(qkv, True)
        for out in result:
            assert_equal_bits(out, alone)


def _without_means(qkv: Fp8QKV) -> Fp8QKV:
    return replace(qkv, lse_shift=None, k_mean=None, v_mean=None)


def _raw_arguments(qkv: Fp8QKV) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """q8, k8, v8 and their scales as flash_attn_fp8_func takes them; means do not come along."""
    v = formats.restore_keys(qkv.v.view(torch.uint8)).permute(0, 3, 1, 2)[:, : qkv.seqlen_k].contiguous()
    return (qkv.q, qkv.k, v.view(E4M3)), (qkv.q_scale, qkv.k_scale, qkv.v_scale)


@MASKS
@pytest.mark.parametrize("recipe", ["accurate", "e4m3"])
def test_cuda_graph(recipe: str, causal: bool) -> None:
    """Capture after one warm-up call, replay on new inputs."""
    case = Case(2, 700, 700, 8, 2, recipe=recipe, causal=causal)
    options = {"causal": causal, "fp8": RECIPES[recipe], "return_lse": True}
    q, k, v = draw8(case)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        flashhopper.flash_attn_func(q, k, v, **options)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flashhopper.flash_attn_func(q, k, v, **options)  # type: ignore[arg-type]
    for seed in (8, 9, 10):
        for target, source in zip((q, k, v), draw8(case, seed), strict=True):
            target.copy_(source)
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        expected, expected_lse = flashhopper.flash_attn_func(q, k, v, **options)  # type: ignore[arg-type]
        assert_equal_bits(out, expected)
        assert_equal_bits(lse, expected_lse)


@pytest.mark.usefixtures("hopper_gradients")
@MASKS
@pytest.mark.parametrize("recipe", ["accurate", "e4m3", "paper"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_gradient_is_straight_through(head_dim: int, recipe: str, causal: bool) -> None:
    """To the bit that of the 16-bit backward on the saved inputs with the 8-bit out and lse; and, in norm, what the
    documentation says in float64.
    """
    q, k, v = draw8(Case(2, 300, 400, 4, 2, head_dim, head_dim, recipe, causal))
    dout, dlse = draw_dout(1, q, v), draw_dlse(1, q)
    out, lse, found = fp8_gradients(q, k, v, dout, dlse, causal, recipe)
    window = (-1, 0 if causal else -1)
    scale = head_dim**-0.5
    arguments = (dout, dlse, q, k, v, out, lse, None, scale, *window, 0.0, 0, True, "hopper")
    *same, _ = torch.ops.flashhopper.backward(*arguments)
    exact = documented_gradients(q, k, v, out, lse, dout, dlse, causal)
    for name, mine, again, right in zip(("dq", "dk", "dv"), found, same, exact, strict=True):
        assert mine.isfinite().all(), name
        assert_equal_bits(mine, again)
        assert (mine.double() - right).norm() <= 1e-2 * right.norm(), name


@pytest.mark.usefixtures("hopper_gradients")
def test_the_gradient_of_rows_without_keys() -> None:
    q, k, v = draw8(Case(1, 300, 100))
    out, lse, found = fp8_gradients(q, k, v, draw_dout(2, q, v), torch.zeros_like(draw_dlse(2, q)), True, "accurate")
    assert not out[:, :200].any()
    assert (lse[..., :200] == -math.inf).all()
    assert all(x.isfinite().all() for x in found)
    assert not found[0][:, :200].any()


@MASKS
@pytest.mark.parametrize("qk_dtype", [E4M3, torch.int8], ids=["e4m3", "int8"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (72, 40), (256, 256)], ids=str)
def test_raw_tensors_with_a_descale_a_head(dims: tuple[int, int], qk_dtype: torch.dtype, causal: bool) -> None:
    """FlashAttention-3's convention: (batch, kv_heads), of queries too."""
    case = Case(2, 200, 300, 6, 2, causal=causal).with_dims(dims)
    generator = torch.Generator(device="cuda").manual_seed(1)
    data, descales, values = [], [], []
    for x, dtype in zip(draw8(case), (qk_dtype, qk_dtype, E4M3), strict=True):
        descale = 0.02 + 0.02 * torch.rand(2, 2, generator=generator, device="cuda")
        of_heads = descale.repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None]
        scaled = (x.float() / of_heads).clamp(-448, 448)
        x8 = scaled.round().clamp(-127, 127).to(torch.int8) if dtype == torch.int8 else scaled.to(E4M3)
        data.append(x8)
        descales.append(descale)
        values.append(x8.double() * of_heads)
    for out_dtype in (torch.bfloat16, torch.float16):
        out, lse = flashhopper.flash_attn_fp8_func(  # type: ignore[misc]
            *data, *descales, causal=causal, out_dtype=out_dtype, return_lse=True
        )
        assert (out.dtype, out.shape) == (out_dtype, (2, 200, 6, dims[1]))
        exact_out, exact_lse = materialised(*values, causal, torch.float64, dims[0] ** -0.5)
        assert (out.double() - exact_out).norm() <= 3 * OUT_LIMIT["e4m3"] * exact_out.norm()
        assert (lse.double() - exact_lse).abs().max() <= 0.05
        strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in data]
        again = flashhopper.flash_attn_fp8_func(*strided, *descales, causal=causal, out_dtype=out_dtype)
        assert_equal_bits(again, out)  # type: ignore[arg-type]


@MASKS
@pytest.mark.parametrize("recipe", ["accurate", "query blocks", "whole heads"])
def test_raw_tensors_with_scales_of_blocks(recipe: str, causal: bool) -> None:
    """What a quantiser wrote, through the function for raw tensors: the same bits, means aside."""
    case = Case(recipe=recipe, causal=causal)
    qkv = _without_means(quantized(case, *draw8(case)))
    expected, expected_lse = attend(qkv, causal)
    data, descales = _raw_arguments(qkv)
    out, lse = flashhopper.flash_attn_fp8_func(*data, *descales, causal=causal, return_lse=True)  # type: ignore[misc]
    assert_equal_bits(out, expected)
    assert_equal_bits(lse, expected_lse)
    ones = flashhopper.flash_attn_fp8_func(*data, scales=1.0, softmax_scale=1e-5, causal=causal)
    assert ones.isfinite().all()  # type: ignore[union-attr]


@HEAD_DIMS
@pytest.mark.parametrize("recipe", ["query blocks", "paper"])
def test_scales_of_zero(recipe: str, head_dim: int) -> None:
    """Keys that are all zero, in a masked tile too, and values of zero in the block that comes first."""
    case = Case(2, 300, 420, 4, 2, head_dim, head_dim, recipe, True)
    qkv = _without_means(quantized(case, *draw8(case)))
    k_scale, v_scale = qkv.k_scale.clone(), qkv.v_scale.clone()
    k_scale[0, 0] = 0
    v_scale[1, 1, -1] = 0
    for zeroed in (replace(qkv, k_scale=k_scale), replace(qkv, v_scale=v_scale)):
        problem = judge8(zeroed, *attend(zeroed, True), True)
        assert problem is None, problem


def test_what_is_refused() -> None:
    """By name, and nothing is attended by other means instead."""
    q, k, v = draw8(Case())
    recipe = Fp8Recipe()
    for change, options, message in (
        ({"two_level": False}, {}, "two_level is False"),
        ({"k_block": 1}, {}, "k_block is 1, v_block is 128, the kernel takes 0"),
        ({"v_block": 256}, {}, "k_block is 128, v_block is 256, the kernel takes 0"),
        ({}, {"softmax_scale": 0.0}, "softmax_scale is 0.0"),
    ):
        with pytest.raises(RuntimeError, match=message):
            flashhopper.flash_attn_func(q, k, v, fp8=replace(recipe, **change), **options)  # type: ignore[arg-type]
    for name, options, error in (
        ("softcap=2.0", {"softcap": 2.0}, NotImplementedError),
        ("sink", {"sink": torch.zeros(4, device="cuda")}, NotImplementedError),
        ("sm_margin is -1", {"sm_margin": -1}, ValueError),
    ):
        with pytest.raises(error, match=name):
            flashhopper.flash_attn_func(q, k, v, fp8=recipe, **options)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="head_dim is 60, the kernels take multiples of 8"):
        flashhopper.flash_attn_func(q[..., :60], k[..., :60], v, fp8=recipe)
    wide = [torch.zeros(1, 8, 1, 264, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    with pytest.raises(ValueError, match="head_dim is 264"):
        flashhopper.flash_attn_func(*wide, fp8=recipe)
    with pytest.raises(ValueError, match=r"q has dtype .*float32"):
        flashhopper.flash_attn_func(q.float(), k.float(), v.float(), fp8=recipe)
    offsets = torch.tensor([0, 333], dtype=torch.int32, device="cuda")
    packed = [x[0, :333].contiguous() for x in (q, k, v)]
    with pytest.raises(RuntimeError, match="k_block is 0, the quantiser kernel takes 128"):
        flashhopper.flash_attn_varlen_func(*packed, offsets, offsets, 333, 333, fp8=replace(recipe, k_block=0))
    with pytest.raises(ValueError, match="q_descale is missing"):
        flashhopper.flash_attn_fp8_func(*(x.to(E4M3) for x in (q, k, v)))


def test_explain_names_the_kernel() -> None:
    q, k, v = draw8(Case())
    plan = flashhopper.explain(q, k, v, fp8=Fp8Recipe())
    assert (plan.backend, plan.quantizer) == ("hopper", "the Hopper quantiser")
    assert plan.config.startswith("fwd8")
    assert 0 < plan.grid <= plan.tiles
    packing = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 333], dtype=torch.int32, device="cuda"))
    packed = [x[0, :333].contiguous() for x in (q, k, v)]
    plan = flashhopper.explain(*packed, **packing, max_seqlen_q=333, max_seqlen_k=333, fp8=Fp8Recipe())
    assert (plan.backend, plan.quantizer, plan.is_bound) == ("hopper", "the Hopper quantiser", True)
    assert plan.config.startswith("fwd8")
    assert 0 < plan.grid <= plan.tiles


@pytest.mark.xdist_group("large")
def test_large_offsets(empty_cache: None) -> None:
    """Outputs and queries of more than 2^31 elements: the last rows arrive where they belong."""
    case = Case(1, 16_385 * 8, 130, 128, 1, 128, 128, "paper")
    generator = torch.Generator(device="cuda").manual_seed(1)
    q = torch.zeros(1, case.seqlen_q, 128, 128, dtype=torch.bfloat16, device="cuda")
    q[:, -200:] = torch.randn(1, 200, 128, 128, generator=generator, device="cuda").bfloat16()
    _, k, v = draw8(Case(1, 1, 130, 1, 1))
    qkv = quantized(case, q, k, v)
    assert qkv.q.numel() > 2**31
    out, lse = attend(qkv, False)
    last = replace(qkv, q=qkv.q[:, -200:].contiguous(), q_scale=qkv.q_scale[..., -200:].contiguous())
    assert judge8(last, out[:, -200:].contiguous(), lse[..., -200:].contiguous(), False) is None
