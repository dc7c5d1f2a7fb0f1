"""What the tiled engine costs: memory that grows with tokens only, time within four times torch's own attention, and
the host time of a call that reaches the kernels.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_module import install
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import flashhopper as fh
from flashhopper.engine import tiled


class PeakMemory(TorchDispatchMode):
    """Bytes of the tensors that operations made and that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and not any(result is x for x in args):
            size = result.numel() * result.element_size()
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(result, self._free, size)
        return result

    def _free(self, size: int) -> None:
        self.live -= size


def peak_bytes(seqlen: int) -> int:
    q, k, v = (torch.randn(1, seqlen, h, 8) for h in (2, 1, 1))
    settings = tiled.Settings(0.3, -1, 0, 0.0)
    with PeakMemory() as memory:
        out, lse = tiled.dense_forward(q, k, v, None, settings)
        tiled.dense_backward(torch.ones_like(out), None, q, k, v, out, lse, None, settings)
    return memory.peak


def test_memory_is_linear_in_tokens() -> None:
    short, long = peak_bytes(2048), peak_bytes(8192)
    assert long < 8192 * 8192  # the scores alone would be 8 times that
    # Beyond the tiles, whose size is fixed, four times the tokens may take four times the bytes.
    per_token = (long - short) / (8192 - 2048)
    assert per_token < 2048


def seconds(run: Callable[[], object]) -> float:
    """Best processor time of three runs on one thread: other processes count for little."""
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_forward_within_four_times_torch(dtype: torch.dtype, causal: bool) -> None:
    q, k, v = (torch.randn(1, 4096, 2, 64, dtype=dtype) for _ in range(3))
    theirs = [x.transpose(1, 2) for x in (q, k, v)]
    torch_seconds = seconds(lambda: scaled_dot_product_attention(*theirs, is_causal=causal))
    assert seconds(lambda: fh.flash_attn_func(q, k, v, causal=causal)) < 4 * torch_seconds


def test_forward_and_backward_within_four_times_torch() -> None:
    q, k, v = (torch.randn(1, 4096, 1, 64, requires_grad=True) for _ in range(3))

    def ours() -> None:
        torch.autograd.grad(fh.flash_attn_func(q, k, v).sum(), (q, k, v))

    def theirs() -> None:
        out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        torch.autograd.grad(out.sum(), (q, k, v))

    assert seconds(ours) < 4 * seconds(theirs)


def test_host_cost_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """All Python on the way to a launch, in units of what allocating the two results costs: a quiet machine's 5 us."""
    install(monkeypatch).calls = DropAll()
    q, k, v = (torch.randn(1, 4, 2, 64).bfloat16() for _ in range(3))

    def call() -> None:
        for _ in range(500):
            fh.flash_attn_func(q, k, v, causal=True)

    def allocate() -> None:
        for _ in range(500):
            torch.empty_like(q)
            q.new_empty((1, 2, 4), dtype=torch.float32)

    call()
    assert seconds(call) < 8 * seconds(allocate)


class DropAll(list):  # type: ignore[type-arg]
    """The fake module's record, which must not grow while it is timed."""

    def append(self, _: object) -> None:
        return None
