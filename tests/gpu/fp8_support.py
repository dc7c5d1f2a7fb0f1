"""What the tests of the 8-bit attention kernel share: problems, launches between guards, and what a result is held to.

A result is held to the emulation of the kernel's arithmetic (flashhopper.fp8.emulate) and, loosely, to exact attention
in float64 of the numbers that the 8-bit data stand for.

Kernel and emulation round the same probabilities to e4m3, but not from the same scores. The accumulator of e4m3
products keeps about 14 bits, which moves scores by some 1e-3; sums of int8 products are exact, but their float form
starts from 1.5 * 2^23, which moves a step's scores by up to half a unit of the product. A score that moves by 1e-3
moves 1 or 2 of 100 probabilities over a rounding boundary, by 6 to 12 %: a few parts in 1000 of the output in the
mean, and in single elements much more. So outputs are held by the norm of their difference. The emulation with 14-bit
accumulators differs from the one with float32 by 2e-3 to 9e-3 of the output's norm for e4m3 scores, by up to 5e-2 in
the worst row and by up to 1.1e-2 in lse; sums of probabilities taken in the accumulator lose up to 2e-3 more. What
these tests look for is larger: the scales of neighbouring blocks differ by tens of percent in the problems drawn
here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu_support import Tensors, judged, materialised

import flashhopper
from flashhopper.engine import hopper_fp8
from flashhopper.fp8 import Fp8QKV, Fp8Recipe, emulate
from flashhopper.fp8 import quantize as torch_quantizer

GUARD_BYTES = 4096  # around a result; they must stay as they were
POISON_BYTE = 0xFF  # NaN in float32, both 16-bit formats and e4m3, and -1 in int8
# Shares of the norm of an output: e4m3 and int8 scores against the emulation; either against float64, which does not
# round probabilities: 2.4e-2 in the mean.
OUT_LIMIT = {"e4m3": 1.5e-2, "int8": 1e-2}
EXACT_OUT_LIMIT = 4e-2
# Where weights are nearly equal, those of a block round alike: their errors do not cancel, the values' sum does.
EXACT_VALUE_LIMIT = 5e-3  # of the values
ROW_LIMIT = 0.15  # of a single row
# Natural logarithms of single rows: sums are of rounded probabilities, and one near the middle of two steps of e4m3, up
# to an eighth apart, may be rounded otherwise. Among few keys it has a third of the weight.
LSE_LIMIT = 5e-2
RECIPES = {
    "paper": Fp8Recipe.paper(),
    "e4m3": Fp8Recipe.e4m3(),
    "accurate": Fp8Recipe.accurate(),
    "whole heads": Fp8Recipe("e4m3", False, False, False, 0, 0, 0),
    "query blocks": Fp8Recipe("int8", True, False, False, 128, 128, 128),
}


@dataclass(frozen=True)
class Case:
    """One call of 8-bit attention."""

    batch: int = 2
    seqlen_q: int = 333
    seqlen_k: int = 777
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    head_dim_v: int = 128
    recipe: str = "accurate"
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16
    scale: float | None = None
    quantizer: str = "kernel"

    def __str__(self) -> str:
        sizes = f"B{self.batch} H{self.heads}:{self.kv_heads} {self.seqlen_q}x{self.seqlen_k}"
        dims = f"d{self.head_dim}/{self.head_dim_v} {str(self.dtype)[6:]}"
        mask = "causal" if self.causal else "full"
        return f"{sizes} {dims} {mask} {self.recipe} by {self.quantizer} scale={self.scale}"

    def with_dims(self, dims: tuple[int, int]) -> Case:
        return replace(self, head_dim=dims[0], head_dim_v=dims[1])


def draw8(case: Case, seed: int = 0, mean: float = 0.0) -> Tensors:
    """Normal q, k, v whose rows and blocks of keys differ in size, so that every scale matters; with `mean`, keys and
    values have channels of that mean.
    """
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device="cuda")

    blocks = -(-case.seqlen_k // 128)
    q = normal(case.batch, case.seqlen_q, case.heads, case.head_dim)
    q *= 0.5 + uniform(case.batch, case.seqlen_q, case.heads, 1)
    keys_and_values = []
    for columns, least, spread in ((case.head_dim, 0.5, 1.0), (case.head_dim_v, 0.3, 2.0)):
        x = normal(case.batch, case.seqlen_k, case.kv_heads, columns)
        size = least + spread * uniform(case.batch, blocks, case.kv_heads, 1)
        x *= size.repeat_interleave(128, dim=1)[:, : case.seqlen_k]
        keys_and_values.append(x + mean * normal(1, 1, case.kv_heads, columns))
    k, v = keys_and_values
    return q.to(case.dtype), k.to(case.dtype), v.to(case.dtype)


def quantized(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Fp8QKV:
    """By the kernel where it takes the recipe and is asked for, else by torch operations."""
    recipe = RECIPES[case.recipe]
    if case.quantizer == "kernel":
        reason = hopper_fp8.quantize_refusal(q.device, q.dtype, (case.head_dim, case.head_dim_v), recipe)
        assert (reason is None) == (recipe.k_block == 128), reason
        if reason is None:
            return hopper_fp8.quantize(q, k, v, recipe)
    return torch_quantizer.quantize(q, k, v, recipe)


def sized(x: torch.Tensor, generator: torch.Generator, least: float, spread: float) -> torch.Tensor:
    """Rows (tokens, heads, columns) of sizes that change every 50 tokens, so that the blocks of any sequence differ."""
    size = torch.rand((x.size(0) // 50 + 1, x.size(1), 1), generator=generator, device=x.device)
    return (x * (least + spread * size).repeat_interleave(50, dim=0)[: x.size(0)]).to(x.dtype)


@contextmanager
def guarded_results() -> Iterator[None]:
    """What torch.empty gives holds NaN, between guards that must stay as they were."""
    empty, stores = torch.empty, []

    def guarded(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        count = math.prod(shape) * dtype.itemsize
        store = torch.full((count + 2 * GUARD_BYTES,), POISON_BYTE, dtype=torch.uint8, device=device)
        stores.append(store)
        return store[GUARD_BYTES : GUARD_BYTES + count].view(dtype).view(shape)

    torch.empty = guarded
    try:
        yield
    finally:
        torch.empty = empty
    for store in stores:
        for guard in (store[:GUARD_BYTES], store[-GUARD_BYTES:]):
            assert (guard == POISON_BYTE).all(), "wrote outside out or lse"


UNBOUNDED = (-1, -1)


def attend(
    qkv: Fp8QKV, causal: bool, scale: float | None = None, sm_margin: int = 0, window: tuple[int, int] = UNBOUNDED
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel, into poisoned memory between guards."""
    softmax_scale = qkv.head_dim**-0.5 if scale is None else scale
    left, right = window
    with guarded_results():
        return hopper_fp8.forward(qkv, softmax_scale, left, 0 if causal else right, sm_margin)


def exact(qkv: Fp8QKV, causal: bool, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of the data's own numbers in float64: out, lse and the root of the mean square of the values without
    their mean. lse has the mean's part as the data bring it: from queries before they were quantised.
    """
    softmax_scale = qkv.head_dim**-0.5 if scale is None else scale
    q, k, v = replace(qkv, k_mean=None).to_reference(keep_padding=True)
    out, lse = materialised(q, k, v[..., : qkv.head_dim_v], causal, torch.float64, softmax_scale)
    centred = replace(qkv, k_mean=None, v_mean=None).to_reference()[2]
    size = centred.square().mean().sqrt() if centred.numel() else centred.new_zeros(())
    return out, lse if qkv.lse_shift is None else lse + softmax_scale * qkv.lse_shift, size


def judge8(
    qkv: Fp8QKV,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float | None = None,
    with_exact: bool = True,
    window: tuple[int, int] = UNBOUNDED,
) -> str | None:
    """None where a result is right, else what is wrong. with_exact: against float64 too, which has no window."""
    judged.count += 1
    batch, seqlen_q, heads, _ = qkv.q.shape
    assert (out.shape, out.dtype) == ((batch, seqlen_q, heads, qkv.head_dim_v), qkv.dtype)
    assert (lse.shape, lse.dtype) == ((batch, heads, seqlen_q), torch.float32)
    if out.numel() == 0:
        return None
    qk_format = qkv.recipe.qk_format
    emulated = emulate.attention(qkv, scale, causal, window, out_dtype=torch.float32)
    nothing = torch.zeros((), dtype=torch.float64, device=out.device)
    found = _measure(qkv, out, lse, *emulated, nothing)
    problem = found.problem(OUT_LIMIT[qk_format], ROW_LIMIT, LSE_LIMIT)
    if problem is None and with_exact:
        found = _measure(qkv, out, lse, *exact(qkv, causal, scale))
        problem = found.problem(EXACT_OUT_LIMIT, 2 * ROW_LIMIT, LSE_LIMIT)
        problem = problem and f"against float64: {problem}"
    return problem


@dataclass
class Measured:
    """How far a result is from the expected one; norms of all outputs together are without the mean of the values."""

    difference: float
    norm: float
    spare: float  # what the output's dtype, and rounding that does not cancel, may cost beyond a share of the norm
    worst_row: float  # norm of a row's difference, relative to the row's
    lse_error: float
    lse_rms: float  # of the rows' errors: few rows have a probability that is rounded otherwise
    nan: int
    wrongly_empty: int  # rows that are empty (out 0, lse -inf) in one alone
    rows: int  # that see a key

    def problem(self, out_limit: float, row_limit: float, lse_limit: float) -> str | None:
        if self.nan:
            return f"{self.nan} elements are NaN or were never written"
        if self.wrongly_empty:
            return f"{self.wrongly_empty} rows see keys and have none, or the other way round"
        if self.rows == 0:
            return None
        allowed = out_limit * (1 + 3 / math.sqrt(self.rows)) * self.norm + self.spare
        if not self.difference <= allowed:
            return f"out differs by {self.difference:.3e} from norm {self.norm:.3e}, allowed {allowed:.3e}"
        if not self.worst_row <= row_limit:
            return f"a row differs by {self.worst_row:.3e} of its norm, allowed {row_limit}"
        if not self.lse_error <= lse_limit:
            return f"lse error {self.lse_error:.3e}, allowed {lse_limit:.1e}"
        rms_limit = lse_limit * min(1.0, 0.25 + 2 / math.sqrt(self.rows))
        if not self.lse_rms <= rms_limit:
            return f"rms of lse errors {self.lse_rms:.3e}, allowed {rms_limit:.1e}"
        return None


def _measure(
    qkv: Fp8QKV,
    out: torch.Tensor,
    lse: torch.Tensor,
    expected: torch.Tensor,
    expected_lse: torch.Tensor,
    value_size: torch.Tensor,
) -> Measured:
    """value_size: of the values, where they count beside the norm of the outputs."""
    nothing = expected_lse == -math.inf
    dead = nothing.transpose(1, 2)[..., None]
    difference = (out.double() - expected.double()).masked_fill(dead, 0.0)
    centred = expected.double()
    if qkv.v_mean is not None:
        group = qkv.q.shape[2] // qkv.k.shape[2]
        centred = centred - qkv.v_mean[..., : qkv.head_dim_v].repeat_interleave(group, 1)[:, None]
    centred = centred.masked_fill(dead, 0.0)
    value_error = EXACT_VALUE_LIMIT * value_size
    spare = torch.finfo(out.dtype).eps / 4 * expected.double().norm() + value_error * math.sqrt(out.numel())
    row_norm = expected.double().norm(dim=-1)
    row_floor = 0.2 * row_norm.square().mean().sqrt() + value_error * math.sqrt(out.shape[3]) / ROW_LIMIT + 1e-30
    lse_error = torch.where(nothing, 0.0, lse.double() - expected_lse.double())
    numbers: list[Any] = [
        difference.norm(),
        centred.norm(),
        spare,
        (difference.norm(dim=-1) / (row_norm + row_floor)).max(),
        lse_error.abs().max(),
        (lse_error.square().sum() / (~nothing).sum().clamp(min=1)).sqrt(),
        out.isnan().sum() + lse.isnan().sum(),
        (nothing != (lse == -math.inf)).sum() + ((out != 0) & dead).sum(),
        (~nothing).sum(),
    ]
    *floats, nan, wrongly_empty, rows = torch.stack([x.double() for x in numbers]).tolist()
    return Measured(*floats, int(nan), int(wrongly_empty), int(rows))


def check_case(case: Case, seed: int = 0, mean: float = 0.0) -> None:
    """One problem, quantised, attended and judged."""
    qkv = quantized(case, *draw8(case, seed, mean))
    problem = judge8(qkv, *attend(qkv, case.causal, case.scale), case.causal, case.scale)
    assert problem is None, f"{case}: {problem}"


def documented_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor,
    causal: bool,
) -> list[torch.Tensor]:
    """The straight-through gradient in float64: that of attention on q, k, v, with weights exp(score - lse) from the
    8-bit lse and the row sums of dout * out from the 8-bit out.
    """
    scale, group = q.size(3) ** -0.5, q.size(2) // k.size(2)
    q64, dout64, out64 = (x.double().transpose(1, 2) for x in (q, dout, out))
    k64, v64 = (x.double().repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    scores = q64 @ k64.mT * scale
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(hidden.triu(k.size(1) - q.size(1) + 1), -math.inf)
    weights = (scores - lse.double()[..., None]).exp().nan_to_num(0.0)  # -inf - -inf: a row that sees nothing
    shift = (dout64 * out64).sum(-1) - dlse.double()
    ds = weights * (dout64 @ v64.mT - shift[..., None]) * scale
    dk, dv = ds.mT @ q64, weights.mT @ dout64
    of_groups = [x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv)]
    return [x.transpose(1, 2) for x in (ds @ k64, *of_groups)]


def fp8_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor, causal: bool, recipe: str
) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """out, lse and the gradients of <out, dout> + <lse, dlse> by the public function."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = flashhopper.flash_attn_func(
        *leaves, causal=causal, deterministic=True, fp8=RECIPES[recipe], return_lse=True
    )
    dq, dk, dv = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    return out.detach(), lse.detach(), (dq, dk, dv)
