"""Random shapes, dtypes, strides, masks, scales and upstream gradients, backward against float64: 384 problems, a fixed
seed each.
"""

from __future__ import annotations

import random

import pytest
import torch
from gpu_support import DTYPES, Tensors, draw_dlse, gradients, judge_gradients

pytestmark = pytest.mark.usefixtures("hopper_gradients")
CHUNKS, PER_CHUNK = 12, 32
EDGES = (1, 2, 7, 8, 15, 16, 31, 33, 63, 64, 65, 79, 80, 81, 95, 96, 97, 127, 128, 129, 159, 160, 161)
EDGES += (191, 192, 193, 255, 256, 257, 319, 320, 321, 383, 384, 385, 511, 512, 513)
NATIVE = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
ROWS = (64, 96, 128, 192, 256)  # head_dim is computed at the next of these, and head_dim_v may be as large


def _length(rng: random.Random) -> int:
    return rng.choice(EDGES) if rng.random() < 0.6 else rng.randint(1, 700)


def _head_dims(rng: random.Random) -> tuple[int, int]:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(NATIVE)
    head_dim = 8 * rng.randint(1, 32)
    if kind < 0.8:
        return head_dim, head_dim
    padded = next(row for row in ROWS if row >= head_dim)
    return head_dim, 8 * rng.randint(1, padded // 8)


def _laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The values of x (batch, seqlen, heads, head_dim) in another memory layout."""
    batch, seqlen, heads, head_dim = x.shape
    if layout == "bhsd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sbhd":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout in ("padded", "odd"):  # rows, heads and batches each with their own gap; odd ones TMA cannot read
        wide = x.new_full((batch, seqlen + 3, heads + 1, head_dim + (8 if layout == "padded" else 3)), float("nan"))
        view = wide[:, 2 : 2 + seqlen, :heads, :head_dim]
        view.copy_(x)
        return view
    if layout == "batch_expanded":
        return x[:1].expand_as(x)
    if layout == "row_expanded":
        return x[:, :1].expand_as(x)
    return x


def _problem(rng: random.Random) -> tuple[Tensors, torch.Tensor, bool, float | None, str]:
    head_dim, head_dim_v = _head_dims(rng)
    kv_heads = rng.choice([1, 1, 2, 3])
    heads = kv_heads * rng.choice([1, 1, 2, 3, 4, 8])
    seqlen_q, seqlen_k = _length(rng), _length(rng)
    if rng.random() < 0.3:
        seqlen_k = seqlen_q
    # The rule compares two maxima: over a handful of numbers either may be small by luck.
    enough = -(-2048 // (kv_heads * min(seqlen_q, seqlen_k) * min(head_dim, head_dim_v)))
    batch = max(enough, rng.choice([1, 1, 2, 3]))
    causal, dtype = rng.random() < 0.5, rng.choice(DTYPES)
    scale = rng.choice([None, None, None, 0.02, 0.5])
    layouts = [rng.choice(["bshd", "bshd", "bhsd", "sbhd", "padded", "odd"]) for _ in range(3)]
    # Expanded gradients come from sums and means over the batch or the sequence.
    layouts.append(rng.choice(["bshd", "bshd", "bhsd", "sbhd", "padded", "odd", "batch_expanded", "row_expanded"]))
    generator = torch.Generator(device="cuda").manual_seed(rng.randrange(2**31))
    shapes = (
        (batch, seqlen_q, heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim_v),
        (batch, seqlen_q, heads, head_dim_v),
    )
    q, k, v, dout = (
        _laid_out(torch.randn(shape, generator=generator, device="cuda").to(dtype), layout)
        for shape, layout in zip(shapes, layouts, strict=True)
    )
    label = f"{dtype} d{head_dim}/{head_dim_v} B{batch} H{heads}:{kv_heads} Sq{seqlen_q} Sk{seqlen_k}"
    return (q, k, v), dout, causal, scale, f"{label} causal={causal} scale={scale} {layouts}"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_problems(chunk: int) -> None:
    rng = random.Random(40_000 + chunk)
    problems = []
    for index in range(PER_CHUNK):
        (q, k, v), dout, causal, scale, label = _problem(rng)
        dlse = draw_dlse(index, q) if rng.random() < 0.2 else None
        deterministic = rng.random() < 0.3
        label += f" dlse={dlse is not None} deterministic={deterministic}"
        try:
            found = gradients(q, k, v, dout, causal, scale, dlse=dlse, deterministic=deterministic)
        except RuntimeError as error:  # with the problem's description, which the error lacks
            raise AssertionError(f"{index}: {label}: {error}") from error
        problem = judge_gradients(found, q, k, v, dout, causal, scale, dlse)
        if problem:
            problems.append(f"{index}: {label}: {problem}")
    assert not problems, f"{len(problems)} of {PER_CHUNK} wrong\n" + "\n".join(problems)
