"""Padded batches as packed sequences, against each row on its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashhopper import flash_attn_func
from flashhopper.integrations import padding


def _mask(runs: list[tuple[int, int]], seqlen: int) -> torch.Tensor:
    positions = torch.arange(seqlen)
    return torch.stack([(positions >= begin) & (positions < end) for begin, end in runs])


@st.composite
def _batches(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, int]:
    seqlen_k = draw(st.integers(1, 9))
    seqlen_q = draw(st.integers(1, seqlen_k))
    run = st.tuples(st.integers(0, seqlen_k), st.integers(0, seqlen_k)).map(lambda ends: (min(ends), max(ends)))
    return draw(st.lists(run, min_size=1, max_size=4)), seqlen_q, seqlen_k


@settings(deadline=None)
@given(_batches(), st.booleans(), st.booleans())
def test_each_row_is_attention_of_its_own_tokens(
    batch: tuple[list[tuple[int, int]], int, int], aligned: bool, causal: bool
) -> None:
    runs, seqlen_q, seqlen_k = batch
    causal = causal and aligned
    shift = seqlen_k - seqlen_q
    q = torch.randn(len(runs), seqlen_q, 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, len(runs), seqlen_k, 2, 8, dtype=torch.float64)
    mask = _mask(runs, seqlen_k)
    hidden = ~mask[..., None, None]
    expected = torch.zeros_like(q)
    for b, (begin, end) in enumerate(runs):
        rows = slice(max(begin - shift, 0), max(end - shift, 0)) if aligned else slice(0, seqlen_q)
        expected[b : b + 1, rows] = flash_attn_func(
            q[b : b + 1, rows], k[b : b + 1, begin:end], v[b : b + 1, begin:end], causal=causal
        )
    packing = padding.pack_padded(mask, seqlen_q, aligned)
    if packing is None:
        assert mask.all()
        return
    poisoned = (x.masked_fill(hidden, float("nan")) for x in (k, v))
    out = padding.attend(q, *poisoned, packing, causal=causal)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_gaps_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"attention_mask has zeros between ones.*arbitrary masks are refused"):
        padding.pack_padded(torch.tensor([[True, True, True], [True, False, True]]), 3, True)


def test_sequence_ids() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0], [0, 1, 2, 2, 0]], dtype=torch.int32)
    packing = padding.pack_sequence_ids(ids)
    assert packing.cu_seqlens_q.tolist() == [0, 2, 5, 10, 11, 12, 14, 15]
    q = torch.randn(3, 5, 2, 8, dtype=torch.float64)
    out = padding.attend(q, q, q, packing, causal=True, window_size=(1, 0))
    for b, begin, end in [(0, 0, 2), (0, 2, 5), (1, 0, 5), (2, 0, 1), (2, 1, 2), (2, 2, 4), (2, 4, 5)]:
        row = q[b : b + 1, begin:end]
        alone = flash_attn_func(row, row, row, causal=True, window_size=(1, 0))
        torch.testing.assert_close(out[b : b + 1, begin:end], alone)


def test_a_mask_is_read_once_until_it_changes() -> None:
    mask = _mask([(1, 4), (0, 4)], 4)
    made = []

    def make() -> padding.Packing | None:
        made.append(mask.clone())
        return padding.pack_padded(mask, 4, True)

    first = padding.remember(mask, "a", make)
    assert padding.remember(mask, "a", make) is first
    assert padding.remember(mask, "b", make) is not first
    assert len(made) == 2
    mask[0, 1] = False
    changed = padding.remember(mask, "a", make)
    assert changed is not None
    assert first is not None
    assert changed.seqused_k is not None
    assert changed.seqused_k.tolist() == [0, 2, 0, 4]
    assert len(made) == 3
