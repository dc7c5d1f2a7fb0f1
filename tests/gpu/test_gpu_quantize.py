"""The quantiser kernels against plain torch operations: scales and codes to the bit, and, of rotated rows, which tensor
cores sum, within what float32 sums may lose against float64. Means are held to float64, and what follows from them uses
the kernel's own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from gpu_support import judged

from flashhopper.engine import hopper_quantize
from flashhopper.engine.hopper_quantize import Numbers, Quantized, quantize, transpose_values
from flashhopper.fp8.formats import computed_head_dims, sampled_rows

E4M3 = torch.float8_e4m3fn
HADAMARD = {64: 64, 96: 32, 128: 128, 192: 64, 256: 256}
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A problem and the numbers of a recipe."""

    batch: int = 2
    seqlen_q: int = 200
    seqlen_k: int = 333
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    head_dim_v: int = 128
    dtype: torch.dtype = torch.bfloat16
    qk_format: str = "e4m3"
    rotate: bool = False
    smooth_k: bool = False
    center_v: bool = False
    q_block: int = 128
    rotate_block: int = 0
    power_scales: bool = False

    def __str__(self) -> str:
        flags = "".join(name[0] for name in ("rotate", "smooth_k", "center_v", "power_scales") if getattr(self, name))
        sizes = f"b{self.batch} {self.seqlen_q}x{self.seqlen_k} h{self.heads}:{self.kv_heads}"
        dims = f"d{self.head_dim}/{self.head_dim_v} {str(self.dtype)[6:]}"
        return f"{sizes} {dims} {self.qk_format} {flags} q{self.q_block} h{self.rotate_block}"


def draw(case: Case, seed: int = 0) -> Tensors:
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=generator, device="cuda")
        offset = torch.randn((1, 1, *shape[2:]), generator=generator, device="cuda")  # channels with a mean
        return (x + 2 * offset).to(case.dtype)

    q = normal(case.batch, case.seqlen_q, case.heads, case.head_dim)
    k = normal(case.batch, case.seqlen_k, case.kv_heads, case.head_dim)
    k[:, 140:141] *= 20  # a block with an outlier
    return q, k, normal(case.batch, case.seqlen_k, case.kv_heads, case.head_dim_v)


@functools.cache  # a graph cannot copy them from the host
def signs_of(case: Case) -> torch.Tensor | None:
    columns, _ = computed_head_dims(case.head_dim, case.head_dim)
    drawn = torch.randint(0, 2, (columns,), generator=torch.Generator().manual_seed(7))
    return (2 * drawn - 1).float().cuda() if case.rotate else None


def run(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Quantized:
    blocks = case.q_block, case.rotate_block
    means = case.smooth_k, case.center_v
    return quantize(q, k, v, Numbers(case.qk_format, signs_of(case), *means, *blocks, case.power_scales))


def wide(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x.float(), (0, computed_head_dims(x.shape[-1], x.shape[-1])[0] - x.shape[-1]))


def hadamard(x: torch.Tensor, block: int) -> torch.Tensor:
    """x H on aligned blocks of columns, partners of stride 1 first, then 2, 4, ..."""
    shape, stride = x.shape, 1
    while stride < block:
        low, high = x.reshape(*shape[:-1], shape[-1] // (2 * stride), 2, stride).unbind(-2)
        x = torch.stack((low + high, low - high), dim=-2).reshape(shape)
        stride *= 2
    return x


def has_outliers(amax: torch.Tensor, rows: int) -> torch.Tensor:
    """Of the largest magnitudes of rows (batch, rows rounded up to 128, heads): whether the largest of a block of 128
    is above 1.75 times the largest of any 16 rows of it; (batch, blocks, heads).
    """
    groups = amax.unflatten(1, (-1, 8, 16)).amax(3)
    exists = torch.arange(groups.shape[1] * 8, device=amax.device).view(1, -1, 8, 1) * 16 < rows
    return ((groups.amax(2, keepdim=True) > 1.75 * groups) & exists).any(2)


def codes(x: torch.Tensor, block: int, qk_format: str, power_scales: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 (batch, rows, heads, columns) to 8-bit bytes and scales."""
    most = torch.tensor(127.0 if qk_format == "int8" else 448.0, device=x.device)
    rows = x.shape[1]
    amax = x.abs().amax(-1)
    blocks = -(-rows // block)
    padded = torch.nn.functional.pad(amax, (0, 0, 0, blocks * block - rows))
    amax = padded.view(x.shape[0], blocks, block, x.shape[2]).amax(2)
    scale = amax.clamp(min=1e-12) / most
    if power_scales:
        mantissa, exponent = torch.frexp(scale)
        power = torch.ldexp(torch.where(mantissa == 0.5, 0.5, 1.0), exponent)
        scale = torch.where(has_outliers(padded, rows), scale, power)
    y = x * (1.0 / scale).repeat_interleave(block, 1)[:, :rows, :, None]
    if qk_format == "int8":
        data = y.round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
    else:
        data = y.clamp(-448, 448).to(E4M3).view(torch.uint8)
    return data, scale.transpose(1, 2)


def check_rotated(
    case: Case, name: str, x: torch.Tensor, terms: torch.Tensor, q_block: int, found: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """x: float64 (batch, rows, heads, columns), the exact rotated rows; terms: of each the sum of the magnitudes that
    it is a sum of, which bounds the rounding of float32. found: codes and scales.
    """
    data, scale = found
    most, rows, slack = (127.0 if case.qk_format == "int8" else 448.0), x.shape[1], terms * 2.0**-21
    blocks = -(-rows // q_block)

    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x.amax(-1), (0, 0, 0, blocks * q_block - rows))

    def scales(magnitudes: torch.Tensor) -> torch.Tensor:
        amax = padded(magnitudes).view(x.shape[0], blocks, q_block, x.shape[2]).amax(2)
        result = amax.clamp(min=1e-12) / most
        if name == "k" and case.power_scales:
            result = torch.where(has_outliers(padded(x.abs()), rows), result, torch.exp2(result.log2().ceil()))
        return result.transpose(1, 2)

    assert (scale >= scales((x.abs() - slack).clamp(min=0.0)) * (1 - 2.0**-22)).all(), f"{name}_scale: too small"
    assert (scale <= scales(x.abs() + slack) * (1 + 2.0**-22)).all(), f"{name}_scale: too large"
    of_rows = scale.double().transpose(1, 2).repeat_interleave(q_block, 1)[:, :rows, :, None]
    exact, slack = x / of_rows, slack / of_rows + 2.0**-21 * x.abs() / of_rows
    if case.qk_format == "int8":
        codes = data.view(torch.int8).double()
        low, high = ((exact + sign * slack).round().clamp(-most, most) for sign in (-1, 1))
    else:
        codes = data.view(E4M3).double()
        low, high = ((exact + sign * slack).float().clamp(-most, most).to(E4M3).double() for sign in (-1, 1))
    wrong = ((codes < low) | (codes > high) | codes.isnan()).sum().item()
    assert wrong == 0, f"{name}: {wrong} of {codes.numel()} are not the nearest"


def k_major(v8: torch.Tensor) -> torch.Tensor:
    """Bytes (batch, seqlen_k, kv_heads, columns) -> (batch, kv_heads, columns, keys), one key at a time as the format
    says.
    """
    batch, seqlen_k, heads, columns = v8.shape
    keys = -(-seqlen_k // 128) * 128
    padded = torch.zeros((batch, keys, heads, columns), dtype=torch.uint8, device=v8.device)
    padded[:, :seqlen_k] = v8
    order = [
        16 * g + (2 * c + e if e < 2 else 6 + 2 * c + e) for g in range(keys // 16) for c in range(4) for e in range(4)
    ]
    assert sorted(order) == list(range(keys))
    return padded[:, order].permute(0, 2, 3, 1)


def same(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    found, expected = (
        x.contiguous().view(torch.uint8 if x.element_size() == 1 else torch.int32) for x in (found, expected)
    )
    assert found.shape == expected.shape
    wrong = (found != expected).sum().item()
    assert wrong == 0, f"{name}: {wrong} of {found.numel()} differ"


def check_means(case: Case, found: Quantized, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, wanted, mean, x in (
        ("k_mean", case.smooth_k, found.k_mean, k),
        ("v_mean", case.center_v, found.v_mean, v),
    ):
        assert (mean is not None) == wanted
        if mean is None:
            continue
        rows = wide(x).double()[:, sampled_rows(case.seqlen_k, x.device)]
        exact = rows.sum(1) / max(rows.shape[1], 1)
        allowed = 1e-6 * rows.abs().sum(1) / max(rows.shape[1], 1) + 1e-30
        assert ((mean.double() - exact).abs() <= allowed).all(), name
    assert (found.lse_shift is not None) == case.smooth_k
    if found.lse_shift is not None and found.k_mean is not None:
        of_heads = found.k_mean.double().repeat_interleave(case.heads // case.kv_heads, 1)
        products = wide(q).double() * of_heads[:, None]
        error = (found.lse_shift.double() - products.sum(-1).transpose(1, 2)).abs()
        assert (error <= 1e-6 * products.abs().sum(-1).transpose(1, 2) + 1e-30).all(), "lse_shift"


def check(case: Case, found: Quantized, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    judged.count += 1
    check_means(case, found, q, k, v)
    wide_q, wide_k, wide_v = wide(q), wide(k), wide(v)
    signs, block = signs_of(case), case.rotate_block or HADAMARD[wide_q.shape[-1]]
    mean = None if found.k_mean is None else found.k_mean[:, None]
    if found.v_mean is not None:
        wide_v = wide_v - found.v_mean[:, None]
    for name, x, q_block in (("q", wide_q, case.q_block), ("k", wide_k, 128)):
        data, scale = getattr(found, name), getattr(found, f"{name}_scale")
        is_smooth = name == "k" and mean is not None
        if signs is not None:
            exact, norm = (x.double() - mean if is_smooth else x.double()) * signs, 1.0 / math.sqrt(block)
            terms = x.double().abs() + (mean.double().abs() if is_smooth else 0.0)
            sums = terms.unflatten(-1, (-1, block)).sum(-1).repeat_interleave(block, -1)
            check_rotated(case, name, hadamard(exact, block) * norm, sums * norm, q_block, (data, scale))
            continue
        expected, expected_scale = codes(
            x - mean if is_smooth else x, q_block, case.qk_format, name == "k" and case.power_scales
        )
        same(f"{name}_scale", scale, expected_scale)
        same(name, data, expected)
    data, scale = codes(wide_v, 128, "e4m3")
    same("v_scale", found.v_scale, scale)
    same("v", found.v, k_major(data))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outputs hold NaN until they are written."""
    empty = torch.empty

    def poisoned_empty(*arguments: Any, **options: Any) -> torch.Tensor:
        result: torch.Tensor = empty(*arguments, **options)
        result.view(torch.uint8).fill_(0xFF)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(hopper_quantize.torch, "empty", poisoned_empty)
        yield


RECIPES = {
    "plain": {},
    "paper": {"rotate": True, "power_scales": True},
    "unrotated": {"smooth_k": True, "center_v": True},
    "powers": {"center_v": True, "power_scales": True},
    "e4m3": {
        "smooth_k": True,
        "rotate": True,
        "center_v": True,
        "q_block": 1,
        "rotate_block": 4,
        "power_scales": True,
    },
    "quads alone": {"rotate": True, "rotate_block": 4},
    "accurate": {"qk_format": "int8", "smooth_k": True, "rotate": True, "center_v": True, "q_block": 1},
    "int8 blocks": {"qk_format": "int8", "rotate": True},
}
DIMS = (
    (64, 64),
    (96, 96),
    (128, 128),
    (192, 192),
    (192, 128),
    (168, 168),
    (256, 256),
    (8, 8),
    (40, 72),
    (104, 88),
    (200, 144),
    (248, 224),
)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_recipes(dtype: torch.dtype, dims: tuple[int, int], recipe: str) -> None:
    case = replace(Case(dtype=dtype, head_dim=dims[0], head_dim_v=dims[1]), **RECIPES[recipe])
    inputs = draw(case)
    check(case, run(case, *inputs), *inputs)


@pytest.mark.parametrize("seqlens", [(1, 1), (1, 127), (128, 128), (129, 1), (5, 257), (3, 4099), (2500, 16)], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("recipe", ["e4m3", "accurate"])
def test_lengths_and_groups(recipe: str, heads: tuple[int, int], seqlens: tuple[int, int]) -> None:
    case = Case(1 + heads[0] % 3, *seqlens, *heads, head_dim=64, head_dim_v=96)
    case = replace(case, **RECIPES[recipe])
    inputs = draw(case)
    check(case, run(case, *inputs), *inputs)


@pytest.mark.parametrize(
    "empty", [{"seqlen_k": 0}, {"seqlen_q": 0}, {"batch": 0}, {"seqlen_q": 0, "seqlen_k": 0}], ids=str
)
@pytest.mark.parametrize("recipe", ["plain", "accurate"])
def test_empty(recipe: str, empty: dict[str, int]) -> None:
    case = replace(Case(**empty), **RECIPES[recipe])  # type: ignore[arg-type]
    inputs = draw(case)
    found = run(case, *inputs)
    assert found.q.shape == (case.batch, case.seqlen_q, case.heads, 128)
    if case.batch > 0:
        check_means(case, found, *inputs)
    if case.seqlen_k == 0 and case.smooth_k:
        for mean in (found.k_mean, found.v_mean, found.lse_shift):
            assert mean is not None
            assert not mean.any()
    for x in (found.q, found.q_scale):
        assert x.numel() == 0 or not x.float().isnan().any()


def strided(x: torch.Tensor, kind: str) -> torch.Tensor:
    batch, rows, heads, columns = x.shape
    if kind == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "packed":  # as a slice of (batch, rows, 3, heads, columns)
        return torch.stack((x, torch.full_like(x, math.nan), torch.full_like(x, math.inf)), 2)[:, :, 0]
    if kind == "odd rows":  # rows that no 16-byte vector can be read from
        holder = x.new_full((batch, rows, heads * columns + 3), math.nan)
        result = holder[..., 1 : 1 + heads * columns].unflatten(-1, (heads, columns))
        result.copy_(x)
        return result
    if kind == "every second row":
        return torch.stack((x, torch.full_like(x, math.nan)), 2).flatten(1, 2)[:, ::2]
    assert kind == "expanded"
    return x[:1, :, :1].expand(batch, rows, heads, columns)


@pytest.mark.parametrize("kind", ["heads first", "packed", "odd rows", "every second row", "expanded"])
@pytest.mark.parametrize("dims", [(128, 128), (72, 256), (192, 192)], ids=str)
def test_strides(dims: tuple[int, int], kind: str) -> None:
    case = replace(Case(head_dim=dims[0], head_dim_v=dims[1]), **RECIPES["accurate"])
    inputs = draw(case)
    q, k, v = (strided(x, kind) for x in inputs)
    check(case, run(case, q, k, v), q, k, v)


def test_reruns_are_bit_equal_on_any_stream() -> None:
    case = replace(Case(2, 1000, 9000, 8, 4), **RECIPES["accurate"])
    inputs = draw(case)
    first = run(case, *inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for turn in range(20):
        with torch.cuda.stream(stream if turn % 2 else torch.cuda.current_stream()):
            again = run(case, *inputs)
        torch.cuda.synchronize()
        for name, a, b in zip(Quantized._fields, first, again, strict=True):
            assert a is not None
            assert b is not None
            same(name, a, b)


@pytest.mark.parametrize("recipe", RECIPES)
def test_calls_in_turns(recipe: str) -> None:
    """Kernels of a call overlap: what follows on the stream sees them all done, and so does the next call."""
    case = replace(Case(2, 1000, 3000, 8, 4), **RECIPES[recipe])
    inputs = [draw(case, seed) for seed in range(2)]
    expected = [run(case, *x) for x in inputs]
    torch.cuda.synchronize()
    kept = []
    for turn in range(24):
        found = run(case, *inputs[turn % 2])  # in the memory that the call before last had
        kept.append([None if x is None else x.clone() for x in found])
        del found
    for turn, copies in enumerate(kept):
        for name, a, b in zip(Quantized._fields, expected[turn % 2], copies, strict=True):
            if a is not None and b is not None:
                same(name, a, b)
    judged.count += 1


def test_queries_do_not_see_keys_that_are_not_finite() -> None:
    case = replace(Case(), **RECIPES["accurate"])
    q, k, v = draw(case)
    clean = run(case, q, k, v)
    k[1, 130, 0, 3] = math.nan
    found = run(case, q, k, v)
    same("q", found.q, clean.q)
    same("q_scale", found.q_scale, clean.q_scale)
    judged.count += 1


def test_graph() -> None:
    case = replace(Case(), **RECIPES["e4m3"])
    inputs = draw(case)
    run(case, *inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(case, *inputs)
    for x, fresh in zip(inputs, draw(case, seed=5), strict=True):
        x.copy_(fresh)
    graph.replay()
    check(case, found, *inputs)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("recipe", ["plain", "accurate"])
def test_not_finite(recipe: str, value: float) -> None:
    """What is not finite spreads at most over its block, or, through the mean, over its head."""
    case = replace(Case(), **RECIPES[recipe])
    q, k, v = draw(case)
    clean = run(case, q, k, v)
    for x in (q, k, v):
        x[1, 130, 0, 3] = value
    found = run(case, q, k, v)
    torch.cuda.synchronize()
    for name in ("q", "k", "v", "q_scale", "k_scale", "v_scale"):
        same(name, getattr(found, name)[0], getattr(clean, name)[0])
    for head, block in ((0, 0), (1, 1)):
        assert found.v_scale[1, head, block] == clean.v_scale[1, head, block] or case.center_v
    if not case.smooth_k:
        same("k", found.k[1, :128], clean.k[1, :128])
        same("q", found.q[1, :, 1:], clean.q[1, :, 1:])


def test_zeros_and_extremes() -> None:
    case = Case(dtype=torch.float16, rotate=True)
    q, k, v = (torch.zeros_like(x) for x in draw(case))
    found = run(case, q, k, v)
    check(case, found, q, k, v)
    assert not found.q.float().any()
    for x in (q, k, v):
        x.fill_(65504.0)
    check(case, run(case, q, k, v), q, k, v)


@pytest.mark.xdist_group("large")
def test_large_offsets(empty_cache: None) -> None:
    """A tensor of more than 2^31 elements: its last rows arrive where they belong."""
    case = Case(1, 128, 8300, 1, 1, 64, 64)
    holder = torch.zeros((1, 8300, 4096, 64), dtype=torch.bfloat16, device="cuda")
    q, k, v = draw(case)
    far_k, far_v = holder[:, :, 4094:4095], holder[:, :, 4095:]
    far_k.copy_(k)
    far_v.copy_(v)
    check(case, run(case, q, far_k, far_v), q, far_k, far_v)


@pytest.mark.parametrize("columns", [64, 96, 128, 192, 256, 1, 50, 100, 250])
@pytest.mark.parametrize("seqlen", [1, 128, 300])
@pytest.mark.parametrize("kind", ["contiguous", "heads first", "sliced"])
def test_transposed_values(kind: str, seqlen: int, columns: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(1)
    raw = torch.randint(0, 256, (2, seqlen, 3, columns + 5), generator=generator, device="cuda", dtype=torch.uint8)
    raw = raw[..., 3 : columns + 3] if kind == "sliced" else raw[..., :columns].contiguous()
    if kind == "heads first":
        raw = raw.transpose(1, 2).contiguous().transpose(1, 2)
    found = transpose_values(raw.view(E4M3))
    padded = torch.nn.functional.pad(raw, (0, computed_head_dims(columns, columns)[0] - columns))
    same("v", found, k_major(padded))


def test_refusals() -> None:
    q, k, v = draw(Case(head_dim=60))
    with pytest.raises(ValueError, match="head_dim is 60"):
        quantize(q, k, v)
    q, k, v = draw(Case(heads=3, kv_heads=2))
    with pytest.raises(ValueError, match="heads must be a multiple of kv_heads"):
        quantize(q, k, v)
