"""The flash operators of torch's SDPA served by flashhopper, here registered for CPU tensors: torch's own dispatcher
and autograd around the tiled engine. tests/gpu has the same on a GPU, through SDPA.
"""

from collections.abc import Iterator

import pytest
import torch

import flashhopper
from flashhopper.integrations import sdpa

aten = torch.ops.aten
needs_registry = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="this torch has no registry"
)


@pytest.fixture
def _active() -> Iterator[None]:
    handle = sdpa.activate("CPU")
    yield
    handle.remove()


def tensors(*shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_()


@needs_registry
def test_registry() -> None:
    attention = torch.nn.attention
    sdpa.register()
    sdpa.register()
    assert sdpa.NAME in attention.list_flash_attention_impls()
    attention.activate_flash_attention_impl(sdpa.NAME)
    assert attention.current_flash_attention_impl() == sdpa.NAME
    attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None


def test_a_torch_without_the_registry_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl", raising=False)
    with pytest.raises(RuntimeError, match=r"has no torch\.nn\.attention\.register_flash_attention_impl"):
        sdpa.register()


@pytest.mark.usefixtures("_active")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
def test_dense(causal: bool, layout: str) -> None:
    shapes = [(2, 4, 9, 16), (2, 2, 9, 16), (2, 2, 9, 16)]
    if layout == "heads first":
        q, k, v = (tensors(*shape, seed=i) for i, shape in enumerate(shapes))
        inputs = (q, k, v)
    else:
        q, k, v = (tensors(b, s, h, d, seed=i) for i, (b, h, s, d) in enumerate(shapes))
        inputs = tuple(x.transpose(1, 2) for x in (q, k, v))
    out, lse, *rest = aten._scaled_dot_product_flash_attention(*inputs, 0.0, causal, scale=0.3)
    expected, expected_lse = flashhopper.flash_attn_func(
        *(x.transpose(1, 2) for x in inputs), 0.3, causal, return_lse=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2))
    torch.testing.assert_close(lse, expected_lse)
    assert rest[2:4] == [9, 9]
    dout = torch.randn_like(out)
    actual = torch.autograd.grad(out, (q, k, v), dout)
    torch.testing.assert_close(actual, torch.autograd.grad(expected.transpose(1, 2), (q, k, v), dout))
    promised = aten._scaled_dot_product_flash_attention(*(x.detach().to("meta") for x in inputs), 0.0, causal)
    assert out.stride() == promised[0].stride()
    assert (lse.shape, lse.dtype) == (promised[1].shape, promised[1].dtype)


@pytest.mark.usefixtures("_active")
def test_gradients_have_the_promised_strides() -> None:
    q = tensors(2, 4, 9, 16).detach()
    out, lse, _, _, longest, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, q, q)
    arguments = (q, q, q, q, out, lse, None, None, longest, longest, 0.0, False, seed, offset)
    for gradient in aten._scaled_dot_product_flash_attention_backward(*arguments):
        assert gradient.stride() == q.stride()


@pytest.mark.usefixtures("_active")
@pytest.mark.parametrize("window", [(None, None), (3, 0), (2, 2)])
def test_packed(window: tuple[int | None, int | None]) -> None:
    q, k, v = tensors(11, 4, 16), tensors(13, 2, 16, seed=1), tensors(13, 2, 16, seed=2)
    cu_q, cu_k = torch.tensor([0, 4, 11], dtype=torch.int32), torch.tensor([0, 5, 13], dtype=torch.int32)
    sides = dict(zip(("window_size_left", "window_size_right"), window, strict=True))
    causal = window == (3, 0)
    out, lse, *_ = aten._flash_attention_forward(q, k, v, cu_q, cu_k, 7, 8, 0.0, causal, False, **sides)
    expected, expected_lse = flashhopper.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 7, 8, None, causal, tuple(-1 if x is None else x for x in window), return_lse=True
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    dout = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout)
    )


@pytest.mark.usefixtures("_active")
def test_used_lengths_and_a_given_output() -> None:
    if not hasattr(aten, "_flash_attention_forward_no_dropout_inplace"):
        pytest.skip("this torch has no such operator")
    q, k = tensors(11, 4, 16).detach(), tensors(13, 2, 16, seed=1).detach()
    cu_q, cu_k = torch.tensor([0, 4, 11], dtype=torch.int32), torch.tensor([0, 5, 13], dtype=torch.int32)
    used = torch.tensor([5, 2], dtype=torch.int32)
    out = torch.full_like(q, float("nan"))
    arguments = (q, k, k, cu_q, cu_k, 7, 8, 0.0, False, False)
    lse = aten._flash_attention_forward_no_dropout_inplace(out, *arguments, seqused_k=used)
    expected, expected_lse = flashhopper.flash_attn_varlen_func(
        q, k, k, cu_q, cu_k, 7, 8, seqused_k=used, return_lse=True
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.usefixtures("_active")
def test_refusals_by_name() -> None:
    q = tensors(1, 2, 5, 16).detach()
    with pytest.raises(ValueError, match=r"dropout_p is 0\.1, which flashhopper does not have"):
        aten._scaled_dot_product_flash_attention(q, q, q, 0.1)
    with pytest.raises(ValueError, match="return_debug_mask is True"):
        aten._scaled_dot_product_flash_attention(q, q, q, 0.0, False, True)
    slopes = torch.ones(2)
    with pytest.raises(ValueError, match=r"alibi_slopes is a tensor \(2,\)"):
        aten._flash_attention_forward(q, q, q, None, None, 2, 2, 0.0, False, False, alibi_slopes=slopes)


def test_removed_operators_are_torch_s_own_again() -> None:
    q = tensors(1, 2, 5, 16).detach()
    handle = sdpa.activate("CPU")
    aten._scaled_dot_product_flash_attention(q, q, q)
    handle.remove()
    handle.remove()
    with pytest.raises(NotImplementedError, match="_scaled_dot_product_flash_attention"):
        aten._scaled_dot_product_flash_attention(q, q, q)
