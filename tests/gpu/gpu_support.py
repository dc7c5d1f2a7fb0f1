"""What the GPU tests share: the float64 oracle in bulk, the 16-bit rule, and launches into poisoned memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

NAN = float("nan")
DTYPES = (torch.bfloat16, torch.float16)
LSE_TOLERANCE = 1e-3  # fp32 sums of at most a few thousand exponentials of scores near 10
GUARD = 4096  # elements around a raw output that must stay as they were
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def draw(
    seed: int,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensors:
    """Normal q, k, v, contiguous (batch, seqlen, heads, head_dim)."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shapes = (
        (batch, seqlen_q, heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim_v or head_dim),
    )
    q, k, v = (torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes)
    return q, k, v


def materialised(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, dtype: torch.dtype, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with the whole score matrix in `dtype`: float64 is the oracle, the inputs' own dtype the yardstick.

    Differentiable. Rows that see no key give 0 and lse -inf.
    """
    scale = q.size(3) ** -0.5 if scale is None else scale
    group = q.size(2) // k.size(2)
    kt, vt = (x.to(dtype).repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))  # (B, H, Sk, D)
    scores = q.to(dtype).transpose(1, 2) @ kt.transpose(2, 3) * scale  # (B, H, Sq, Sk)
    seqlen_q, seqlen_k = scores.shape[2:]
    if causal:
        row = torch.arange(seqlen_q, device=q.device)[:, None]
        hidden = torch.arange(seqlen_k, device=q.device)[None, :] > row + seqlen_k - seqlen_q
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1) if seqlen_k > 0 else scores.new_full(scores.shape[:3], -math.inf)
    # Rows without a key would be NaN, and so would their gradients: give them finite scores, then no weight.
    dead = (lse == -math.inf)[..., None]
    weights = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    return (weights @ vt).transpose(1, 2), lse


@dataclass
class Verdict:
    """The outcome of the 16-bit rule for one result."""

    error: float
    allowed: float
    lse_error: float
    nan: int

    def problem(self) -> str | None:
        if self.nan:
            return f"{self.nan} elements are NaN or were never written"
        if not self.error <= self.allowed:
            return f"max error {self.error:.3e}, allowed {self.allowed:.3e}"
        if not self.lse_error <= LSE_TOLERANCE:
            return f"lse error {self.lse_error:.3e}, allowed {LSE_TOLERANCE:.0e}"
        return None


def judge(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None = None,
) -> Verdict:
    """Max error against float64 at most twice that of the same-dtype PyTorch attention, plus 1e-5; never NaN."""
    if out.numel() == 0:
        return Verdict(0.0, 0.0, 0.0, 0)
    exact, exact_lse = materialised(q, k, v, causal, torch.float64, scale)
    plain, _ = materialised(q, k, v, causal, q.dtype, scale)
    numbers = [(out.double() - exact).abs().max(), (plain.double() - exact).abs().max(), out.isnan().sum().double()]
    if lse is not None:
        same = lse.double() == exact_lse  # -inf on both sides
        numbers += [torch.where(same, 0.0, lse.double() - exact_lse).abs().max(), lse.isnan().sum().double()]
    error, yardstick, nan, lse_error, lse_nan = [*torch.stack(numbers).tolist(), 0.0, 0.0][:5]
    return Verdict(error, 2 * yardstick + 1e-5, lse_error, int(nan + lse_nan))


@lru_cache(maxsize=1)
def workspace() -> torch.Tensor:
    from flashhopper import _C

    return torch.zeros(max(16, _C.workspace_bytes()), dtype=torch.uint8, device="cuda")


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float | None = None,
    sm_margin: int = 0,
) -> None:
    """The compiled module's forward on the current stream, into tensors of the caller's choice; sizes must not be 0."""
    from flashhopper import _C

    code = _C.BF16 if q.dtype == torch.bfloat16 else _C.FP16
    strides = [x.stride(dim) for x in (q, k, v, out) for dim in (0, 1, 2)]
    sizes = [q.size(0), q.size(2), k.size(2), q.size(1), k.size(1), q.size(3), v.size(3)]
    pointers = [x.data_ptr() for x in (q, k, v, out, lse, workspace())]
    softmax_scale = q.size(3) ** -0.5 if scale is None else scale
    stream = torch.cuda.current_stream().cuda_stream
    _C.forward(*pointers, *strides, *sizes, -1, 0 if causal else -1, softmax_scale, code, sm_margin, stream)


def poisoned_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None = None, sm_margin: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Raw launch into NaN between two guards; a write outside the output fails here, a missing one stays NaN."""
    shape = (*q.shape[:3], v.size(3))
    count, lse_count = math.prod(shape), math.prod(shape[:3])
    store = torch.full((count + 2 * GUARD,), NAN, dtype=q.dtype, device="cuda")
    lse_store = torch.full((lse_count + 2 * GUARD,), NAN, dtype=torch.float32, device="cuda")
    out = store[GUARD : GUARD + count].view(shape)
    lse = lse_store[GUARD : GUARD + lse_count].view(shape[0], shape[2], shape[1])
    launch(q, k, v, out, lse, causal, scale, sm_margin)
    written = torch.stack(
        [(~x[side]).sum() for x in (store.isnan(), lse_store.isnan()) for side in (slice(GUARD), slice(-GUARD, None))]
    )
    assert written.tolist() == [0, 0, 0, 0], f"wrote outside out or lse: {written.tolist()} elements"
    assert not workspace().any(), "the workspace was not left zero"
    return out, lse


def assert_attends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None = None) -> None:
    """One raw launch held to the rule."""
    out, lse = poisoned_forward(q, k, v, causal, scale)
    problem = judge(out, lse, q, k, v, causal, scale).problem()
    assert problem is None, problem


def assert_equal_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert torch.equal(a, b), f"{(a != b).sum().item()} of {a.numel()} elements differ"
