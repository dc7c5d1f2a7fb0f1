"""The 8-bit formats and layouts that quantiser, kernels and emulation share. Before it: quantize.py, emulate.py; after
it: nothing.
"""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
INT8_MAX = 127.0
# A block of keys has outliers if its largest magnitude is more than so many times that of any of its groups of rows.
GROUP_ROWS = 16
MOST_UNEVEN = 1.75
LEAST_AMAX = 1e-12  # of a block that is all zeros: its scale stays a normal number
MEAN_ROWS = 512  # of a sequence, over which its means are taken; of a shorter one, all
COMPUTED_HEAD_DIMS = (64, 96, 128, 192, 256)
MAX_HEAD_DIM = COMPUTED_HEAD_DIMS[-1]


def computed_head_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The columns that 8-bit queries and keys, and values, are stored with: each the next of 64, 96, 128, 192, 256."""
    for name, size in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if not 0 < size <= MAX_HEAD_DIM:
            raise ValueError(f"{name} is {size}: 8-bit attention takes 1 to {MAX_HEAD_DIM}; pass fp8=None")
    first, second = (next(d for d in COMPUTED_HEAD_DIMS if size <= d) for size in (head_dim, head_dim_v))
    return first, second


def block_count(rows: int, block: int) -> int:
    """Scales of `rows` rows: one for all with block 0, none where there is no row."""
    if block == 0:
        return min(rows, 1)
    return -(-rows // block)


def padded_keys(seqlen_k: int) -> int:
    """Key positions in the K-major values."""
    return -(-seqlen_k // 128) * 128


def sampled_rows(seqlen: int, device: torch.device) -> torch.Tensor:
    """The rows whose mean is a sequence's, int64: all of up to MEAN_ROWS, or one of every MEAN_ROWS-th of the sequence,
    which of them a hash says, so that no period of the rows (rotary embeddings have many) meets that of the samples.
    """
    index = torch.arange(min(seqlen, MEAN_ROWS), device=device)
    if seqlen <= MEAN_ROWS:
        return index
    begin, end = index * seqlen // MEAN_ROWS, (index + 1) * seqlen // MEAN_ROWS
    low = 0xFFFFFFFF  # the kernel's arithmetic is of 32 bits
    hashed = (index * 0x9E3779B1) & low
    hashed = (hashed ^ (hashed >> 15)) * 0x85EBCA77 & low
    hashed = hashed ^ (hashed >> 13)
    return begin + (hashed * (end - begin) >> 32)


def next_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The least powers of two that are not below x: float32, contiguous, normal, positive."""
    return ((x.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)


def permute_keys(x: torch.Tensor) -> torch.Tensor:
    """Bring the last dimension, keys (a multiple of 16), into the order in which score accumulators hold them.

    Position 4 c + e of a group of 16 takes key 2 c + e for e < 2 and 8 + 2 c + e - 2 for the others, c = 0..3, so that
    a thread's probabilities are the operand of the second product as they lie.
    """
    return x.reshape(*x.shape[:-1], x.shape[-1] // 16, 2, 4, 2).transpose(-3, -2).reshape(x.shape)


def restore_keys(x: torch.Tensor) -> torch.Tensor:
    """The inverse of permute_keys."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // 16, 4, 2, 2).transpose(-3, -2).reshape(x.shape)


def round_e4m3_(x: torch.Tensor) -> torch.Tensor:
    """Round float32 of magnitude at most 448 to e4m3 in place, to nearest even: a cast there and back, at a tenth of
    its cost on a CPU.

    Adding 1.5 * 2^20 times a number's power of two leaves its four leading bits; below 2^-6 steps are of 2^-9.
    """
    magic = x.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    magic.clamp_(min=2.0**-6).mul_(1.5 * 2.0**20)
    return x.add_(magic).sub_(magic)


def to_8bit(x: torch.Tensor, qk_format: str) -> torch.Tensor:
    """float32, already divided by its scale, to "e4m3" or "int8"."""
    if qk_format == "int8":
        return x.round().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
