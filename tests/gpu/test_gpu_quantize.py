"""The quantiser kernels against plain torch operations: scales and codes to the bit, and, of rotated rows, which tensor
cores sum, within what float32 sums may lose against float64. Means are held to float64, and what follows from them uses
the kernel's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_support import judged
from quantize_support import E4M3, Case, check, check_means, draw, k_major, run, same

from flashhopper.engine import hopper_quantize
from flashhopper.engine.hopper_quantize import Quantized, quantize, transpose_values
from flashhopper.fp8.formats import computed_head_dims


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
