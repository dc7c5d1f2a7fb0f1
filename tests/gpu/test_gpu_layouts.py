"""Memory layouts: views of fused projections, transposes, expanded heads, gaps, odd strides, misaligned storage."""

from __future__ import annotations

import pytest
import torch
from gpu_support import assert_attends, assert_equal_bits, draw, judge, launch, poisoned_forward

import flashhopper

MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
HEAD_DIM = pytest.mark.parametrize("head_dim", [64, 128, 256])


@MASKS
@HEAD_DIM
def test_bhsd_views(head_dim: int, causal: bool) -> None:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw(1, 2, 200, 300, 4, 2, head_dim))
    assert_attends(q, k, v, causal)


@MASKS
@HEAD_DIM
def test_fused_qkv_views(head_dim: int, causal: bool) -> None:
    qkv = torch.randn(
        2, 300, 3, 4, head_dim, device="cuda", generator=torch.Generator("cuda").manual_seed(2)
    ).bfloat16()
    assert_attends(*qkv.unbind(2), causal)
    interleaved = qkv.transpose(2, 3).contiguous()  # (B, S, H, 3, D): heads stride 3 D
    assert_attends(*(interleaved[:, :, :, i] for i in range(3)), causal)


@MASKS
def test_fused_gqa_views(causal: bool) -> None:
    fused = torch.randn(2, 300, 8 + 2 * 2, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(3)).half()
    q, k, v = fused[:, :, :8], fused[:, :, 8:10], fused[:, :, 10:]
    assert_attends(q, k, v, causal)
    out = flashhopper.flash_attn_qkvpacked_func(fused, causal=causal, num_heads_q=8)
    assert_equal_bits(out, flashhopper.flash_attn_func(q, k, v, causal=causal))


@MASKS
def test_qkvpacked(causal: bool) -> None:
    qkv = torch.randn(2, 300, 3, 4, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(4)).bfloat16()
    out = flashhopper.flash_attn_qkvpacked_func(qkv, causal=causal)
    assert_equal_bits(out, flashhopper.flash_attn_func(*qkv.unbind(2), causal=causal))


@MASKS
def test_expanded_keys(causal: bool) -> None:
    """K and V of one head or one batch entry expanded with stride 0."""
    q, k, v = draw(5, 3, 200, 300, 8, 8, 128)
    heads = [x[:, :, :1].expand(-1, -1, 8, -1) for x in (k, v)]
    batch = [x[:1].expand(3, -1, -1, -1) for x in (k, v)]
    for keys, values in (heads, batch):
        out, lse = flashhopper.flash_attn_func(q, keys, values, causal=causal, return_lse=True)
        problem = judge(out, lse, q, keys, values, causal).problem()
        assert problem is None, problem
        copied, _ = poisoned_forward(q, keys.contiguous(), values.contiguous(), causal)
        assert_equal_bits(out, copied)


@MASKS
def test_expanded_queries(causal: bool) -> None:
    q, k, v = draw(6, 2, 200, 300, 8, 2, 128)
    q = q[:, :1].expand(-1, 200, -1, -1)
    out = flashhopper.flash_attn_func(q, k, v, causal=causal)
    assert judge(out, None, q, k, v, causal).problem() is None


@MASKS
def test_large_row_stride(causal: bool) -> None:
    """Rows 9728 elements apart, as slices of a wide projection."""
    wide = torch.randn(2, 300, 9728, device="cuda", generator=torch.Generator("cuda").manual_seed(7)).bfloat16()
    q = wide[..., :1024].view(2, 300, 8, 128)
    k, v = (wide[..., at : at + 256].view(2, 300, 2, 128) for at in (4096, 8192))
    assert_attends(q, k, v, causal)


@MASKS
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
@pytest.mark.parametrize(("gap", "offset"), [(1, 0), (4, 0), (8, 0), (0, 1), (0, 4), (3, 5)])
def test_odd_strides_and_alignment(gap: int, offset: int, head_dim: int, causal: bool) -> None:
    """Strides and addresses that are no multiple of 16 bytes: TMA cannot read them, the caller must not notice."""

    def misplaced(x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:3], x.size(3) + gap)
        store = x.new_full((x.numel() // x.size(3) * shape[3] + offset,), float("nan"))
        view = store[offset:].view(shape)[..., : x.size(3)]
        view.copy_(x)
        return view

    q, k, v = draw(8, 2, 150, 190, 4, 2, head_dim)
    out, lse = flashhopper.flash_attn_func(*map(misplaced, (q, k, v)), causal=causal, return_lse=True)
    expected, expected_lse = poisoned_forward(q, k, v, causal)
    assert_equal_bits(out, expected)
    assert_equal_bits(lse, expected_lse)


def test_last_dimension_not_contiguous() -> None:
    """Documented: the last dimension is contiguous. Anything else is refused by name or computed right, never wrong."""
    q, k, v = draw(9, 2, 150, 190, 4, 2, 64)
    strided = k.transpose(2, 3).contiguous().transpose(2, 3)
    assert strided.stride(3) != 1
    try:
        out = flashhopper.flash_attn_func(q, strided, v)
    except ValueError as error:
        assert "k" in str(error)  # noqa: PT017
    else:
        assert_equal_bits(out, flashhopper.flash_attn_func(q, k, v))


@MASKS
@HEAD_DIM
def test_output_strides(head_dim: int, causal: bool) -> None:
    """The C ABI writes into any layout, and nowhere else."""
    q, k, v = draw(10, 2, 200, 300, 4, 2, head_dim)
    expected, _ = poisoned_forward(q, k, v, causal)
    lse = torch.empty(2, 4, 200, device="cuda")
    for build in (
        lambda: torch.full((2, 4, 200, head_dim), float("nan"), device="cuda", dtype=q.dtype).transpose(1, 2),
        lambda: torch.full((2, 204, 5, head_dim + 8), float("nan"), device="cuda", dtype=q.dtype)[
            :, 2:202, :4, :head_dim
        ],
    ):
        out = build()
        launch(q, k, v, out, lse, causal)
        assert_equal_bits(out, expected)
        if out._base is not None and out._base.numel() > out.numel():
            assert out._base.isfinite().sum().item() == out.numel(), "wrote outside the view"


def test_singleton_dimensions_with_strange_strides() -> None:
    """A dimension of extent 1 may carry any stride, 0 and 1 included."""
    q, k, v = draw(11, 1, 130, 130, 1, 1, 128)
    expected = flashhopper.flash_attn_func(q, k, v)
    strange = [
        x.as_strided(x.shape, (strides, 128, strides, 1)) for x, strides in zip((q, k, v), (0, 1, 7), strict=True)
    ]
    assert_equal_bits(flashhopper.flash_attn_func(*strange), expected)
    row = [x[:, :1] for x in strange]
    assert flashhopper.flash_attn_func(*row).shape == (1, 1, 1, 128)
