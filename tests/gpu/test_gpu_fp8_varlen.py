"""Packed sequences in 8 bits: each is quantised and attended as if it were alone, bit for bit, whatever lies around it;
against the emulation and float64 as the dense kernel (fp8_support.py); lengths stay on the device.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from fp8_support import RECIPES, Case, draw8, guarded_results, judge8, sized
from gpu_support import DTYPES, NAN, assert_equal_bits, poison_free_memory
from options_support import CAUSAL, PLAIN, Options, Packed, draw_packed, offsets, random_batch

import flashhopper
from flashhopper import checks
from flashhopper.engine import hopper_fp8, hopper_quantize
from flashhopper.engine.tiled import Packing
from flashhopper.fp8 import rotation
from flashhopper.fp8.formats import computed_head_dims

MASKS = pytest.mark.parametrize("options", [PLAIN, CAUSAL], ids=["full", "causal"])
ROWS = [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256)]
DIMS = [*ROWS, (192, 128), (40, 72), (128, 64), (72, 200)]
SERVED = ["paper", "e4m3", "accurate", "query blocks"]
LENGTHS_Q = [0, 1, 130, 64, 0, 0, 300, 7, 257, 0]
LENGTHS_K = [5, 1, 0, 300, 0, 9, 129, 200, 257, 0]
Pair = tuple[torch.Tensor, torch.Tensor]


def draw(
    seed: int,
    lengths_q: list[int],
    lengths_k: list[int],
    heads: int,
    kv_heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    mean: float = 0.5,
    **more: object,
) -> Packed:
    """Rows and blocks differ in size and channels have means; rows that do not exist are NaN."""
    batch = draw_packed(seed, lengths_q, lengths_k, heads, kv_heads, *dims, dtype=dtype, **more)  # type: ignore[arg-type]
    generator = torch.Generator(device="cuda").manual_seed(seed + 1)
    batch.q = sized(batch.q, generator, 0.5, 1.0)
    channels = [torch.randn((1, *x.shape[1:]), generator=generator, device="cuda") for x in (batch.k, batch.v)]
    batch.k = (sized(batch.k, generator, 0.5, 1.0) + mean * channels[0]).to(dtype)
    batch.v = (sized(batch.v, generator, 0.3, 2.0) + mean * channels[1]).to(dtype)
    return batch


def packing_of(batch: Packed) -> Packing:
    return Packing(batch.cu_q, batch.cu_k, *batch.used(), *batch.longest())


def attend(batch: Packed, recipe: str, options: Options, sm_margin: int = 0) -> Pair:
    """Both kernels into poisoned memory between guards, also that of the quantised tensors."""
    packing = packing_of(batch)
    sizes = checks.packed(batch.q, batch.k, batch.v, *packing)
    scale = batch.q.size(2) ** -0.5 if options.scale is None else options.scale
    with guarded_results():
        return hopper_fp8.packed_forward(
            *(batch.q, batch.k, batch.v, RECIPES[recipe], packing, sizes),
            (scale, options.left, options.right, sm_margin),
        )


def public(batch: Packed, recipe: str, options: Options) -> Pair:
    used_q, used_k = batch.used()
    poison_free_memory()
    return flashhopper.flash_attn_varlen_func(  # type: ignore[return-value]
        *(batch.q, batch.k, batch.v, batch.cu_q, batch.cu_k, *batch.longest()),
        seqused_q=used_q,
        seqused_k=used_k,
        return_lse=True,
        fp8=RECIPES[recipe],
        **options.public(),
    )


def dense(batch: Packed, rows: slice, keys: slice, recipe: str, options: Options) -> Pair:
    """The dense call on one sequence alone."""
    out, lse = flashhopper.flash_attn_func(
        *(batch.q[None, rows], batch.k[None, keys], batch.v[None, keys]),
        softmax_scale=options.scale,
        window_size=(options.left, options.right),
        fp8=RECIPES[recipe],
        return_lse=True,
    )
    return out[0], lse[0]


def check(batch: Packed, recipe: str, options: Options, *, with_oracle: bool = False) -> None:
    """Every sequence against the dense kernel's bits, with_oracle against the emulation and float64 too."""
    out, lse = attend(batch, recipe, options)
    missing = torch.ones(out.size(0), dtype=torch.bool)
    for b, (rows, keys) in enumerate(batch.slices()):
        missing[rows] = False
        if rows.start == rows.stop:
            continue
        expected, expected_lse = dense(batch, rows, keys, recipe, options)
        assert_equal_bits(lse[:, rows], expected_lse)
        assert_equal_bits(out[rows], expected)
        if with_oracle and keys.start < keys.stop:
            causal = options.right == 0
            tensors = (batch.q[None, rows], batch.k[None, keys], batch.v[None, keys])
            qkv = hopper_fp8.quantize(*tensors, RECIPES[recipe])
            problem = judge8(qkv, out[None, rows], lse[None, :, rows], causal, options.scale)
            assert problem is None, f"sequence {b}: {problem}"
    missing = missing.cuda()
    assert not out[missing].any()
    assert (lse[:, missing] == -math.inf).all()


@MASKS
@pytest.mark.parametrize("recipe", SERVED)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_ragged_batches(dims: tuple[int, int], recipe: str, options: Options) -> None:
    for dtype in DTYPES if dims == (128, 128) else DTYPES[:1]:
        batch = draw(sum(dims), LENGTHS_Q, LENGTHS_K, 4, 2, dims, dtype, behind=3)
        check(batch, recipe, options, with_oracle=True)


@MASKS
@pytest.mark.parametrize("dims", ROWS, ids=str)
def test_lengths_at_the_edges_of_blocks(dims: tuple[int, int], options: Options) -> None:
    """Every sequence lies between rows of NaN that its place holds and that do not exist."""
    edges = [n + d for n in (64, 128, 192, 256) for d in (-1, 0, 1)]
    used_q, used_k = [*edges, *edges[::-1]], [*edges, *edges[3:], *edges[:3]]
    lengths_q, lengths_k = ([n + (i % 3) * 7 for i, n in enumerate(x)] for x in (used_q, used_k))
    batch = draw(sum(dims), lengths_q, lengths_k, 1, 1, dims, used_q=used_q, used_k=used_k, behind=300)
    for recipe in ("accurate", "query blocks"):
        check(batch, recipe, options)


@MASKS
@pytest.mark.parametrize("recipe", SERVED)
def test_rows_that_do_not_exist(recipe: str, options: Options) -> None:
    used_q, used_k = [0, 3, 200, 64, 0, 300], [10, 0, 130, 7, 0, 300]
    batch = draw(3, [9, 200, 200, 65, 0, 300], [20, 90, 300, 7, 3, 300], 4, 2, (128, 128), used_q=used_q, used_k=used_k)
    check(batch, recipe, options, with_oracle=True)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (8, 1), (12, 4), (71, 1)])
def test_groups(heads: int, kv_heads: int) -> None:
    for options, dims in ((PLAIN, (64, 64)), (CAUSAL, (128, 128))):
        batch = draw(heads, LENGTHS_Q, LENGTHS_K, heads, kv_heads, dims)
        for recipe in ("accurate", "query blocks"):
            check(batch, recipe, options)


@pytest.mark.parametrize("window", [(0, 0), (63, 0), (64, 128), (127, -1), (-1, 5), (300, 300)], ids=str)
@pytest.mark.parametrize("dims", ROWS, ids=str)
def test_windows(dims: tuple[int, int], window: tuple[int, int]) -> None:
    batch = draw(sum(dims), [333, 500, 0, 100], [333, 200, 8, 777], 4, 2, dims)
    for recipe in ("accurate", "e4m3"):
        check(batch, recipe, Options(*window))


@MASKS
@pytest.mark.parametrize("recipe", SERVED)
def test_a_uniform_batch_is_the_dense_one(recipe: str, options: Options) -> None:
    case = Case(5, 333, 333, head_dim=64, head_dim_v=64)
    q, k, v = draw8(case, mean=1.0)
    expected, expected_lse = flashhopper.flash_attn_func(
        q, k, v, causal=options.right == 0, fp8=RECIPES[recipe], return_lse=True
    )
    batch = Packed(*(x.flatten(0, 1) for x in (q, k, v)), [333] * 5, [333] * 5)
    out, lse = public(batch, recipe, options)
    assert_equal_bits(out.view_as(expected), expected)
    assert_equal_bits(lse.view(4, 5, 333).transpose(0, 1), expected_lse)


def test_lse_of_smoothed_keys_far_from_zero() -> None:
    """Their mean moves lse by tens, a different one in each sequence."""
    batch = draw(5, [200, 300, 64], [300, 257, 500], 4, 2, (128, 128), mean=6.0)
    for recipe in ("accurate", "e4m3"):
        check(batch, recipe, CAUSAL, with_oracle=True)


def test_long_sequences_among_short_ones() -> None:
    """Means of more than 256 blocks are summed in larger chunks, as a dense call does."""
    lengths = [3, 40_000, 0, 34_567, 200]
    batch = draw(6, [20] * 5, lengths, 8, 8, (64, 64))
    check(batch, "accurate", PLAIN)


@pytest.mark.parametrize("count", [1, 31, 33, 1023, 1025, 3000])
def test_many_short_sequences(count: int) -> None:
    """As many empty ones between them; looking a block's sequence up takes one to three rounds."""
    case = Case(count, 2, 2, 2, 1, 64, 64, causal=True)
    q, k, v = draw8(case, mean=1.0)
    lengths = [2, 0] * count
    batch = Packed(*(x.flatten(0, 1) for x in (q, k, v)), lengths, lengths)
    for recipe in ("accurate", "query blocks"):
        expected, expected_lse = flashhopper.flash_attn_func(q, k, v, causal=True, fp8=RECIPES[recipe], return_lse=True)
        out, lse = attend(batch, recipe, CAUSAL)
        assert_equal_bits(out.view_as(expected), expected)
        assert_equal_bits(lse.view(2, count, 2).transpose(0, 1), expected_lse)


def test_strides() -> None:
    """Heads outside rows, and slices of one fused tensor, of which no 16-byte vector can be read."""
    lengths = [100, 0, 333]
    batch = draw(9, lengths, lengths, 4, 4, (64, 64))
    expected = public(batch, "accurate", CAUSAL)
    layouts = [[x.transpose(0, 1).contiguous().transpose(0, 1) for x in (batch.q, batch.k, batch.v)]]
    for width in (72, 67):
        fused = torch.full((433, 3, 5, width), NAN, dtype=torch.bfloat16, device="cuda")
        fused[:, 0, :4, :64], fused[:, 1, :4, :64], fused[:, 2, :4, :64] = batch.q, batch.k, batch.v
        layouts.append([fused[:, i, :4, :64] for i in range(3)])
    for tensors in layouts:
        found = public(Packed(*tensors, lengths, lengths), "accurate", CAUSAL)
        for mine, right in zip(found, expected, strict=True):
            assert_equal_bits(mine, right)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=str)
def test_batches_without_rows(lengths: list[int]) -> None:
    for behind in (0, 5):
        batch = draw(1, lengths, lengths, 2, 1, (64, 64), behind=behind)
        for recipe in SERVED:
            out, lse = attend(batch, recipe, CAUSAL)
            assert out.shape == (behind, 2, 64)
            assert not out.any()
            assert (lse == -math.inf).all()


@MASKS
@pytest.mark.parametrize("recipe", SERVED)
def test_batches_without_keys(recipe: str, options: Options) -> None:
    """Keys, values and their quantised tensors have no memory at all, or none that a sequence owns."""
    for behind in (0, 5):
        check(draw(1, [5, 0, 200], [0, 0, 0], 4, 2, (64, 64), behind=behind), recipe, options)


def test_offsets_beyond_the_tensors_read_nothing() -> None:
    """They cannot be refused without waiting for the device: they end with the tensors."""
    batch = draw(2, [100, 150], [130, 200], 4, 2, (128, 128))
    for recipe in ("accurate", "query blocks"):
        batch.cu_q, batch.cu_k = offsets([100, 150]), offsets([130, 200])
        expected = attend(batch, recipe, PLAIN)
        batch.cu_q[2], batch.cu_k[2] = 2_000_000_000, 1_000_000
        for mine, right in zip(attend(batch, recipe, PLAIN), expected, strict=True):
            assert_equal_bits(mine, right)
        for wild in ([-5, 100, 90], [0, 2**31 - 1, 0], [250, 250, -(2**31)]):
            batch.cu_q.copy_(torch.tensor(wild))
            batch.cu_k.copy_(torch.tensor(wild[::-1]))
            attend(batch, recipe, PLAIN)  # writes nothing outside, and ends
    torch.cuda.synchronize()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_call_waits_for_the_device() -> None:
    batch = draw(4, LENGTHS_Q, LENGTHS_K, 4, 2, (128, 128))
    arguments = (batch.q, batch.k, batch.v, batch.cu_q, batch.cu_k, *batch.longest())
    for recipe in SERVED:
        flashhopper.flash_attn_varlen_func(*arguments, causal=True, fp8=RECIPES[recipe])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            flashhopper.flash_attn_varlen_func(*arguments, causal=True, fp8=RECIPES[recipe])
        finally:
            torch.cuda.set_sync_debug_mode("default")


@MASKS
@pytest.mark.parametrize("recipe", ["accurate", "query blocks"])
def test_a_replayed_graph_takes_the_lengths_of_its_replay(recipe: str, options: Options) -> None:
    first, second = [100, 0, 300, 50], [0, 250, 1, 190]
    batch = draw(6, first, first, 8, 2, (128, 128), behind=10)
    used = torch.tensor(first).int().cuda()
    arguments = (batch.q.nan_to_num(), batch.k.nan_to_num(), batch.v.nan_to_num(), batch.cu_q, batch.cu_k, 460, 460)
    more = {"seqused_k": used, "causal": options.right == 0, "fp8": RECIPES[recipe], "return_lse": True}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        flashhopper.flash_attn_varlen_func(*arguments, **more)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flashhopper.flash_attn_varlen_func(*arguments, **more)  # type: ignore[arg-type]
    for lengths in (second, first, [441, 0, 0, 0], second):
        batch.cu_q.copy_(offsets(lengths))
        batch.cu_k.copy_(offsets(lengths))
        used.copy_(torch.tensor([n // 2 + n % 2 for n in lengths]))
        out.fill_(NAN)
        lse.fill_(NAN)
        graph.replay()
        expected, expected_lse = flashhopper.flash_attn_varlen_func(*arguments, **more)  # type: ignore[arg-type]
        assert_equal_bits(out, expected)
        assert_equal_bits(lse, expected_lse)
        assert not out.isnan().any()


@MASKS
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_same_bits_every_time(head_dim: int, options: Options) -> None:
    lengths = [900, 0, 333, 1200, 64]
    batch = draw(head_dim, lengths, lengths, 12, 4, (head_dim, head_dim))
    out, lse = attend(batch, "accurate", options)
    for sm_margin in (0, 0, 100, 131):
        again, lse_again = attend(batch, "accurate", options, sm_margin)
        assert_equal_bits(again, out)
        assert_equal_bits(lse_again, lse)


@pytest.mark.parametrize("recipe", SERVED)
def test_the_gradient_is_straight_through(recipe: str) -> None:
    """Near the gradients of dense calls on each sequence alone, whose 16-bit backward adds in another order."""
    batch = draw(12, [100, 0, 165], [70, 3, 230], 4, 2, (64, 64))
    leaves = [x.requires_grad_() for x in (batch.q, batch.k, batch.v)]
    out, lse = public(batch, recipe, CAUSAL)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    alone = [torch.zeros_like(x) for x in leaves]
    for rows, keys in batch.slices():
        if rows.start == rows.stop:
            continue
        one_out, one_lse = dense(batch, rows, keys, recipe, CAUSAL)
        one = torch.autograd.grad((one_out, one_lse), leaves, (dout[rows], dlse[:, rows]))
        for total, part in zip(alone, one, strict=True):
            total += part
    for mine, right in zip(found, alone, strict=True):
        assert mine.isfinite().all()
        assert (mine.double() - right.double()).norm() <= 1e-2 * right.double().norm()


def _pieces(sequence: int, rows: slice, keys: slice, q_block: int) -> dict[str, tuple[object, ...]]:
    """Where a sequence stands in each tensor of a packed Quantized."""
    first_q, first_k = rows.start // 128 + sequence, keys.start // 128 + sequence
    blocks_q, blocks_k = -(-(rows.stop - rows.start) // 128), -(-(keys.stop - keys.start) // 128)
    every, of_k = slice(None), slice(first_k, first_k + blocks_k)
    return {
        "q": (rows,),
        "k": (keys,),
        "v": (every, every, slice(128 * first_k, 128 * (first_k + blocks_k))),
        "q_scale": (every, rows if q_block == 1 else slice(first_q, first_q + blocks_q)),
        "k_scale": (every, of_k),
        "v_scale": (every, of_k),
        "lse_shift": (every, rows),
        "k_mean": (sequence,),
        "v_mean": (sequence,),
    }


@pytest.mark.parametrize("recipe", SERVED)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_each_sequence_is_quantised_as_if_it_were_alone(dims: tuple[int, int], recipe: str) -> None:
    """Every tensor bit for bit; what no existing row stands for is not written."""
    used_q, used_k = [0, 1, 128, 60, 0, 0, 300, 7, 256, 0], [5, 1, 0, 257, 0, 9, 128, 200, 130, 0]
    batch = draw(sum(dims), LENGTHS_Q, LENGTHS_K, 6, 3, dims, used_q=used_q, used_k=used_k, behind=200)
    chosen = RECIPES[recipe]
    columns, _ = computed_head_dims(*dims)
    signs = rotation.signs(chosen.seed, columns, batch.q.device) if chosen.rotate else None
    blocks = chosen.q_block, chosen.rotate_block
    means = chosen.smooth_k, chosen.center_v
    numbers = hopper_quantize.Numbers(chosen.qk_format, signs, *means, *blocks, chosen.power_scales)
    packing = packing_of(batch)
    sizes = checks.packed(batch.q, batch.k, batch.v, *packing)
    with guarded_results():
        found = hopper_quantize.quantize_packed(batch.q, batch.k, batch.v, numbers, packing, sizes)
    bits = {
        name: x.view(torch.uint8 if x.element_size() == 1 else torch.int32).clone()
        for name, x in found._asdict().items()
        if x is not None
    }
    for sequence, (rows, keys) in enumerate(batch.slices()):
        tensors = (batch.q[None, rows], batch.k[None, keys], batch.v[None, keys])
        alone = hopper_quantize.quantize(*tensors, numbers)._asdict()
        for name, place in _pieces(sequence, rows, keys, chosen.q_block).items():
            assert (alone[name] is None) == (name not in bits)
            if name in bits:
                assert_equal_bits(bits[name][place], alone[name][0].view(bits[name].dtype))
                bits[name][place] = -1 if bits[name].dtype == torch.int32 else 0xFF  # the poison
    # The sums of the means lie where values come later: V's unused chunks may hold them.
    for name, x in bits.items():
        if name != "v" or not (chosen.smooth_k or chosen.center_v):
            assert (x == (-1 if x.dtype == torch.int32 else 0xFF)).all(), f"{name}: wrote what no row stands for"


CHUNKS, PER_CHUNK = 4, 12


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_batches(chunk: int) -> None:
    rng = random.Random(90_000 + chunk)
    for _ in range(PER_CHUNK):
        sizes, window = random_batch(rng, DIMS)
        batch = draw(sizes.pop("seed"), *sizes.pop("shape"), sizes.pop("dims"), **sizes)
        check(batch, rng.choice(SERVED), Options(*window, scale=rng.choice([None, 0.02])))
