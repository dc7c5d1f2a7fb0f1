"""Device time of the contenders where Hopper kernels serve, by CUDA events. Before it: collect.py; after it:
contenders.py, fp8/operators.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from .. import flops, interface, plan
from ..engine import hopper
from ..engine.mask import Mask
from ..fp8 import operators
from ..fp8.attention import quantize_fp8
from ..testing import Inputs, make_inputs
from .contenders import BASELINE, Contender
from .rows import Row, SpeedRow

if TYPE_CHECKING:
    from .collect import Settings

TOKENS = 16384  # batch * seqlen
WIDTH = 2048  # heads * head_dim
ROUNDS, LAUNCHES = 7, 5
_SPIN_CYCLES = 2_000_000  # about a millisecond, in which the host fills the queue

Elapsed = Callable[[Callable[[], object]], float]


def is_served(device: str) -> bool:
    """Whether the compiled kernels run on this device."""
    where = torch.device(device)
    return where.type == "cuda" and hopper.module is not None and hopper.capability(where) == (9, 0)


def _lengths(settings: Settings) -> list[int]:
    return [seqlen for seqlen in settings.lengths if seqlen <= TOKENS]


def count(settings: Settings) -> int:
    """Problems of measure(), each of which every contender meets."""
    return len(_lengths(settings)) * len(settings.head_dims)


def measure(
    settings: Settings, compared: Sequence[Contender], rows: Sequence[Row], step: Callable[[str], None]
) -> list[SpeedRow]:
    """Rows of the contenders that a kernel serves; a contender without a kernel has none."""
    found = []
    for head_dim in settings.head_dims:
        for seqlen in _lengths(settings):
            heads = max(1, WIDTH // head_dim)
            batch = max(1, TOKENS // seqlen)
            inputs = make_inputs(
                "normal",
                batch=batch,
                seqlen_q=seqlen,
                heads=heads,
                head_dim=head_dim,
                device=settings.device,
                seed=settings.seed,
            )
            for contender in compared:
                step(f"speed of {contender.label}, {seqlen} keys, head_dim {head_dim}")
                times = _times(contender, inputs, settings.causal, elapsed_ms)
                if times is None:
                    continue
                kept = batch * Mask(seqlen, seqlen, -1, 0 if settings.causal else -1).kept()
                rate = flops.forward_flops(kept, heads, head_dim, head_dim) / times[0] / 1e9
                shape = (seqlen, batch, heads, head_dim, settings.causal)
                found.append(SpeedRow(contender.name, *shape, *times, rate, _error(rows, contender, seqlen, head_dim)))
    return found


def _times(contender: Contender, inputs: Inputs, causal: bool, elapsed: Elapsed) -> tuple[float, float] | None:
    """Milliseconds of attention and of quantising; None where no kernel serves."""
    q, k, v = inputs
    if contender.recipe is None:
        if contender.name not in ("fp16", "bf16"):
            return None
        dtype = torch.float16 if contender.name == "fp16" else torch.bfloat16
        a, b, c = q.to(dtype), k.to(dtype), v.to(dtype)
        if plan.explain(a, b, c, causal=causal).backend != "hopper":
            return None
        return elapsed(lambda: interface.flash_attn_func(a, b, c, causal=causal)), 0.0
    if plan.explain(q, k, v, causal=causal, fp8=contender.recipe).backend != "hopper":
        return None
    recipe = contender.recipe
    qkv = quantize_fp8(q, k, v, recipe)
    scale, right = q.shape[3] ** -0.5, 0 if causal else -1
    attention = elapsed(lambda: operators.run_attention(qkv, scale, -1, right, 0, "hopper"))
    # The baseline's whole-head scales are made by torch operations, whose time says nothing of FlashAttention-3.
    return attention, 0.0 if contender.name == BASELINE else elapsed(lambda: quantize_fp8(q, k, v, recipe))


def _error(rows: Sequence[Row], contender: Contender, seqlen: int, head_dim: int) -> float | None:
    for row in rows:
        if (row.contender, row.family, row.seqlen_k, row.head_dim) == (contender.name, "normal", seqlen, head_dim):
            return row.relative_rmse
    return None


def elapsed_ms(call: Callable[[], object]) -> float:
    """Median device time of a call over a few rounds, launches back to back."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(ROUNDS):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_SPIN_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(LAUNCHES):
            call()
        stop.record()
        stop.synchronize()
        times.append(float(start.elapsed_time(stop)) / LAUNCHES)
    return statistics.median(times)
