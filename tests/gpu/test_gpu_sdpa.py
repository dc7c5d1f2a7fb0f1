"""torch's SDPA and varlen_attn served by the kernels through torch's registry: results and gradients bit for bit those
of flashhopper's own functions, compilation, and torch's own kernels after restoring.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_support import draw
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashhopper
from flashhopper import library
from flashhopper.integrations import sdpa

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
    # Some versions of torch warn, once a process, when their registry replaces an operator.
    pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning"),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that flashhopper served."""
    served: list[str] = []
    for name in ("dense_forward", "dense_backward", "varlen_forward", "varlen_backward"):
        original = getattr(library, name)

        def counted(*args: Any, name: str = name, original: Any = original) -> Any:
            served.append(name)
            return original(*args)

        monkeypatch.setattr(library, name, counted)
    return served


@pytest.fixture
def _active() -> Iterator[None]:
    sdpa.register()
    torch.nn.attention.activate_flash_attention_impl(sdpa.NAME)
    yield
    torch.nn.attention.restore_flash_attention_impl()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """SDPA on (batch, seqlen, heads, head_dim)."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        turned = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*turned, is_causal=causal, enable_gqa=True).transpose(1, 2)


def with_gradients(run: Any, inputs: tuple[torch.Tensor, ...], dout: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.usefixtures("_active")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 4), (128, 2), (72, 1)])
def test_sdpa(causal: bool, head_dim: int, kv_heads: int, calls: list[str]) -> None:
    inputs = draw(0, 2, 333, 333, 4, kv_heads, head_dim)
    dout = torch.randn_like(inputs[0])
    torch.use_deterministic_algorithms(True)
    try:
        actual = with_gradients(lambda q, k, v: attend(q, k, v, causal), inputs, dout)
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls == ["dense_forward", "dense_backward"]
    expected = with_gradients(
        lambda q, k, v: flashhopper.flash_attn_func(q, k, v, causal=causal, deterministic=True), inputs, dout
    )
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("_active")
def test_compiled(calls: list[str]) -> None:
    inputs = draw(0, 2, 333, 333, 4, 2, 64)
    dout = torch.randn_like(inputs[0])
    compiled = torch.compile(lambda q, k, v: attend(2 * q, k, v, True), fullgraph=True)
    actual = with_gradients(compiled, inputs, dout)
    assert set(calls) == {"dense_forward", "dense_backward"}
    expected = with_gradients(lambda q, k, v: flashhopper.flash_attn_func(2 * q, k, v, causal=True), inputs, dout)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("_active")
def test_heads_first_memory_and_autocast(calls: list[str]) -> None:
    """Contiguous (batch, heads, seqlen, head_dim) in float32, as many models have it."""
    q, k, v = (x.transpose(1, 2).float().contiguous() for x in draw(1, 2, 200, 200, 4, 4, 64))
    with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert calls == ["dense_forward"]
    assert out.is_contiguous()
    expected = flashhopper.flash_attn_func(*(x.bfloat16().transpose(1, 2) for x in (q, k, v)), causal=True)
    assert torch.equal(out.transpose(1, 2), expected)


@pytest.mark.usefixtures("_active")
def test_varlen_attn(calls: list[str]) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, k, v = (x[0] for x in draw(2, 1, 500, 500, 4, 4, 64))
    offsets = torch.tensor([0, 130, 131, 500], dtype=torch.int32, device="cuda")
    dout = torch.randn_like(q)
    scale = 64**-0.5
    lengths = (offsets, offsets, 369, 369)
    has_windows = "window_size" in inspect.signature(varlen.varlen_attn).parameters  # older torch: is_causal
    causal: dict[str, Any] = {"window_size": (-1, 0)} if has_windows else {"is_causal": True}
    actual = with_gradients(
        lambda q, k, v: varlen.varlen_attn(q, k, v, *lengths, scale=scale, **causal), (q, k, v), dout
    )
    assert calls == ["varlen_forward", "varlen_backward"]
    expected = with_gradients(
        lambda q, k, v: flashhopper.flash_attn_varlen_func(q, k, v, *lengths, scale, causal=True), (q, k, v), dout
    )
    assert torch.equal(actual[0], expected[0])
    for ours, theirs in zip(actual[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("_active")
def test_dropout_is_refused_by_name() -> None:
    q, k, v = (x.transpose(1, 2) for x in draw(3, 1, 64, 64, 2, 2, 64))
    with pytest.raises(ValueError, match=r"dropout_p is 0\.5"), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


def test_torch_s_own_kernels_after_restoring(calls: list[str]) -> None:
    inputs = draw(4, 1, 256, 256, 2, 2, 64)
    own = attend(*inputs, True)
    sdpa.register()
    torch.nn.attention.activate_flash_attention_impl(sdpa.NAME)
    ours = attend(*inputs, True)
    torch.nn.attention.restore_flash_attention_impl()
    assert calls == ["dense_forward"]
    assert torch.equal(attend(*inputs, True), own)
    assert calls == ["dense_forward"]
    torch.testing.assert_close(ours, own, rtol=2e-2, atol=2e-2)
