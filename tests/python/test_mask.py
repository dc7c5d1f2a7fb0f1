"""The mask policy by brute force: ranges cover what the predicate keeps, no more, and its pairs are counted right."""

from __future__ import annotations

import itertools

import torch

from flashhopper.engine.mask import Mask

CPU = torch.device("cpu")
SIZES = (0, 1, 5, 9, 13)
WINDOWS = tuple(itertools.product((-1, 0, 1, 4, 30), (-1, 0, 2, 30)))


def dense(mask: Mask) -> list[list[bool]]:
    """The definition, written out."""
    rows = []
    for i in range(mask.seqlen_q):
        diagonal = i + mask.seqlen_k - mask.seqlen_q
        low = -(10**9) if mask.left < 0 else diagonal - mask.left
        high = 10**9 if mask.right < 0 else diagonal + mask.right
        rows.append([low <= j <= high for j in range(mask.seqlen_k)])
    return rows


def test_predicate_ranges_and_count() -> None:
    for seqlen_q, seqlen_k, (left, right) in itertools.product(SIZES, SIZES, WINDOWS):
        mask = Mask(seqlen_q, seqlen_k, left, right)
        expected = dense(mask)
        keep = mask.keep(0, seqlen_q, 0, seqlen_k, CPU)
        assert keep.tolist() == expected
        assert mask.kept() == sum(map(sum, expected))
        for begin in range(0, seqlen_q, 3):
            end = min(begin + 3, seqlen_q)
            seen = [j for j in range(seqlen_k) if any(row[j] for row in expected[begin:end])]
            by_all = [j for j in range(seqlen_k) if all(row[j] for row in expected[begin:end])]
            assert list(range(*mask.key_range(begin, end))) == seen
            assert list(range(*mask.unmasked_range(begin, end))) == by_all


def test_blocks_that_need_no_predicate_are_full() -> None:
    for seqlen_q, seqlen_k, (left, right) in itertools.product(SIZES, SIZES, WINDOWS):
        mask = Mask(seqlen_q, seqlen_k, left, right)
        for q_begin, k_begin in itertools.product(range(0, seqlen_q, 4), range(0, seqlen_k, 4)):
            block = (q_begin, min(q_begin + 4, seqlen_q), k_begin, min(k_begin + 4, seqlen_k))
            assert mask.needs_predicate(*block) == (not bool(mask.keep(*block, CPU).all()))
