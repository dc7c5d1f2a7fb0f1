"""Incoherent processing: x -> (x * signs) H / sqrt(b) on aligned blocks of b columns, signs from a seed, H the Hadamard
matrix of size b. Before it: quantize.py; after it: nothing.

H is symmetric and H H = b I, so the rotation is orthogonal and leaves products of rotated queries and rotated keys as
they were. Butterflies in a fixed order, additions only: every device gives the same bits.
"""

from __future__ import annotations

from functools import lru_cache

import torch

# Columns of the widest Hadamard block: the largest power of two that divides the computed head dimension.
BLOCK_COLUMNS = {64: 64, 96: 32, 128: 128, 192: 64, 256: 256}
QUAD = 4  # the other block there is


@lru_cache(maxsize=64)
def signs(seed: int, columns: int, device: torch.device) -> torch.Tensor:
    """One of +-1 a column, float32 (columns,): the same in every process and on every device."""
    generator = torch.Generator()  # of the CPU, whatever the device
    generator.manual_seed(seed)
    drawn = torch.randint(0, 2, (columns,), generator=generator)
    return (2 * drawn - 1).to(device=device, dtype=torch.float32)


def rotate(x: torch.Tensor, seed: int, block: int = 0) -> torch.Tensor:
    """x: float32 or float64 (..., columns), columns one of BLOCK_COLUMNS; block: QUAD, or 0 for the widest."""
    return _hadamard(x * signs(seed, x.shape[-1], x.device), block)


def unrotate(x: torch.Tensor, seed: int, block: int = 0) -> torch.Tensor:
    """The inverse of rotate, which is its transpose."""
    return _hadamard(x, block) * signs(seed, x.shape[-1], x.device)


def _hadamard(x: torch.Tensor, block: int) -> torch.Tensor:
    """x H / sqrt(block) on aligned blocks of columns; partners of stride 1 are added first, then 2, 4, ..."""
    shape, stride = x.shape, 1
    block = block or BLOCK_COLUMNS[x.shape[-1]]
    while stride < block:
        pairs = x.reshape(*shape[:-1], shape[-1] // (2 * stride), 2, stride)
        low, high = pairs.unbind(-2)
        x = torch.stack((low + high, low - high), dim=-2).reshape(shape)
        stride *= 2
    return x * float(block**-0.5)
