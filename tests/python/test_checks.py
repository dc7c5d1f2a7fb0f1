"""Bad arguments: every message names the argument, its value, the rule and the way out; the same under fake tensors."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashhopper as fh


def qkv(heads: int = 8, kv_heads: int = 8, dim: int = 16) -> dict[str, torch.Tensor]:
    return {
        "q": torch.randn(2, 5, heads, dim),
        "k": torch.randn(2, 7, kv_heads, dim),
        "v": torch.randn(2, 7, kv_heads, dim),
    }


def name_case(value: object) -> str:
    """A case is named after its message, or the arguments that it changes."""
    return value[:50] if isinstance(value, str) else "+".join(value)


def packed() -> dict[str, object]:
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    tokens = {name: torch.randn(7, 2, 8) for name in "qkv"}
    return {**tokens, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 4, "max_seqlen_k": 4}


TENSOR_CASES = [
    (
        {"k": torch.randn(2, 7, 6, 16), "v": torch.randn(2, 7, 6, 16)},
        "k has 6 heads, q has 8: heads_q must be a multiple",
    ),
    (
        {"k": torch.randn(2, 7, 0, 16), "v": torch.randn(2, 7, 0, 16)},
        "k has 0 heads, q has 8: heads_q must be a multiple",
    ),
    ({"v": torch.randn(2, 7, 4, 16)}, "v has 4 heads, k has 8: must be equal"),
    ({"v": torch.randn(2, 6, 8, 16)}, "v has seqlen 6, k has 7: must be equal (dimension 1)"),
    ({"k": torch.randn(3, 7, 8, 16)}, "q, k, v have batch sizes 2, 3, 2: must be equal"),
    ({"k": torch.randn(2, 7, 8, 32)}, "k has head_dim 32, q has 16: must be equal (only v's head_dim may differ)"),
    ({"q": torch.randn(5, 8, 16)}, "q has shape (5, 8, 16): must have 4 dimensions, (batch, seqlen, heads, head_dim)"),
    ({"v": torch.randn(2, 7, 8)}, "v has shape (2, 7, 8): must have 4 dimensions"),
    (
        {"k": torch.randn(2, 7, 8, 16).half()},
        "q, k, v have dtypes torch.float32, torch.float16, torch.float32: must be equal; cast",
    ),
    ({"q": torch.randn(2, 5, 8, 0), "k": torch.randn(2, 7, 8, 0)}, "q has head_dim 0: must be at least 1"),
    ({"k": torch.randn(2, 7, 8, 16, device="meta")}, "q, k, v are on cpu, meta, cpu: must be on one device"),
    ({"sink": torch.randn(7)}, "sink has shape (7,): must be (8,), one logit per query head"),
    ({"sink": torch.zeros(8, dtype=torch.int32)}, "sink has dtype torch.int32: must be a floating-point dtype"),
    ({"sink": torch.randn(8, device="meta")}, "sink is on meta, q on cpu"),
]
SCALAR_CASES = [
    ({"window_size": (-2, 0)}, "window_size is (-2, 0): each side must be 0 or more, or -1 for unbounded"),
    ({"window_size": 128}, "window_size is 128: must be a pair (left, right)"),
    ({"softcap": -1.0}, "softcap is -1.0: must be 0 or more; 0.0 turns it off"),
    ({"softcap": math.inf}, "softcap is inf: must be finite"),
    ({"softmax_scale": math.nan}, "softmax_scale is nan: must be finite; None takes 1 / sqrt(head_dim)"),
    ({"softmax_scale": torch.tensor(1.0)}, "softmax_scale is a Tensor: must be a Python float"),
    ({"sm_margin": -1}, "sm_margin is -1: must be 0 or more"),
    ({"sink": 1.0}, "sink is a float: must be a tensor of shape (8,)"),
    ({"k": None}, "k is a NoneType: must be a torch.Tensor of shape (batch, seqlen, heads, head_dim)"),
    ({"q": [1.0]}, "q is a list: must be a torch.Tensor"),
]


@pytest.mark.parametrize(("change", "message"), TENSOR_CASES + SCALAR_CASES, ids=name_case)
def test_dense(change: dict[str, object], message: str) -> None:
    arguments = {**qkv(), **change}
    for function in (fh.flash_attn_func, fh.explain):
        with pytest.raises(ValueError, match=re.escape(message)):
            function(**arguments)


@pytest.mark.parametrize(("change", "message"), TENSOR_CASES, ids=name_case)
def test_dense_under_fake_tensors(change: dict[str, torch.Tensor], message: str) -> None:
    mode = FakeTensorMode()
    arguments = {name: mode.from_tensor(x) for name, x in {**qkv(), **change}.items()}
    with mode, pytest.raises(ValueError, match=re.escape(message)):
        fh.flash_attn_func(**arguments)
    rest = (arguments.get("sink"), 0.25, -1, -1, 0.0, 0, False, "auto")
    with mode, pytest.raises(ValueError, match=re.escape(message)):
        torch.ops.flashhopper.forward(arguments["q"], arguments["k"], arguments["v"], *rest)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.int32, "q has dtype torch.int32: must be float16, bfloat16, float32 or float64; cast with"),
        (torch.float8_e4m3fn, "q has dtype torch.float8_e4m3fn: 8-bit inputs need their scales"),
    ],
)
def test_dtypes(dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        fh.flash_attn_func(**{name: x.to(dtype) for name, x in qkv().items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q": torch.randn(1, 7, 2, 8)},
            "q has shape (1, 7, 2, 8): must have 3 dimensions, (total_tokens, heads, head_dim)",
        ),
        ({"v": torch.randn(6, 2, 8)}, "v has 6 tokens, k has 7: must be equal"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 7])}, "cu_seqlens_q has dtype torch.int64: must be int32; cast with"),
        ({"cu_seqlens_q": [0, 3, 7]}, "cu_seqlens_q is a list: must be an int32 tensor of batch + 1 offsets"),
        ({"cu_seqlens_k": torch.tensor([0, 7]).int()}, "cu_seqlens_k has 2 entries, cu_seqlens_q has 3"),
        ({"cu_seqlens_k": torch.zeros(0).int()}, "cu_seqlens_k has shape (0,): must be (batch + 1,)"),
        ({"cu_seqlens_k": torch.tensor([1, 3, 7]).int()}, "cu_seqlens_k starts at 1: must start at 0"),
        (
            {"cu_seqlens_k": torch.tensor([0, 3, 9]).int()},
            "cu_seqlens_k ends at 9, k has 7 tokens: must not exceed them",
        ),
        (
            {"cu_seqlens_q": torch.tensor([0, 4, 3]).int()},
            "cu_seqlens_q falls from 4 to 3 at sequence 1: must not decrease",
        ),
        ({"max_seqlen_q": 3}, "max_seqlen_q is 3, sequence 1 has 4 tokens: must be at least the longest sequence"),
        ({"max_seqlen_k": -1}, "max_seqlen_k is -1: must be the length of the longest sequence, 0 or more"),
        ({"seqused_k": torch.tensor([1]).int()}, "seqused_k has shape (1,): must be (2,), one length a sequence"),
        ({"seqused_k": torch.tensor([3, 5]).int()}, "seqused_k is 5 for sequence 1 of length 4: must be between 0 and"),
        (
            {"seqused_q": torch.tensor([-1, 0]).int()},
            "seqused_q is -1 for sequence 0 of length 3: must be between 0 and",
        ),
        ({"seqused_q": torch.tensor([1.0, 0.0])}, "seqused_q has dtype torch.float32: must be int32"),
        ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int32, device="meta")}, "cu_seqlens_q is on meta, q on cpu"),
    ],
    ids=name_case,
)
def test_packed(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        fh.flash_attn_varlen_func(**{**packed(), **change})


@pytest.mark.parametrize(
    ("shape", "heads", "message"),
    [
        (
            (2, 5, 4, 8),
            None,
            "qkv has shape (2, 5, 4, 8): must be (batch, seqlen, 3, heads, head_dim), or give num_heads_q",
        ),
        ((2, 5, 2, 4, 8), None, "qkv has shape (2, 5, 2, 4, 8): must be (batch, seqlen, 3, heads, head_dim)"),
        ((2, 5, 3, 4, 8), 4, "qkv has shape (2, 5, 3, 4, 8): with num_heads_q it must be (batch, seqlen, num_heads_q"),
        ((2, 5, 7, 8), 4, "num_heads_q is 4, qkv has 7 heads: what is left beside the query heads must split evenly"),
        ((2, 5, 7, 8), 9, "num_heads_q is 9, qkv has 7 heads"),
    ],
)
def test_fused(shape: tuple[int, ...], heads: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        fh.flash_attn_qkvpacked_func(torch.randn(shape), num_heads_q=heads)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_splits": 0}, "num_splits=0 is not available in this version: pass num_splits=1"),
        ({"num_splits": 4}, "num_splits=4 is not available in this version: pass num_splits=1"),
    ],
)
def test_what_is_not_built_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        fh.flash_attn_func(**qkv(), **change)
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        fh.flash_attn_varlen_func(**packed(), **change)
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        fh.explain(**qkv(), **change)


def test_a_gradient_of_the_wrong_shape() -> None:
    q, k, v = (torch.randn(1, 3, 2, 4) for _ in range(3))
    out, lse = fh.flash_attn_func(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match=r"dout has shape \(1, 2, 2, 4\), must have the output's \(1, 3, 2, 4\)"):
        torch.ops.flashhopper.backward(out[:, :2], None, q, k, v, out, lse, None, 0.5, -1, -1, 0.0, 0, False, "auto")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dropout_p", 0.1),
        ("alibi_slopes", torch.ones(8)),
        ("attn_bias", torch.zeros(5, 7)),
        ("attn_mask", torch.ones(5, 7, dtype=torch.bool)),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name: str, value: object) -> None:
    """And never ignored; asking for none of it is no error, and a misspelt option still is one."""
    fused = {"qkv": torch.randn(2, 5, 3, 8, 16)}
    functions = (
        (fh.flash_attn_func, qkv()),
        (fh.flash_attn_qkvpacked_func, fused),
        (fh.flash_attn_varlen_func, packed()),
    )
    for function, arguments in functions:
        with pytest.raises(NotImplementedError, match=rf"^{name} is .*: not computed here; .*scaled_dot_product"):
            function(**arguments, **{name: value})
        neutral = 0.0 if name == "dropout_p" else None
        assert torch.equal(function(**arguments, **{name: neutral}), function(**arguments))
        with pytest.raises(TypeError, match="unexpected keyword argument 'dropout'"):
            function(**arguments, dropout=0.1)
