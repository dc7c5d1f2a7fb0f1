"""What the GPU tests share: the float64 oracle in bulk and its gradients, the 16-bit rule, and calls into poisoned
memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

import flashhopper

NAN = float("nan")
DTYPES = (torch.bfloat16, torch.float16)
LSE_TOLERANCE = 1e-3  # fp32 sums of at most a few thousand exponentials of scores near 10
GUARD = 4096  # elements around a raw output that must stay as they were
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
GRADIENTS = ("dq", "dk", "dv")
# Bytes and number of the blocks that poison_free_memory leaves: torch's allocator serves requests of up to 1 MiB, up to
# 10 MiB and beyond from different segments.
POISON = ((16 << 10, 32), (256 << 10, 12), (1 << 20, 8), (4 << 20, 6), (16 << 20, 3), (64 << 20, 1))


class Judged:
    """How many results were compared with an oracle in this process; conftest.py reads it around each test."""

    count = 0


judged = Judged()


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


def softmax_weights(
    q: torch.Tensor, k: torch.Tensor, causal: bool, dtype: torch.dtype, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores and softmax weights (B, H, Sq, Sk) and lse (B, H, Sq), in `dtype`."""
    scale = q.size(3) ** -0.5 if scale is None else scale
    kt = k.to(dtype).repeat_interleave(q.size(2) // k.size(2), 2).transpose(1, 2)  # (B, H, Sk, D)
    scores = q.to(dtype).transpose(1, 2) @ kt.transpose(2, 3) * scale
    seqlen_q, seqlen_k = scores.shape[2:]
    if causal:
        row = torch.arange(seqlen_q, device=q.device)[:, None]
        hidden = torch.arange(seqlen_k, device=q.device)[None, :] > row + seqlen_k - seqlen_q
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.detach().logsumexp(-1) if seqlen_k > 0 else scores.new_full(scores.shape[:3], -math.inf)
    # Rows without a key would be NaN, and so would their gradients: give them finite scores, then no weight.
    dead = (lse == -math.inf)[..., None]
    scores = scores.masked_fill(dead, 0.0)
    return scores, scores.softmax(-1).masked_fill(dead, 0.0), lse


def materialised(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, dtype: torch.dtype, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with the whole score matrix in `dtype`: float64 is the oracle, the inputs' own dtype the yardstick.

    out is differentiable. Rows that see no key give 0 and lse -inf.
    """
    _, weights, lse = softmax_weights(q, k, causal, dtype, scale)
    vt = v.to(dtype).repeat_interleave(q.size(2) // k.size(2), 2).transpose(1, 2)
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
    judged.count += 1
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
    call = _C.prepare_forward(*strides, *sizes, -1, 0 if causal else -1, softmax_scale, code, sm_margin, -1)
    call(*pointers, stream)


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


def draw_dout(seed: int, q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A normal gradient of out."""
    generator = torch.Generator(device="cuda").manual_seed(seed + 7_919)
    return torch.randn((*q.shape[:3], v.size(3)), generator=generator, device="cuda").to(q.dtype)


def draw_dlse(seed: int, q: torch.Tensor) -> torch.Tensor:
    """A normal gradient of lse, float32 (batch, heads, seqlen_q)."""
    generator = torch.Generator(device="cuda").manual_seed(seed + 104_729)
    return torch.randn((q.size(0), q.size(2), q.size(1)), generator=generator, device="cuda")


def poison_free_memory() -> None:
    """Leaves NaN in the blocks that torch's allocator hands out next: what a call allocates and never writes shows."""
    blocks = [torch.full((size // 4,), NAN, device="cuda") for size, count in POISON for _ in range(count)]
    del blocks


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor | None,
    causal: bool,
    scale: float | None = None,
    *,
    dlse: torch.Tensor | None = None,
    deterministic: bool = False,
) -> Tensors:
    """dq, dk and dv of <out, dout> + <lse, dlse> by the public function, backward into poisoned memory."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = flashhopper.flash_attn_func(
        *leaves, softmax_scale=scale, causal=causal, deterministic=deterministic, return_lse=True
    )
    pairs = [(result, upstream) for result, upstream in ((out, dout), (lse, dlse)) if upstream is not None]
    poison_free_memory()
    dq, dk, dv = torch.autograd.grad([result for result, _ in pairs], leaves, [upstream for _, upstream in pairs])
    for gradient, leaf in zip((dq, dk, dv), leaves, strict=True):
        assert gradient.shape == leaf.shape
        assert gradient.dtype == leaf.dtype
    return dq, dk, dv


def materialised_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor | None,
    causal: bool,
    dtype: torch.dtype,
    scale: float | None = None,
    dlse: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The same by torch autograd through the whole score matrix in `dtype`: oracle in float64, yardstick in 16 bit."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    scores, weights, _ = softmax_weights(leaves[0], leaves[1], causal, dtype, scale)
    vt = leaves[2].repeat_interleave(q.size(2) // k.size(2), 2).transpose(1, 2)
    outputs = [(weights @ vt).transpose(1, 2)]
    upstream = [torch.zeros_like(outputs[0]) if dout is None else dout.to(dtype)]
    if dlse is not None:
        # The gradient of lse with respect to the scores is the weights. Said so, because a logsumexp in 16 bit would
        # spoil the yardstick: it rounds lse, and takes the weights from that.
        finite = scores.masked_fill(scores == -math.inf, 0.0)
        outputs.append((weights.detach() * finite).sum(-1))
        upstream.append(dlse.to(dtype))
    return list(torch.autograd.grad(outputs, leaves, upstream))


def saved_output_errors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    causal: bool,
    scale: float | None = None,
) -> dict[str, float]:
    """Max error that dq and dk have in exact arithmetic because delta = rowsum(dout * out) is taken from the saved out,
    which is rounded to 16 bit. All flash backward passes do so; autograd through materialised scores does not.
    """
    scale = q.size(3) ** -0.5 if scale is None else scale
    _, weights, _ = softmax_weights(q, k, causal, torch.float64, scale)
    out, _ = materialised(q, k, v, causal, torch.float64, scale)
    shift = (dout.double() * (out.to(q.dtype).double() - out)).sum(3).transpose(1, 2)[..., None]  # (B, H, Sq, 1)
    group = q.size(2) // k.size(2)
    ds = weights * shift * scale
    dq = ds @ k.double().repeat_interleave(group, 2).transpose(1, 2)
    dk = (ds.transpose(2, 3) @ q.double().transpose(1, 2)).unflatten(1, (-1, group)).sum(2)
    return {"dq": dq.abs().max().item(), "dk": dk.abs().max().item(), "dv": 0.0}


def judge_gradients(
    found: Sequence[torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor | None,
    causal: bool,
    scale: float | None = None,
    dlse: torch.Tensor | None = None,
    more: dict[str, float] | None = None,
) -> str | None:
    """The 16-bit rule for each gradient: max error against float64 at most twice that of the same-dtype autograd, plus
    1e-5 (plus `more`, where a test says why); always finite. None where it holds, else what breaks it.
    """
    judged.count += 1
    exact = materialised_gradients(q, k, v, dout, causal, torch.float64, scale, dlse)
    plain = materialised_gradients(q, k, v, dout, causal, q.dtype, scale, dlse)
    numbers = []
    for mine, right, yardstick in zip(found, exact, plain, strict=True):
        if mine.numel() == 0:
            numbers.append(torch.zeros(3, dtype=torch.float64, device=q.device))
            continue
        errors = [(x.double() - right).abs().nan_to_num(math.inf).max() for x in (mine, yardstick)]
        numbers.append(torch.stack([*errors, (~mine.isfinite()).sum().double()]))
    floors = dict.fromkeys(GRADIENTS, 1e-5)
    if k.size(1) == 1:
        # The one weight is 1: the gradients of q and k cancel to zero, exactly so in the yardstick. A kernel subtracts
        # two fp32 sums of head_dim_v products, taken in different orders; dk then adds the rows.
        noise = 2**-17 * v.size(3) ** 0.5 * (q.size(3) ** -0.5 if scale is None else scale)
        floors["dq"] += noise
        floors["dk"] += noise * max(1.0, q.size(1) * q.size(2) / k.size(2)) ** 0.5
    problems = []
    for name, (error, yardstick_error, nan) in zip(GRADIENTS, torch.stack(numbers).tolist(), strict=True):
        allowed = 2 * yardstick_error + floors[name] + (more or {}).get(name, 0.0)
        if nan:
            problems.append(f"{name}: {int(nan)} elements are not finite or were never written")
        elif not error <= allowed:
            problems.append(f"{name}: max error {error:.3e}, allowed {allowed:.3e}")
    return "; ".join(problems) or None


def assert_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor | None,
    causal: bool,
    scale: float | None = None,
    *,
    dlse: torch.Tensor | None = None,
    deterministic: bool = False,
) -> None:
    """One backward held to the rule."""
    found = gradients(q, k, v, dout, causal, scale, dlse=dlse, deterministic=deterministic)
    problem = judge_gradients(found, q, k, v, dout, causal, scale, dlse)
    assert problem is None, problem


def is_on_kernels(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> bool:
    """Whether explain() says that the Hopper backward serves a call."""
    return flashhopper.explain(q, k, v, causal=causal).gradients.startswith("hopper")
