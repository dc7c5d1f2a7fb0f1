"""Gradients of the input families, of large inputs and scores, of real activations; properties that hold exactly."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from gpu_support import (
    DTYPES,
    GRADIENTS,
    assert_gradients,
    draw,
    draw_dout,
    gradients,
    judge_gradients,
    materialised_gradients,
    saved_output_errors,
)

import flashhopper
from flashhopper.testing import FAMILIES, error_metrics, load_llm_layers, make_inputs

pytestmark = pytest.mark.usefixtures("hopper_gradients")
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
ACTIVATIONS = Path(__file__).parents[1] / "data" / "gemma3_270m_qkv_slice.safetensors"


@MASKS
@DTYPE
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    sizes = {"batch": 1, "seqlen_q": 1024, "heads": 4, "kv_heads": 2, "head_dim": head_dim}
    q, k, v = make_inputs(family, **sizes, dtype=dtype, device="cuda", seed=head_dim)
    dout = draw_dout(head_dim, q, v)
    # Values with a mean: out keeps it and little else, and its rounding is as large as what delta is there to remove.
    more = saved_output_errors(q, k, v, dout, causal) if family == "vmean" else None
    problem = judge_gradients(gradients(q, k, v, dout, causal), q, k, v, dout, causal, more=more)
    assert problem is None, problem


@MASKS
@DTYPE
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_relative_rmse_of_normal_inputs(head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    """Of each gradient no more than that of PyTorch autograd in 16 bit: P and dS are rounded once, not after every
    operation."""
    q, k, v = draw(1, 1, 2048, 2048, 4, 4, head_dim, dtype=dtype)
    dout = draw_dout(1, q, v)
    found = gradients(q, k, v, dout, causal)
    exact = materialised_gradients(q, k, v, dout, causal, torch.float64)
    plain = materialised_gradients(q, k, v, dout, causal, dtype)
    for name, mine, right, yardstick in zip(GRADIENTS, found, exact, plain, strict=True):
        error, allowed = error_metrics(mine, right).relative_rmse, error_metrics(yardstick, right).relative_rmse
        assert error <= 1.02 * allowed, f"{name}: relative rmse {error:.3e}, PyTorch's {allowed:.3e}"


@MASKS
@DTYPE
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_triple_inputs(head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    q, k, v = (3 * x for x in draw(2, 1, 1024, 1024, 8, 4, head_dim, dtype=dtype))
    assert_gradients(q, k, v, 3 * draw_dout(2, q, v), causal)


@MASKS
@DTYPE
@pytest.mark.parametrize("target", [1e2, 1e3, 1e4])
def test_large_scores(target: float, dtype: torch.dtype, causal: bool) -> None:
    """Scores up to the target: softmax is nearly one-hot, with large gradients where it is not. Finite and right."""
    q, k, v = draw(3, 2, 1024, 1024, 4, 4, 128, dtype=dtype)
    dout = draw_dout(3, q, v)
    largest = (q.float().transpose(1, 2) @ k.float().permute(0, 2, 3, 1)).abs().max().item() * 128**-0.5
    factor = (target / largest) ** 0.5
    q, k = (q.float() * factor).to(dtype), (k.float() * factor).to(dtype)
    found = gradients(q, k, v, dout, causal)
    exact = materialised_gradients(q, k, v, dout, causal, torch.float64)
    plain = materialised_gradients(q, k, v, dout, causal, dtype)
    for name, mine, right, yardstick in zip(GRADIENTS, found, exact, plain, strict=True):
        assert mine.isfinite().all(), f"{name}: {(~mine.isfinite()).sum().item()} elements are not finite"
        # fp32 scores of size 1e4 carry an error near 5e-3, and so do weights and gradients. The fp16 yardstick
        # overflows there; what is left is that bound.
        spread = (yardstick.double() - right).abs().max().item()
        bound = 2 * spread + 1e-5 if math.isfinite(spread) else 3e-2 * right.abs().max().item()
        error = (mine.double() - right).abs().max().item()
        assert error <= bound, f"{name}: max error {error:.3e}, allowed {bound:.3e}"


@MASKS
@DTYPE
def test_equal_scores(dtype: torch.dtype, causal: bool) -> None:
    """q = 0: every visible key weighs the same; dk is zero, because q is."""
    q, k, v = draw(4, 2, 300, 500, 4, 2, 128, dtype=dtype)
    q.zero_()
    dout = draw_dout(4, q, v)
    found = gradients(q, k, v, dout, causal)
    assert (found[1] == 0).all()
    problem = judge_gradients(found, q, k, v, dout, causal)
    assert problem is None, problem


@MASKS
def test_small_upstream_gradients(causal: bool) -> None:
    """A mean over many tokens scales dout by 1e-6 (bf16 keeps that), a loss scaler by 1e3: gradients follow exactly,
    for powers of two commute with every rounding."""
    q, k, v = draw(5, 2, 300, 400, 4, 2, 128)
    dout = draw_dout(5, q, v)
    expected = gradients(q, k, v, dout, causal, deterministic=True)
    for factor in (2.0**-20, 2.0**10):
        found = gradients(q, k, v, dout * factor, causal, deterministic=True)
        for name, mine, right in zip(GRADIENTS, found, expected, strict=True):
            assert torch.equal(mine, right * factor), f"{name} times {factor}"


@MASKS
def test_zero_upstream_gradient(causal: bool) -> None:
    q, k, v = draw(6, 2, 300, 400, 4, 2, 128)
    for gradient in gradients(q, k, v, torch.zeros_like(draw_dout(6, q, v)), causal):
        assert (gradient == 0).all()


@MASKS
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_keys_shifted_by_a_constant(head_dim: int, causal: bool) -> None:
    """Adding one vector to every key leaves softmax as it is: dk sums to zero over the keys, to within its rounding."""
    q, k, v = draw(7, 2, 256, 256, 2, 2, head_dim)
    _, dk, _ = gradients(q, k, v, draw_dout(7, q, v), causal)
    total = dk.double().sum(1).abs().max().item()
    assert total <= 2**-8 * dk.double().abs().sum(1).max().item()


def test_nan_stays_in_its_own_sequence() -> None:
    """NaN in one batch entry, or one kv head, leaves the others' gradients as they were."""
    q, k, v = draw(8, 3, 300, 300, 4, 2, 128)
    dout = draw_dout(8, q, v)
    expected = gradients(q, k, v, dout, True, deterministic=True)
    q[0, 17, 1] = float("nan")  # reads kv head 0
    found = gradients(q, k, v, dout, True, deterministic=True)
    for mine, right in zip(found, expected, strict=True):
        assert torch.equal(mine[1:], right[1:])
        half = mine.size(2) // 2
        assert torch.equal(mine[0, :, half:], right[0, :, half:])
    assert found[0][0, 17, 1].isnan().all()


@DTYPE
def test_real_activations(dtype: torch.dtype) -> None:
    """Q, K, V of a real model on real text, all layers of the slice."""
    if not ACTIVATIONS.is_file():
        pytest.skip(f"{ACTIVATIONS.name} is not in tests/data")
    layers = load_llm_layers(ACTIVATIONS, dtype=dtype, device="cuda")
    assert layers
    for layer in layers:
        q, k, v = layer.inputs
        dout = draw_dout(9, q, v)
        for causal in (True, False):
            found = gradients(q, k, v, dout, causal, layer.softmax_scale)
            problem = judge_gradients(found, q, k, v, dout, causal, layer.softmax_scale)
            assert problem is None, f"{layer.name}: {problem}"


@MASKS
def test_uninitialised_memory_is_overwritten(causal: bool) -> None:
    """torch fills every fresh allocation with NaN in this mode: all of dq, dk and dv must be written."""
    torch.use_deterministic_algorithms(True)
    try:
        for seqlen_q, seqlen_k, head_dim in ((1, 1, 64), (65, 129, 96), (300, 77, 128), (128, 0, 256), (0, 128, 64)):
            q, k, v = draw(11, 2, seqlen_q, seqlen_k, 4, 2, head_dim)
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = flashhopper.flash_attn_func(*leaves, causal=causal, deterministic=True)
            for gradient in torch.autograd.grad(out, leaves, draw_dout(11, q, v)):
                assert gradient.isfinite().all(), f"Sq {seqlen_q} Sk {seqlen_k} d{head_dim}"
    finally:
        torch.use_deterministic_algorithms(False)
