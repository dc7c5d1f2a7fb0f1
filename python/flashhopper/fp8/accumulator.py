"""A model of Hopper's 8-bit tensor-core accumulator. Before it: emulate.py; after it: nothing.

One wgmma adds 32 products to its accumulator. It aligns them all, and the accumulator, to the largest exponent among
them and keeps 14 bits there, so that each addend is cut at 2^-13 of the largest (DeepSeek-V3, DeepSeek-AI 2024, section
3.5.2). A sum that grows with the context therefore loses its addends one by one: the model gives the growth that is
measured on an H200 (docs/numerics.md).
"""

from __future__ import annotations

import torch

STEP = 32  # products of one instruction
FRACTION_BITS = 13  # below the leading bit
_CHUNK_ELEMENTS = 1 << 20  # products held at once: they should stay in cache


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """total + a @ b in steps of 32 terms.

    Args:
        total: float32 (heads, rows, columns); a: (heads, rows, terms) and b: (heads, terms, columns), float32 that hold
            8-bit values.
    """
    rows, columns = a.shape[1], b.shape[2]
    chunk = max(1, _CHUNK_ELEMENTS // (STEP * columns))
    result = torch.empty_like(total)
    for h in range(a.shape[0]):
        for begin in range(0, rows, chunk):
            some = slice(begin, min(begin + chunk, rows))
            result[h, some] = _chain(total[h, some], a[h, some], b[h])
    return result


def _chain(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    for begin in range(0, a.shape[1], STEP):
        products = a[:, begin : begin + STEP, None] * b[None, begin : begin + STEP]
        largest = torch.maximum(products.amax(1).abs_(), products.amin(1).abs_())
        largest = torch.maximum(largest, total.abs())
        power = largest.view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32).clamp_(min=2.0**-100)
        unit = power * 2.0**-FRACTION_BITS
        inverse = 1.0 / unit  # exact: powers of two
        # Whole multiples of the unit, below 2^20 of them: float32 adds them exactly.
        whole = products.mul_(inverse[:, None]).trunc_().sum(1)
        total = whole.add_((total * inverse).trunc_()).mul_(unit)
    return total
