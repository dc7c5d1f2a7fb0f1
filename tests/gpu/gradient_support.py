"""Gradients of attention with windows, softcap, sink and packed sequences, by the public functions into poisoned
memory, and the 16-bit rule against autograd through materialised scores. Plain attention: gpu_support.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from gpu_support import Tensors, judged, poison_free_memory

import flashhopper


@dataclass(frozen=True)
class Options:
    """What a call asks for beside its tensors; lengths: used tokens of q and k of each packed sequence and the tokens
    that it takes, or none for a dense batch.
    """

    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sink: torch.Tensor | None = None
    scale: float | None = None
    lengths: tuple[tuple[int, int], ...] = ()
    taken: tuple[tuple[int, int], ...] = ()  # as lengths where nothing is said
    deterministic: bool = False

    def slices(self) -> list[tuple[slice, slice]]:
        """The used rows of q and k of each packed sequence."""
        found, at_q, at_k = [], 0, 0
        for (used_q, used_k), (rows_q, rows_k) in zip(self.lengths, self.taken or self.lengths, strict=True):
            found.append((slice(at_q, at_q + used_q), slice(at_k, at_k + used_k)))
            at_q, at_k = at_q + rows_q, at_k + rows_k
        return found


def offsets(lengths: Sequence[int]) -> torch.Tensor:
    """cu_seqlens of these lengths."""
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)


def draw_sink(seed: int, heads: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits of about the size of a row's lse."""
    generator = torch.Generator(device="cuda").manual_seed(seed + 31)
    return (2 + 2 * torch.randn(heads, generator=generator, device="cuda")).to(dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by the public function."""
    numbers = {"softmax_scale": options.scale, "window_size": options.window, "softcap": options.softcap}
    common = {**numbers, "sink": options.sink, "deterministic": options.deterministic, "return_lse": True}
    if not options.lengths:
        return flashhopper.flash_attn_func(q, k, v, **common)  # type: ignore[arg-type,return-value]
    taken = options.taken or options.lengths
    cu_q, cu_k = (offsets([pair[side] for pair in taken]) for side in (0, 1))
    most = [max(pair[side] for pair in taken) for side in (0, 1)]
    used = {}
    if options.taken:
        used = {
            name: torch.tensor([pair[side] for pair in options.lengths], dtype=torch.int32, device="cuda")
            for side, name in enumerate(("seqused_q", "seqused_k"))
        }
    return flashhopper.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *most, **common, **used)  # type: ignore[arg-type,return-value]


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor | None,
    options: Options,
    dlse: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """dq, dk, dv and, with a sink, dsink of <out, dout> + <lse, dlse>, backward into poisoned memory."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, options.sink) if x is not None]
    sink = leaves[3] if options.sink is not None else None
    out, lse = attend(leaves[0], leaves[1], leaves[2], replace(options, sink=sink))
    pairs = [(result, upstream) for result, upstream in ((out, dout), (lse, dlse)) if upstream is not None]
    poison_free_memory()
    found = torch.autograd.grad([result for result, _ in pairs], leaves, [upstream for _, upstream in pairs])
    for gradient, leaf in zip(found, leaves, strict=True):
        assert gradient.shape == leaf.shape
        assert gradient.dtype == leaf.dtype
    return list(found)


def _one(
    tensors: Tensors, sink: torch.Tensor | None, options: Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """out (B, Sq, H, Dv) and a stand-in for lse (B, H, Sq), whose gradient with respect to scores and sink is their
    weights; a logsumexp in 16 bit would round what it takes the weights from. And the sink's weights.
    """
    q, k, v = tensors
    scale = q.size(3) ** -0.5 if options.scale is None else options.scale
    group = q.size(2) // k.size(2)
    kt, vt = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    scores = q.transpose(1, 2) @ kt.transpose(2, 3) * scale
    if options.softcap:
        scores = (scores / options.softcap).tanh() * options.softcap
    left, right = options.window
    diagonal = torch.arange(q.size(1), device=q.device)[:, None] + k.size(1) - q.size(1)
    keys = torch.arange(k.size(1), device=q.device)[None, :]
    hidden = torch.zeros(q.size(1), k.size(1), dtype=torch.bool, device=q.device)
    if left >= 0:
        hidden |= keys < diagonal - left
    if right >= 0:
        hidden |= keys > diagonal + right
    # Rows without a key: finite scores, then no weight, for their gradients would be NaN.
    dead = hidden.all(-1)[:, None]
    finite = scores.masked_fill(hidden, 0.0)
    scores = scores.masked_fill(hidden & ~dead, -math.inf)
    if sink is None:
        weights = (scores.softmax(-1) if k.size(1) else scores).masked_fill(dead, 0.0)
        lse, sink_weight = (weights.detach() * finite).sum(-1), None
    else:
        logit = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = scores.masked_fill(dead, -math.inf)
        full = torch.cat([scores, logit], -1).softmax(-1)
        weights, sink_weight = full[..., :-1], full[..., -1].detach()
        lse = (weights.detach() * finite).sum(-1) + sink_weight * logit[..., 0]
    return (weights @ vt).transpose(1, 2), lse, sink_weight


def _sequences(tensors: Sequence[torch.Tensor], options: Options) -> list[tuple[Tensors, slice | None]]:
    """q, k, v of each sequence as a batch of one, and its rows; of a dense batch all at once."""
    q, k, v = tensors[:3]
    if not options.lengths:
        return [((q, k, v), None)]
    return [((q[None, a], k[None, b], v[None, b]), a) for a, b in options.slices() if a.stop > a.start]


def materialised_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor | None,
    options: Options,
    dtype: torch.dtype,
    dlse: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The same by autograd through the whole score matrix of each sequence in `dtype`."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, options.sink) if x is not None]
    sink = leaves[3] if options.sink is not None else None
    total = leaves[0].new_zeros(())
    for tensors, rows in _sequences(leaves, options):
        out, lse, _ = _one(tensors, sink, options)
        if dout is not None:
            total = total + (out * (dout if rows is None else dout[None, rows]).to(dtype)).sum(dtype=torch.float64)
        if dlse is not None:
            total = total + (lse * (dlse if rows is None else dlse[None, :, rows]).to(dtype)).sum(dtype=torch.float64)
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


def _noise_of_dsink(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor | None, options: Options
) -> float:
    """Four standard deviations of what the rounding of the saved out leaves in dsink = -sum of weight * rowsum(dout *
    out). A sink has one number a head, and the yardstick's error in a few numbers may be small by luck.
    """
    if options.sink is None or dout is None:
        return 0.0
    variance = torch.zeros(q.size(-2), dtype=torch.float64, device=q.device)
    for tensors, rows in _sequences([x.double() for x in (q, k, v)], options):
        out, _, weight = _one(tensors, options.sink.double(), options)
        assert weight is not None
        products = (out * (dout if rows is None else dout[None, rows]).double()).square().sum(-1).transpose(1, 2)
        variance += (weight.square() * products).sum((0, 2))
    return 4 * torch.finfo(q.dtype).eps / 12**0.5 * variance.max().sqrt().item()


def judge(
    found: Sequence[torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor | None,
    options: Options,
    dlse: torch.Tensor | None = None,
) -> str | None:
    """The 16-bit rule for each gradient: max error against float64 at most twice that of the same-dtype autograd, plus
    1e-5 (and what _noise_of_dsink says); always finite. None where it holds, else what breaks it.
    """
    judged.count += 1
    exact = materialised_gradients(q, k, v, dout, options, torch.float64, dlse)
    plain = materialised_gradients(q, k, v, dout, options, q.dtype, dlse)
    # Where a query sees one key its weight is 1, and the gradients of its score cancel to zero, exactly so in the
    # yardstick. A kernel subtracts two fp32 sums of head_dim_v products, taken in different orders.
    noise = 2**-17 * v.size(-1) ** 0.5 * (q.size(-1) ** -0.5 if options.scale is None else options.scale)
    alone = k.size(-3) == 1 or options.window == (0, 0)
    floors = (noise, noise * max(1.0, q.numel() / max(k.numel(), 1)) ** 0.5, 0.0, 0.0) if alone else (0.0,) * 4
    floors = (*floors[:3], _noise_of_dsink(q, k, v, dout, options))
    problems = []
    names = ("dq", "dk", "dv", "dsink")
    for name, mine, right, yardstick, floor in zip(names, found, exact, plain, floors, strict=False):
        if mine.numel() == 0:
            continue
        error, allowed = ((x.double() - right).abs().nan_to_num(math.inf).max().item() for x in (mine, yardstick))
        allowed = 2 * allowed + 1e-5 + floor
        nan = int((~mine.isfinite()).sum())
        if nan:
            problems.append(f"{name}: {nan} elements are not finite or were never written")
        elif not error <= allowed:
            problems.append(f"{name}: max error {error:.3e}, allowed {allowed:.3e}")
    return "; ".join(problems) or None


def assert_right(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor | None,
    options: Options,
    dlse: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """One backward held to the rule; its gradients."""
    found = gradients(q, k, v, dout, options, dlse)
    problem = judge(found, q, k, v, dout, options, dlse)
    assert problem is None, f"{options}: {problem}"
    return found
