"""The mask policy of the tiled engine: element predicate and block ranges in one place. Before it: tiled.py; after it:
nothing.

Same rules as cpp/core/mask.hpp: bottom-right alignment, query i sees keys j with
i + Sk - Sq - left <= j <= i + Sk - Sq + right, where -1 is unbounded and causal attention is right = 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

Range = tuple[int, int]  # begin, end; empty when begin >= end


class Mask(NamedTuple):
    """Which keys each query of one sequence sees."""

    seqlen_q: int
    seqlen_k: int
    left: int  # -1: unbounded
    right: int  # -1: unbounded

    @property
    def offset(self) -> int:
        """Key position that lies under query 0's own position."""
        return self.seqlen_k - self.seqlen_q

    def key_range(self, q_begin: int, q_end: int) -> Range:
        """Keys that at least one query of [q_begin, q_end) sees, no more."""
        begin = 0 if self.left < 0 else max(0, q_begin + self.offset - self.left)
        end = self.seqlen_k if self.right < 0 else min(self.seqlen_k, q_end + self.offset + self.right)
        return begin, max(begin, end)

    def unmasked_range(self, q_begin: int, q_end: int) -> Range:
        """Keys that every query of [q_begin, q_end) sees: these need no predicate."""
        begin = 0 if self.left < 0 else max(0, q_end - 1 + self.offset - self.left)
        end = self.seqlen_k if self.right < 0 else min(self.seqlen_k, q_begin + self.offset + self.right + 1)
        return begin, max(begin, end)

    def needs_predicate(self, q_begin: int, q_end: int, k_begin: int, k_end: int) -> bool:
        """Whether some element of this block is masked."""
        begin, end = self.unmasked_range(q_begin, q_end)
        return k_begin < begin or k_end > end

    def keep(self, q_begin: int, q_end: int, k_begin: int, k_end: int, device: torch.device) -> torch.Tensor:
        """The element predicate of one block: bool (q_end - q_begin, k_end - k_begin), True where the query sees the
        key.
        """
        diagonal = torch.arange(q_begin, q_end, device=device)[:, None] + self.offset
        keys = torch.arange(k_begin, k_end, device=device)[None, :]
        keep = torch.ones(q_end - q_begin, k_end - k_begin, dtype=torch.bool, device=device)
        if self.left >= 0:
            keep &= keys >= diagonal - self.left
        if self.right >= 0:
            keep &= keys <= diagonal + self.right
        return keep

    def kept(self) -> int:
        """Number of (query, key) pairs that are computed: what floating-point operations are counted from."""
        total = 0
        if self.left < 0 and self.right < 0:
            return self.seqlen_q * self.seqlen_k
        # A row's first key grows by one a row once it leaves 0, its last until it meets seqlen_k: sums of clipped
        # ramps.
        total += (
            _clipped_sum(self.offset + self.right + 1, self.seqlen_q, self.seqlen_k)
            if self.right >= 0
            else (self.seqlen_q * self.seqlen_k)
        )
        if self.left >= 0:
            total -= _clipped_sum(self.offset - self.left, self.seqlen_q, self.seqlen_k)
        return total


def _clipped_sum(start: int, count: int, limit: int) -> int:
    """Sum over i in [0, count) of min(max(start + i, 0), limit)."""

    def ramp(n: int) -> int:  # sum of max(0, x) for x <= n
        return n * (n + 1) // 2 if n > 0 else 0

    last = start + count - 1
    below = ramp(last) - ramp(start - 1)
    above = ramp(last - limit) - ramp(start - 1 - limit)
    return below - above
