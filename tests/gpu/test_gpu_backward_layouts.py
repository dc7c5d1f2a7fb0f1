"""Memory layouts in the backward pass: views of fused projections, transposes, expanded inputs and upstream gradients,
gaps, odd strides, misaligned storage. Nothing outside a view may be read into a result.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_support import (
    NAN,
    assert_equal_bits,
    assert_gradients,
    draw,
    draw_dout,
    gradients,
    judge_gradients,
    poison_free_memory,
)

import flashhopper

pytestmark = pytest.mark.usefixtures("hopper_gradients")
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
HEAD_DIM = pytest.mark.parametrize("head_dim", [64, 128, 256])


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """(B, S, H, D) as a transpose of (B, H, S, D)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _misplaced(x: torch.Tensor, gap: int, offset: int) -> torch.Tensor:
    """Rows `gap` elements apart, `offset` elements into their storage, NaN around."""
    shape = (*x.shape[:3], x.size(3) + gap)
    store = x.new_full((x.numel() // x.size(3) * shape[3] + offset,), NAN)
    view = store[offset:].view(shape)[..., : x.size(3)]
    view.copy_(x)
    return view


@MASKS
@HEAD_DIM
def test_bhsd_views(head_dim: int, causal: bool) -> None:
    q, k, v = draw(1, 2, 200, 300, 4, 2, head_dim)
    dout = draw_dout(1, q, v)
    expected = gradients(q, k, v, dout, causal, deterministic=True)
    found = gradients(*map(_heads_first, (q, k, v)), _heads_first(dout), causal, deterministic=True)
    for mine, right in zip(found, expected, strict=True):
        assert_equal_bits(mine, right)
    assert judge_gradients(found, q, k, v, dout, causal) is None


@MASKS
@HEAD_DIM
def test_fused_qkv(head_dim: int, causal: bool) -> None:
    """The gradient of a packed tensor is that of its three slices, through views and through the packed function."""
    generator = torch.Generator("cuda").manual_seed(2)
    qkv = torch.randn(2, 300, 3, 4, head_dim, device="cuda", generator=generator).bfloat16().requires_grad_()
    parts = [x.detach().contiguous() for x in qkv.unbind(2)]
    dout = draw_dout(2, parts[0], parts[2])
    expected = torch.stack(gradients(*parts, dout, causal, deterministic=True), 2)
    for attend in (
        lambda: flashhopper.flash_attn_func(*qkv.unbind(2), causal=causal, deterministic=True),
        lambda: flashhopper.flash_attn_qkvpacked_func(qkv, causal=causal, deterministic=True),
    ):
        out = attend()
        poison_free_memory()
        (found,) = torch.autograd.grad(out, qkv, dout)
        assert_equal_bits(found, expected)


@MASKS
def test_fused_gqa(causal: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    fused = torch.randn(2, 300, 8 + 2 * 2, 128, device="cuda", generator=generator).half().requires_grad_()
    q, k, v = (x.detach() for x in (fused[:, :, :8], fused[:, :, 8:10], fused[:, :, 10:]))
    dout = draw_dout(3, q, v)
    out = flashhopper.flash_attn_qkvpacked_func(fused, causal=causal, num_heads_q=8, deterministic=True)
    (found,) = torch.autograd.grad(out, fused, dout)
    assert_equal_bits(found, torch.cat(gradients(q, k, v, dout, causal, deterministic=True), 2))
    assert judge_gradients(found.split((8, 2, 2), 2), q, k, v, dout, causal) is None


@MASKS
@HEAD_DIM
def test_interleaved_qkv(head_dim: int, causal: bool) -> None:
    """(B, S, H, 3, D): heads 3 D apart."""
    generator = torch.Generator("cuda").manual_seed(4)
    store = torch.randn(2, 300, 4, 3, head_dim, device="cuda", generator=generator).bfloat16()
    q, k, v = store.unbind(3)
    assert_gradients(q, k, v, draw_dout(4, q, v), causal)


def _sum(out: torch.Tensor) -> torch.Tensor:
    return out.sum()


def _mean_over_batch(out: torch.Tensor) -> torch.Tensor:
    return (out.mean(0) * torch.linspace(-1, 1, out[0].numel(), device="cuda").view(out.shape[1:]).to(out.dtype)).sum()


def _one_row(out: torch.Tensor) -> torch.Tensor:
    return out[:, -1].float().square().sum()


def _transposed(out: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.transpose(1, 2).shape)
    return (out.transpose(1, 2) * weight).sum()


@MASKS
@HEAD_DIM
@pytest.mark.parametrize("loss", [_sum, _mean_over_batch, _one_row, _transposed])
def test_losses_whose_gradient_is_no_plain_tensor(
    loss: Callable[[torch.Tensor], torch.Tensor], head_dim: int, causal: bool
) -> None:
    """out.sum().backward() hands the backward one number with strides of 0; others a batch stride of 0, or the strides
    of a transpose."""
    tensors = draw(5, 3, 200, 260, 4, 2, head_dim)
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = flashhopper.flash_attn_func(*leaves, causal=causal)
    seen: list[torch.Tensor] = []
    out.register_hook(seen.append)
    value = loss(out)
    poison_free_memory()
    value.backward()
    assert len(seen) == 1
    found = [x.grad for x in leaves]
    problem = judge_gradients(found, *tensors, seen[0], causal)  # type: ignore[arg-type]
    assert problem is None, f"dout strides {seen[0].stride()}: {problem}"


@MASKS
@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (0, 1, 2), (3,), (0, 1, 2, 3)])
def test_expanded_upstream_gradient(dims: tuple[int, ...], causal: bool) -> None:
    q, k, v = draw(6, 3, 200, 300, 4, 2, 128)
    full = draw_dout(6, q, v)
    index = tuple(slice(0, 1) if dim in dims else slice(None) for dim in range(4))
    dout = full[index].expand_as(full)
    found = gradients(q, k, v, dout, causal, deterministic=True)
    for mine, right in zip(found, gradients(q, k, v, dout.contiguous(), causal, deterministic=True), strict=True):
        assert_equal_bits(mine, right)
    problem = judge_gradients(found, q, k, v, dout, causal)
    assert problem is None, problem


@MASKS
def test_expanded_keys(causal: bool) -> None:
    """K and V of one head or one batch entry expanded with stride 0: each copy has a gradient, autograd sums them."""
    q, k, v = draw(7, 3, 200, 300, 8, 8, 128)
    dout = draw_dout(7, q, v)
    for shape in ((3, 300, 1, 128), (1, 300, 8, 128)):
        small = [x[: shape[0], :, : shape[2]].clone().requires_grad_() for x in (k, v)]
        keys, values = (x.expand(3, 300, 8, 128) for x in small)
        assert_gradients(q, keys, values, dout, causal)
        expected = gradients(q, keys.detach().contiguous(), values.detach().contiguous(), dout, causal)
        out = flashhopper.flash_attn_func(q, keys, values, causal=causal)
        for mine, right in zip(torch.autograd.grad(out, small, dout), expected[1:], strict=True):
            assert mine.shape == shape
            total = right.float().sum_to_size(shape)
            assert (mine.float() - total).abs().max().item() <= 2e-2 * total.abs().max().item()


@MASKS
def test_expanded_queries(causal: bool) -> None:
    q, k, v = draw(8, 2, 200, 300, 8, 2, 128)
    dout = draw_dout(8, q, v)
    assert_gradients(q[:, :1].expand(-1, 200, -1, -1), k, v, dout, causal)
    assert_gradients(q[:1].expand(2, -1, -1, -1), k, v, dout, causal)


@MASKS
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
@pytest.mark.parametrize(("gap", "offset"), [(1, 0), (4, 0), (8, 0), (0, 1), (0, 4), (3, 5)])
def test_odd_strides_and_alignment(gap: int, offset: int, head_dim: int, causal: bool) -> None:
    """Strides and addresses that are no multiple of 16 bytes: TMA cannot read them, the caller must not notice."""
    q, k, v = draw(9, 2, 150, 190, 4, 2, head_dim)
    dout = draw_dout(9, q, v)
    expected = gradients(q, k, v, dout, causal, deterministic=True)
    misplaced = [_misplaced(x, gap, offset) for x in (q, k, v, dout)]
    for tensors in (misplaced, [*misplaced[:3], dout], [q, k, v, misplaced[3]]):
        for mine, right in zip(gradients(*tensors, causal, deterministic=True), expected, strict=True):
            assert_equal_bits(mine, right)
    assert judge_gradients(expected, q, k, v, dout, causal) is None


@MASKS
def test_upstream_gradient_whose_last_dimension_is_strided(causal: bool) -> None:
    q, k, v = draw(10, 2, 150, 190, 4, 2, 128)
    dout = draw_dout(10, q, v)
    strided = dout.transpose(1, 3).contiguous().transpose(1, 3)
    assert strided.stride(3) != 1
    expected = gradients(q, k, v, dout, causal, deterministic=True)
    for mine, right in zip(gradients(q, k, v, strided, causal, deterministic=True), expected, strict=True):
        assert_equal_bits(mine, right)


@MASKS
@HEAD_DIM
@pytest.mark.parametrize("poison", [NAN, float("inf"), 6e4])
def test_what_lies_behind_the_tensors_does_not_matter(poison: float, head_dim: int, causal: bool) -> None:
    """Memory before the first and behind the last row of each input never reaches a gradient."""
    q, k, v = draw(11, 2, 130, 77, 4, 2, head_dim)
    dout = draw_dout(11, q, v)
    expected = gradients(q, k, v, dout, causal, deterministic=True)
    views = []
    for x in (q, k, v, dout):
        store = x.new_full((x.size(0), x.size(1) + 300, *x.shape[2:]), poison)
        view = store[:, 100 : 100 + x.size(1)]
        view.copy_(x)
        views.append(view)
    for mine, right in zip(gradients(*views, causal, deterministic=True), expected, strict=True):
        assert_equal_bits(mine, right)


def test_singleton_dimensions_with_strange_strides() -> None:
    """A dimension of extent 1 may carry any stride, 0 and 1 included."""
    q, k, v = draw(12, 1, 130, 130, 1, 1, 128)
    dout = draw_dout(12, q, v)
    expected = gradients(q, k, v, dout, False, deterministic=True)
    strange = [
        x.as_strided(x.shape, (stride, 128, stride, 1)) for x, stride in zip((q, k, v, dout), (0, 1, 7, 3), strict=True)
    ]
    for mine, right in zip(gradients(*strange, False, deterministic=True), expected, strict=True):
        assert_equal_bits(mine, right)
