"""Random shapes, dtypes, strides and masks against float64: 640 problems, a fixed seed each."""

from __future__ import annotations

import random

import pytest
import torch
from gpu_support import DTYPES, Tensors, judge, poisoned_forward

CHUNKS, PER_CHUNK = 20, 32
EDGES = (1, 2, 7, 8, 15, 16, 31, 33, 63, 64, 65, 79, 80, 81, 96, 111, 112, 113, 127, 128, 129, 159, 160, 161)
EDGES += (175, 176, 177, 191, 192, 193, 255, 256, 257, 319, 320, 321, 352, 383, 384, 385, 511, 512, 513)


def _length(rng: random.Random) -> int:
    return rng.choice(EDGES) if rng.random() < 0.6 else rng.randint(1, 900)


def _head_dims(rng: random.Random) -> tuple[int, int]:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice([(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)])
    head_dim = 8 * rng.randint(1, 32)
    return (head_dim, head_dim) if kind < 0.85 else (head_dim, 8 * rng.randint(1, 32))


def _laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The values of x (batch, seqlen, heads, head_dim) in another memory layout."""
    batch, seqlen, heads, head_dim = x.shape
    if layout == "bhsd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sbhd":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "padded":  # rows, heads and batches each with their own gap
        wide = x.new_full((batch, seqlen + 3, heads + 1, head_dim + 8), float("nan"))
        view = wide[:, 2 : 2 + seqlen, :heads, :head_dim]
        view.copy_(x)
        return view
    return x


def _problem(rng: random.Random) -> tuple[Tensors, bool, float | None, str]:
    head_dim, head_dim_v = _head_dims(rng)
    kv_heads = rng.choice([1, 1, 2, 3])
    heads = kv_heads * rng.choice([1, 1, 2, 3, 4, 8])
    seqlen_q, seqlen_k = _length(rng), _length(rng)
    # The rule compares two maxima: over a handful of numbers either may be small by luck.
    enough = -(-2048 // (heads * seqlen_q * head_dim_v))
    batch = max(enough, rng.choice([1, 1, 2, 3, 5]))
    if rng.random() < 0.3:
        seqlen_k = seqlen_q
    causal, dtype = rng.random() < 0.5, rng.choice(DTYPES)
    scale = rng.choice([None, None, None, 0.02, 0.5])
    layouts = [rng.choice(["bshd", "bshd", "bhsd", "sbhd", "padded"]) for _ in range(3)]
    generator = torch.Generator(device="cuda").manual_seed(rng.randrange(2**31))
    shapes = (
        (batch, seqlen_q, heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim_v),
    )
    q, k, v = (
        _laid_out(torch.randn(shape, generator=generator, device="cuda").to(dtype), layout)
        for shape, layout in zip(shapes, layouts, strict=True)
    )
    label = f"{dtype} d{head_dim}/{head_dim_v} B{batch} H{heads}:{kv_heads} Sq{seqlen_q} Sk{seqlen_k}"
    return (q, k, v), causal, scale, f"{label} causal={causal} scale={scale} {layouts}"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_problems(chunk: int) -> None:
    rng = random.Random(20_000 + chunk)
    problems = []
    for index in range(PER_CHUNK):
        (q, k, v), causal, scale, label = _problem(rng)
        out, lse = poisoned_forward(q, k, v, causal, scale)
        problem = judge(out, lse, q, k, v, causal, scale).problem()
        if problem:
            problems.append(f"{index}: {label}: {problem}")
    assert not problems, f"{len(problems)} of {PER_CHUNK} wrong\n" + "\n".join(problems)
