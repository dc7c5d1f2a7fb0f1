"""The stand-in for FlashAttention-3's module: its signatures, and each function against ours."""

import importlib
import inspect
import sys
from collections.abc import Iterator

import pytest
import torch

import flashhopper
from flashhopper.compat import flash_attn_interface as fa3

_DESCALES = "q_descale=None, k_descale=None, v_descale=None"
_WINDOW = "window_size=(-1, -1), attention_chunk=0"
_PACKING = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None"
_TUNING = "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
# Parameters and defaults of the functions in fa3-fwd 0.0.3 (PyPI), read from its source with ast.
SIGNATURES = {
    "flash_attn_func": (
        f"q, k, v, softmax_scale=None, causal=False, qv=None, {_DESCALES}, {_WINDOW}, softcap=0.0, {_TUNING}"
    ),
    "flash_attn_varlen_func": (
        f"q, k, v, {_PACKING}, softmax_scale=None, causal=False, qv=None, {_DESCALES}, {_WINDOW}, softcap=0.0, "
        f"{_TUNING}"
    ),
    "flash_attn_qkvpacked_func": (
        f"qkv, softmax_scale=None, causal=False, {_DESCALES}, {_WINDOW}, softcap=0.0, deterministic=False, "
        "num_heads_q=None, sm_margin=0, return_attn_probs=False"
    ),
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        f"max_seqlen_q=None, rotary_seqlens=None, {_DESCALES}, softmax_scale=None, causal=False, {_WINDOW}, "
        "softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
        "return_softmax_lse=False"
    ),
    "get_scheduler_metadata": (
        "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
        "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, "
        f"page_size=None, max_seqlen_k_new=0, causal=False, {_WINDOW}, has_softcap=False, num_splits=0, pack_gqa=None, "
        "sm_margin=0"
    ),
}


def tensors(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(fa3, name)).parameters.values()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    shown = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
    assert shown == SIGNATURES[name]


def test_dense() -> None:
    q, k, v = tensors(2, 7, 4, 8), tensors(2, 9, 2, 8, seed=1), tensors(2, 9, 2, 8, seed=2)
    expected = flashhopper.flash_attn_func(q, k, v, 0.3, True, (4, 0), 1.5, return_lse=True)
    actual = fa3.flash_attn_func(
        q, k, v, 0.3, True, None, None, None, None, (4, 0), 0, 1.5, 1, None, True, 0, return_attn_probs=True
    )
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(fa3.flash_attn_func(q, k, v), flashhopper.flash_attn_func(q, k, v))


def test_packed() -> None:
    q, k = tensors(9, 4, 8), tensors(11, 2, 8, seed=1)
    cu_q, cu_k = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 6, 11], dtype=torch.int32)
    used_q, used_k = torch.tensor([4, 3], dtype=torch.int32), torch.tensor([5, 5], dtype=torch.int32)
    lengths = (cu_q, cu_k, 5, 6)
    expected = flashhopper.flash_attn_varlen_func(
        q, k, k, *lengths, 0.3, True, seqused_q=used_q, seqused_k=used_k, return_lse=True
    )
    actual = fa3.flash_attn_varlen_func(q, k, k, *lengths, used_q, used_k, 0.3, True, return_attn_probs=True)
    torch.testing.assert_close(actual, expected)


def test_fused() -> None:
    qkv = tensors(2, 7, 8, 8)
    expected = flashhopper.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4)
    torch.testing.assert_close(fa3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4), expected)


def test_8_bits() -> None:
    q, k, v = (tensors(1, 130, 2, 64, seed=seed).to(torch.float8_e4m3fn) for seed in range(3))
    descales = [torch.full((1, 2), 0.5 + side) for side in range(3)]
    expected = flashhopper.flash_attn_fp8_func(q, k, v, *descales, causal=True, return_lse=True)
    actual = fa3.flash_attn_func(q, k, v, None, True, None, *descales, return_attn_probs=True)
    torch.testing.assert_close(actual, expected)
    assert actual[0].dtype == torch.bfloat16
    unscaled = fa3.flash_attn_func(q, k, v, v_descale=descales[2])
    torch.testing.assert_close(unscaled, flashhopper.flash_attn_fp8_func(q, k, v, None, None, descales[2], scales=1.0))


def test_combine() -> None:
    """Parts of the keys, in the module's own layout, are the whole."""
    q, k, v = tensors(2, 5, 4, 8), tensors(2, 9, 4, 8, seed=1), tensors(2, 9, 4, 8, seed=2)
    parts = [flashhopper.flash_attn_func(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 4), slice(4, 9))]
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse.transpose(1, 2) for _, lse in parts])
    expected, expected_lse = flashhopper.flash_attn_func(q, k, v, return_lse=True)
    out, lse = fa3.flash_attn_combine(outs, lses, out_dtype=torch.float32)
    torch.testing.assert_close(out, expected.float())
    torch.testing.assert_close(lse, expected_lse.transpose(1, 2))
    written = torch.full_like(expected, float("nan"))
    assert fa3.flash_attn_combine(outs, lses, written)[0] is written
    torch.testing.assert_close(written, expected)


@pytest.mark.parametrize("name", ["qv", "attention_chunk", "q_descale", "k_descale", "v_descale"])
def test_what_is_missing_is_refused_by_name(name: str) -> None:
    q = tensors(1, 4, 2, 8)
    value = 128 if name == "attention_chunk" else q
    with pytest.raises(NotImplementedError, match=f"{name} is .*not available in this version"):
        fa3.flash_attn_func(q, q, q, **{name: value})
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=name):
        fa3.flash_attn_varlen_func(q[0], q[0], q[0], offsets, offsets, 4, 4, **{name: value})


def test_functions_of_a_cache_are_refused_by_name() -> None:
    q = tensors(1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match=r"flash_attn_with_kvcache .*seqused_k"):
        fa3.flash_attn_with_kvcache(q, q, q)
    with pytest.raises(NotImplementedError, match="get_scheduler_metadata"):
        fa3.get_scheduler_metadata(1, 4, 4, 2, 2, 8, torch.zeros(1, dtype=torch.int32))


@pytest.fixture
def _no_module() -> Iterator[None]:
    saved = sys.modules.pop("flash_attn_interface", None)
    yield
    sys.modules.pop("flash_attn_interface", None)
    if saved is not None:
        sys.modules["flash_attn_interface"] = saved


@pytest.mark.usefixtures("_no_module")
def test_install() -> None:
    fa3.install()
    fa3.install()
    assert importlib.import_module("flash_attn_interface") is fa3
    sys.modules["flash_attn_interface"] = importlib.import_module("json")
    with pytest.raises(RuntimeError, match="already imported from"):
        fa3.install()
