"""What several test files share: small tiles, so that small inputs cross many block boundaries, and the oracle's
gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from flashhopper import reference_attention
from flashhopper.engine import tiles


@contextmanager
def small_tiles(elements: int = 1500, block_k: int = 16, rows: int = 12) -> Iterator[None]:
    """Let the tiled engine use tiny blocks."""
    saved = tiles.CPU_TILE_ELEMENTS, tiles.CPU_BLOCK_K, tiles.MIN_BLOCK_ROWS
    tiles.CPU_TILE_ELEMENTS, tiles.CPU_BLOCK_K, tiles.MIN_BLOCK_ROWS = elements, block_k, rows
    try:
        yield
    finally:
        tiles.CPU_TILE_ELEMENTS, tiles.CPU_BLOCK_K, tiles.MIN_BLOCK_ROWS = saved


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Equal shapes and infinities, and a bounded difference; NaN never passes."""
    assert actual.shape == expected.shape
    actual, expected = actual.detach().double(), expected.detach().double()
    assert torch.equal(torch.isinf(actual), torch.isinf(expected))
    difference = (actual - expected).masked_fill(torch.isinf(expected), 0.0).abs()
    if difference.numel() > 0:
        scale = max(1.0, float(expected.masked_fill(torch.isinf(expected), 0.0).abs().max()))
        assert float(difference.max()) <= tolerance * scale


def gradients(
    out: torch.Tensor, lse: torch.Tensor, inputs: Sequence[torch.Tensor], dout: torch.Tensor, dlse: torch.Tensor
) -> list[torch.Tensor]:
    """Gradients of <out, dout> + <lse, dlse>, finite lse only; zeros where an input has no part."""
    seen = torch.isfinite(lse.detach())
    loss = (out * dout).sum() + torch.where(seen, lse * dlse, torch.zeros_like(lse)).sum()
    if not loss.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """reference_attention with the public functions' option names."""
    return reference_attention(q, k, v, **options)  # type: ignore[arg-type]
