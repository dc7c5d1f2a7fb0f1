"""Input families, large scores and real activations against float64; nothing may be NaN."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from gpu_support import DTYPES, assert_attends, draw, judge, materialised, poisoned_forward

import flashhopper
from flashhopper.testing import FAMILIES, error_metrics, load_llm_layers, make_inputs

MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
ACTIVATIONS = Path(__file__).parents[1] / "data" / "gemma3_270m_qkv_slice.safetensors"


@MASKS
@DTYPE
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    q, k, v = make_inputs(
        family,
        batch=1,
        seqlen_q=1024,
        heads=4,
        kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
        device="cuda",
        seed=head_dim,
    )
    assert_attends(q, k, v, causal)


@MASKS
@DTYPE
def test_relative_rmse_of_normal_inputs(dtype: torch.dtype, causal: bool) -> None:
    """The 16-bit floor: rounding of P and of the output, nothing more."""
    q, k, v = draw(1, 1, 2048, 2048, 4, 4, 128, dtype=dtype)
    out, _ = poisoned_forward(q, k, v, causal)
    exact, _ = materialised(q, k, v, causal, torch.float64)
    assert error_metrics(out, exact).relative_rmse < (3.5e-3 if dtype == torch.bfloat16 else 4.5e-4)


@MASKS
@DTYPE
@pytest.mark.parametrize("target", [1e2, 1e3, 1e4])
def test_large_scores(target: float, dtype: torch.dtype, causal: bool) -> None:
    """Scores up to the target: softmax is nearly one-hot; finite and right all the same."""
    q, k, v = draw(2, 2, 1024, 1024, 4, 4, 128, dtype=dtype)
    largest = (q.float().transpose(1, 2) @ k.float().permute(0, 2, 3, 1)).abs().max().item() * 128**-0.5
    factor = (target / largest) ** 0.5
    q, k = (q.float() * factor).to(dtype), (k.float() * factor).to(dtype)
    out, lse = poisoned_forward(q, k, v, causal)
    exact, exact_lse = materialised(q, k, v, causal, torch.float64)
    plain, _ = materialised(q, k, v, causal, dtype)
    assert not out.isnan().any()
    assert not lse.isnan().any()
    # fp32 scores of size 1e4 carry an error near 5e-3, which the exponential passes on to the weights. The fp16
    # yardstick overflows there; what is left is that bound on the weights.
    yardstick = (plain.double() - exact).abs().max().item()
    bound = 2 * yardstick + 1e-5 if math.isfinite(yardstick) else 5e-2
    assert (out.double() - exact).abs().max().item() <= bound
    assert (lse.double() - exact_lse).abs().max().item() <= 1e-6 * target + 1e-3


@DTYPE
def test_triple_inputs_causal(dtype: torch.dtype) -> None:
    q, k, v = (3 * x for x in draw(3, 2, 1024, 1024, 8, 8, 128, dtype=dtype))
    assert_attends(q, k, v, True)


@MASKS
def test_equal_scores(causal: bool) -> None:
    """q = 0: the mean of the visible values, lse the logarithm of their number."""
    q, k, v = draw(4, 2, 300, 500, 4, 2, 128)
    q.zero_()
    out, lse = poisoned_forward(q, k, v, causal)
    assert judge(out, lse, q, k, v, causal).problem() is None
    visible = torch.arange(201, 501, device="cuda") if causal else torch.full((300,), 500, device="cuda")
    assert (lse - visible.double().log().float()).abs().max().item() < 1e-5


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("element", [9.0, 30.0])
def test_equal_large_scores_over_a_long_context(element: float, head_dim: int) -> None:
    """An unchanged maximum rescales by exactly 1: scores near 1e3 and 1e4, 128k keys, each worth the same."""
    seqlen_k = 131072
    q = torch.full((1, 64, 1, head_dim), element, dtype=torch.bfloat16, device="cuda")
    k = torch.full((1, seqlen_k, 1, head_dim), element, dtype=torch.bfloat16, device="cuda")
    ramp = torch.linspace(0, 1, seqlen_k, dtype=torch.float64, device="cuda").bfloat16()
    v = ramp[None, :, None, None].expand(1, -1, 1, head_dim).contiguous()
    out, lse = poisoned_forward(q, k, v, False)
    assert (out.double() - ramp.double().mean()).abs().max().item() < 2e-3
    expected = element**2 * head_dim**0.5 + math.log(seqlen_k)
    assert (lse.double() - expected).abs().max().item() < 4e-7 * expected + 1e-4


@MASKS
def test_nan_queries_stay_visible(causal: bool) -> None:
    """A query of NaN gives NaN in its row of out and lse, and nowhere else."""
    q, k, v = draw(18, 1, 300, 300, 2, 1, 128)
    q[0, 17] = float("nan")
    out, lse = flashhopper.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    assert out[0, 17].isnan().all()
    assert lse[0, :, 17].isnan().all()
    assert out.isnan().sum().item() == out[0, 17].numel()
    assert lse.isnan().sum().item() == 2


@MASKS
def test_constant_values(causal: bool) -> None:
    """Rows of P sum to 1: V constant along the sequence comes back to within its own rounding."""
    q, k, v = draw(5, 2, 1000, 1000, 4, 2, 128)
    v = v[:, :1].expand(-1, 1000, -1, -1).contiguous()
    out, _ = poisoned_forward(q, k, v, causal)
    expected = v.repeat_interleave(2, 2)
    assert ((out.float() - expected.float()).abs() <= 2**-7 * expected.float().abs() + 1e-6).all()


@MASKS
def test_infinite_padding_keys_do_not_matter(causal: bool) -> None:
    """What lies behind the last key and the last query in memory never reaches the result."""
    q, k, v = draw(6, 1, 130, 77, 4, 2, 128)
    expected, _ = poisoned_forward(q, k, v, causal)
    for poison in (float("nan"), float("inf"), -float("inf"), 6e4):
        stores = [
            torch.full((1, x.size(1) + 300, *x.shape[2:]), poison, dtype=x.dtype, device="cuda") for x in (q, k, v)
        ]
        views = [store[:, 100 : 100 + x.size(1)] for store, x in zip(stores, (q, k, v), strict=True)]
        for view, x in zip(views, (q, k, v), strict=True):
            view.copy_(x)
        assert torch.equal(poisoned_forward(*views, causal)[0], expected), f"padding of {poison} shows"


def test_nan_stays_in_its_own_rows() -> None:
    """A NaN query spoils its row alone, a NaN in one sequence leaves the others as they were."""
    q, k, v = draw(7, 3, 300, 300, 4, 2, 128)
    expected, _ = poisoned_forward(q, k, v, True)
    q[0, 17, 1] = float("nan")
    k[2, 5] = float("nan")
    out = flashhopper.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(out[1], expected[1])
    keep = torch.ones(300, 4, dtype=torch.bool, device="cuda")
    keep[17, 1] = False
    assert torch.equal(out[0][keep], expected[0][keep])
    assert out[0, 17, 1].isnan().all()


@DTYPE
def test_real_activations(dtype: torch.dtype) -> None:
    """Q, K, V of a real model on real text, all layers of the slice."""
    if not ACTIVATIONS.is_file():
        pytest.skip(f"{ACTIVATIONS.name} is not in tests/data")
    layers = load_llm_layers(ACTIVATIONS, dtype=dtype, device="cuda")
    assert layers
    for layer in layers:
        q, k, v = layer.inputs
        for causal in (True, False):
            out, lse = poisoned_forward(q, k, v, causal, layer.softmax_scale)
            problem = judge(out, lse, q, k, v, causal, layer.softmax_scale).problem()
            assert problem is None, f"{layer.name}: {problem}"
