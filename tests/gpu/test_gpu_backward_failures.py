"""Failures of backward passes that users of attention libraries met in public, as small inputs with right values from
float64 (FA: issues of Dao-AILab/flash-attention).
"""

from __future__ import annotations

import pytest
import torch
from gpu_support import (
    DTYPES,
    assert_equal_bits,
    assert_gradients,
    draw,
    draw_dlse,
    draw_dout,
    gradients,
    judge_gradients,
    poison_free_memory,
)

import flashhopper

pytestmark = pytest.mark.usefixtures("hopper_gradients")
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 12), (12, 3), (12, 1)])
def test_deterministic_is_not_ignored(heads: int, kv_heads: int) -> None:
    """FA 1596, 2244: B2 S1024 H12 D64 fp16, 20 runs, GQA too."""
    for causal in (False, True):
        q, k, v = draw(1, 2, 1024, 1024, heads, kv_heads, 64, dtype=torch.float16)
        dout = draw_dout(1, q, v)
        expected = gradients(q, k, v, dout, causal, deterministic=True)
        for _ in range(19):
            found = gradients(q, k, v, dout, causal, deterministic=True)
            for mine, right in zip(found, expected, strict=True):
                assert_equal_bits(mine, right)
        problem = judge_gradients(expected, q, k, v, dout, causal)
        assert problem is None, problem


@MASKS
def test_zero_length_keys(causal: bool) -> None:
    """FA 1343: out 0, lse -inf, gradients 0, whatever comes from above."""
    q, k, v = draw(2, 2, 5, 0, 4, 2, 64)
    for dlse in (None, draw_dlse(2, q)):
        dq, dk, dv = gradients(q, k, v, draw_dout(2, q, v), causal, dlse=dlse)
        assert not dq.any()
        assert (dk.shape, dv.shape) == (k.shape, v.shape)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_causal_with_more_queries_than_keys(head_dim: int) -> None:
    """FA 1778: Sq 300, Sk 77, leading rows see nothing; their lse of -inf has no gradient either."""
    q, k, v = draw(3, 2, 300, 77, 4, 2, head_dim)
    dout, dlse = draw_dout(3, q, v), draw_dlse(3, q)
    found = gradients(q, k, v, dout, True, dlse=dlse)
    assert not found[0][:, :223].any()
    problem = judge_gradients(found, q, k, v, dout, True, dlse=dlse)
    assert problem is None, problem


def test_workspace_in_use_is_not_freed() -> None:
    """FA PR 2063: deterministic backward in a loop whose allocations take every freed block at once."""
    q, k, v = draw(4, 4, 512, 512, 16, 4, 128)
    dout = draw_dout(4, q, v)
    expected = gradients(q, k, v, dout, True, deterministic=True)
    for _ in range(40):
        found = gradients(q, k, v, dout, True, deterministic=True)
        poison_free_memory()
        for mine, right in zip(found, expected, strict=True):
            assert_equal_bits(mine, right)


def test_side_stream_behind_a_slow_kernel_that_writes_q() -> None:
    """FA PR 1957."""
    source, k, v = draw(5, 2, 300, 300, 4, 2, 128)
    dout = draw_dout(5, source, v)
    expected = gradients(source, k, v, dout, True, deterministic=True)
    q = torch.zeros_like(source)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        q.copy_(source)
        found = gradients(q, k, v, dout, True, deterministic=True)
    torch.cuda.synchronize()
    for mine, right in zip(found, expected, strict=True):
        assert_equal_bits(mine, right)


@MASKS
def test_head_dim_192_with_128(causal: bool) -> None:
    """FA 1487, 2087: S1024 H128 D192/128."""
    q, k, v = draw(6, 1, 1024, 1024, 128, 128, 192, 128)
    dout = draw_dout(6, q, v)
    found = gradients(q, k, v, dout, causal)
    for heads in (slice(0, 8), slice(120, 128)):
        parts = [x[:, :, heads] for x in (*found, q, k, v, dout)]
        problem = judge_gradients(parts[:3], *parts[3:], causal)
        assert problem is None, f"heads {heads}: {problem}"
    assert all(x.isfinite().all() for x in found)


@MASKS
def test_upstream_gradient_with_a_large_row_stride(causal: bool) -> None:
    """FA 2372: dout with rows 9728 elements apart; q, k and v as slices of the like."""
    generator = torch.Generator("cuda").manual_seed(7)
    wide = torch.randn(2, 300, 9728, device="cuda", generator=generator).bfloat16()
    q = wide[..., :1024].view(2, 300, 8, 128)
    k, v = (wide[..., at : at + 256].view(2, 300, 2, 128) for at in (4096, 8192))
    dout = wide[..., 2048:3072].view(2, 300, 8, 128)
    assert dout.stride(1) == 9728
    assert_gradients(q, k, v, dout, causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_large_inputs(dtype: torch.dtype) -> None:
    """FA 1052: causal S1024 D128, inputs times 3; gradients exploded or were NaN."""
    q, k, v = (3 * x for x in draw(8, 2, 1024, 1024, 8, 8, 128, dtype=dtype))
    assert_gradients(q, k, v, 3 * draw_dout(8, q, v), True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.xdist_group("compile")
def test_compile_with_changing_lengths() -> None:
    """FA 1435, PR 1590: fullgraph, dynamic seqlen, GQA, head_dim_v != head_dim, backward included."""
    torch._dynamo.reset()

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashhopper.flash_attn_func(q, k, v, causal=True, deterministic=True).float().square().mean()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for seqlen_q, seqlen_k in ((128, 128), (77, 300), (300, 77), (513, 513)):
        tensors = draw(9, 2, seqlen_q, seqlen_k, 8, 2, 192, 128)
        results = []
        for function in (loss, compiled):
            leaves = [x.detach().requires_grad_() for x in tensors]
            results.append(torch.autograd.grad(function(*leaves), leaves))
        for eager, mine in zip(*results, strict=True):
            assert_equal_bits(mine, eager)
