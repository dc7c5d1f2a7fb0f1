"""Any combination that the attention functions admit, drawn by hypothesis and compared with float64. Before it:
tests/python (tiled engine, CPU) and tests/gpu (Hopper kernels), which bring their own limits; after it: the public
functions and reference_attention.

Rule for a result: max error against float64 at most twice that of plain PyTorch in the inputs' dtype, plus 1e-5, plus
half a unit of the largest number (over few numbers the yardstick's error may be small by luck), plus, for gradients,
what the rounding of the saved output does to them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

import flashhopper as fh

LSE_TOLERANCE = {torch.float64: 1e-11}
OTHER_LSE_TOLERANCE = 1e-3  # fp32 sums of exponentials of scores near 10
FLOAT64_TOLERANCE = 1e-10
LAYOUTS = ("contiguous", "heads first", "gaps", "odd gaps")
NAMES = ("q", "k", "v", "sink")
TUNING = ("deterministic", "sm_margin", "pack_gqa")  # options that no result depends on but for rounding
Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Limits:
    """What a suite draws from."""

    dtypes: tuple[torch.dtype, ...]
    lengths: tuple[int, ...]  # favourites, around the edges of tiles
    most_tokens: int
    most_head_dim: int
    groups: tuple[int, ...] = (1, 1, 2, 3, 4)


@dataclass(frozen=True)
class Problem:
    """One call and what is asked of it."""

    lengths_q: tuple[int, ...]  # of each sequence
    lengths_k: tuple[int, ...]
    used_q: tuple[int, ...] | None
    used_k: tuple[int, ...] | None
    is_packed: bool  # else all sequences are equally long
    slack: int  # tokens behind the last packed sequence
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    options: tuple[tuple[str, Any], ...]  # of the function
    has_sink: bool
    gradients_of: tuple[bool, bool, bool, bool]  # of q, k, v, sink
    through: str  # out, lse, both
    layouts: tuple[str, str, str, str]  # of q, k, v, dout
    seed: int

    @property
    def features(self) -> set[str]:
        """Of packed, window, softcap and sink, those that matter here."""
        named = dict(self.options)
        left, right = named["window_size"]
        # A bound that hides nothing is none; nor is a right one of 0, which is causal attention.
        longest_q, longest_k = max(self.lengths_q, default=0), max(self.lengths_k, default=0)
        has_window = 0 <= left < longest_k - 1 or (not named["causal"] and 0 < right < longest_q - 1)
        present = {
            "packed": self.is_packed,
            "window": has_window,
            "softcap": named["softcap"] > 0,
            "sink": self.has_sink,
        }
        return {name for name, is_there in present.items() if is_there}

    @property
    def wants_gradient(self) -> bool:
        return any(self.gradients_of)


def problems(limits: Limits) -> st.SearchStrategy[Problem]:
    """Any problem within the limits."""
    return st.composite(_draw)(limits)


def _draw(draw: Any, limits: Limits) -> Problem:
    def pick(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    def head_dim() -> int:
        return int(8 * draw(st.integers(1, limits.most_head_dim // 8)))

    is_packed = draw(st.booleans())
    count = draw(st.integers(1, 5) if is_packed else st.integers(0, 3))
    most = limits.most_tokens // max(count, 1)
    length = st.one_of(st.sampled_from([n for n in limits.lengths if n <= most]), st.integers(0, most))
    lengths_q, lengths_k = (tuple(draw(length) for _ in range(count)) for _ in range(2))
    if not is_packed:
        lengths_q, lengths_k = (n[:1] * count for n in (lengths_q, lengths_k))
    if pick(False, False, True):
        lengths_k = lengths_q
    has_used = is_packed and pick(False, True)
    used_q, used_k = (
        tuple(draw(st.integers(0, n)) for n in lengths) if has_used else None for lengths in (lengths_q, lengths_k)
    )
    kv_heads = draw(st.integers(1, 3))
    dim = head_dim()
    bound = st.one_of(st.just(-1), st.integers(0, 12), st.integers(0, most))
    options = {
        "causal": draw(st.booleans()),
        "window_size": (draw(bound), draw(bound)) if pick(False, True) else (-1, -1),
        "softcap": pick(0.0, 0.0, 0.0, 2.0, 30.0),
        "softmax_scale": pick(None, None, None, 0.02, 0.5),
        "deterministic": draw(st.booleans()),
        "sm_margin": pick(0, 0, 0, 8),
        "pack_gqa": None if is_packed else pick(None, False, False, True, True),
    }
    has_sink = pick(False, False, True)
    wanted = pick((True,) * 4, (True,) * 4, (False,) * 4, tuple(draw(st.booleans()) for _ in range(4)))
    return Problem(
        *(lengths_q, lengths_k, used_q, used_k, is_packed, pick(0, 0, 3) if is_packed else 0),
        *(kv_heads * pick(*limits.groups), kv_heads, dim, pick(dim, dim, head_dim()), pick(*limits.dtypes)),
        *(tuple(options.items()), has_sink, (*wanted[:3], wanted[3] and has_sink), pick("out", "out", "lse", "both")),
        *(tuple(pick(*LAYOUTS) for _ in range(4)), draw(st.integers(0, 2**31 - 1))),
    )


class Inputs:
    """The tensors of a problem on a device: q, k, v, the sink if there is one, upstream gradients, packing."""

    def __init__(self, problem: Problem, device: str) -> None:
        generator = torch.Generator(device=device).manual_seed(problem.seed)
        batch = len(problem.lengths_q)

        def rows(lengths: tuple[int, ...]) -> tuple[int, ...]:
            return (sum(lengths) + problem.slack,) if problem.is_packed else (batch, *(lengths[:1] or (4,)))

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

        q_rows, k_rows = rows(problem.lengths_q), rows(problem.lengths_k)
        shapes = (
            (*q_rows, problem.heads, problem.head_dim),
            (*k_rows, problem.kv_heads, problem.head_dim),
            (*k_rows, problem.kv_heads, problem.head_dim_v),
            (*q_rows, problem.heads, problem.head_dim_v),
        )
        *self.tensors, self.dout = (
            _laid_out(normal(*shape).to(problem.dtype), layout)
            for shape, layout in zip(shapes, problem.layouts, strict=True)
        )
        lse_shape = (problem.heads, *q_rows) if problem.is_packed else (batch, problem.heads, q_rows[1])
        self.dlse = normal(*lse_shape)
        if problem.has_sink:
            self.tensors.append(normal(problem.heads).to(torch.promote_types(problem.dtype, torch.float32)))
        self.packing: dict[str, Any] = {}
        if problem.is_packed:
            ints = {"dtype": torch.int32, "device": device}
            for side, lengths, used in (
                ("q", problem.lengths_q, problem.used_q),
                ("k", problem.lengths_k, problem.used_k),
            ):
                self.packing[f"cu_seqlens_{side}"] = torch.tensor([0, *itertools.accumulate(lengths)], **ints)
                self.packing[f"seqused_{side}"] = None if used is None else torch.tensor(used, **ints)
                self.packing[f"max_seqlen_{side}"] = max(lengths)


def _laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The values of x (..., rows, heads, head_dim) in another memory layout; NaN in the gaps."""
    if layout == "heads first":
        return x.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout in ("gaps", "odd gaps"):
        *rest, columns = x.shape
        wide = x.new_full((*(n + 2 for n in rest), columns + (8 if layout == "gaps" else 3)), math.nan)
        view = wide[(*(slice(1, n + 1) for n in rest), slice(0, columns))]
        view.copy_(x)
        return view
    return x


def run(problem: Problem, inputs: Inputs, poison: Callable[[], None]) -> tuple[Tensors, Tensors]:
    """out and lse, and the gradients that are wanted, by the public function; poison() spoils free memory."""
    leaves = [x.detach().requires_grad_(w) for x, w in zip(inputs.tensors, problem.gradients_of, strict=False)]
    attend = fh.flash_attn_varlen_func if problem.is_packed else fh.flash_attn_func
    options = {**dict(problem.options), **inputs.packing, "sink": leaves[3] if problem.has_sink else None}
    if not problem.wants_gradient and problem.seed % 2:
        options["out"] = torch.full(inputs.dout.shape, math.nan, dtype=problem.dtype, device=inputs.dout.device)
    poison()
    out, lse = attend(*leaves[:3], return_lse=True, **options)
    if not problem.wants_gradient:
        return [out, lse], []
    poison()
    wanted = [x for x in leaves if x.requires_grad]
    upstream = _upstream(problem, inputs, out.dtype, lse)
    pairs = [(x, g) for x, g in zip((out, lse), upstream, strict=True) if g is not None]
    found = torch.autograd.grad([x for x, _ in pairs], wanted, [g for _, g in pairs])
    return [out.detach(), lse.detach()], list(found)


def _upstream(problem: Problem, inputs: Inputs, dtype: torch.dtype, lse: torch.Tensor) -> list[torch.Tensor | None]:
    """Gradients of out and lse."""
    dout = None if problem.through == "lse" else inputs.dout.to(dtype)
    dlse = None if problem.through == "out" else inputs.dlse.to(lse.dtype)
    return [dout, dlse]


def _oracle(problem: Problem, inputs: Inputs, saved: torch.Tensor) -> tuple[Tensors, Tensors, Tensors]:
    """out and lse in float64, gradients, and how far the error of the out that was saved moves those."""
    leaves = [x.detach().double().requires_grad_() for x in inputs.tensors]
    named = {name: value for name, value in problem.options if name not in TUNING}
    packing = {
        name: x.cpu() if isinstance(x, torch.Tensor) else x
        for name, x in inputs.packing.items()
        if not name.startswith("max")
    }
    out, lse = fh.reference_attention(*leaves[:3], **named, **packing, sink=leaves[3] if problem.has_sink else None)
    results = [out.detach(), lse.detach()]
    if not problem.wants_gradient:
        return results, [], []
    wanted = [x for x, w in zip(leaves, problem.gradients_of, strict=False) if w]
    sees = lse.detach().isfinite()
    dout, dlse = _upstream(problem, inputs, torch.float64, lse)
    loss = out.new_zeros(()) if dout is None else (out * dout).sum()
    if dlse is not None:
        loss = loss + torch.where(sees, lse * dlse, 0.0).sum()
    exact = _gradients(loss, wanted)
    if dout is None:
        return results, exact, [torch.zeros_like(x) for x in exact]
    # delta, the row sum of dout * out, is taken from the saved out, which is held to its own bound, and cancels, up to
    # fp32 noise, against sums of head_dim_v products: an error of delta is one of lse's gradient.
    rounding = (dout * (saved.double() - out.detach())).sum(-1).transpose(-1, -2)
    noise = inputs.dlse * (2.0**-17 * problem.head_dim_v**0.5)
    shifted = torch.where(sees, lse * (rounding + noise), 0.0).sum()
    return results, exact, _gradients(shifted, wanted)


def _gradients(loss: torch.Tensor, wanted: Tensors) -> Tensors:
    if not wanted or not loss.requires_grad:
        return [torch.zeros_like(x) for x in wanted]
    found = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


def _sequences(problem: Problem) -> Iterator[tuple[Any, Any]]:
    """Index of each sequence's rows of q (..., heads, head_dim) and of k."""
    q_begin = k_begin = 0
    for b, (n_q, n_k) in enumerate(zip(problem.lengths_q, problem.lengths_k, strict=True)):
        if not problem.is_packed:
            yield b, b
            continue
        rows = n_q if problem.used_q is None else problem.used_q[b]
        keys = n_k if problem.used_k is None else problem.used_k[b]
        yield slice(q_begin, q_begin + rows), slice(k_begin, k_begin + keys)
        q_begin, k_begin = q_begin + n_q, k_begin + n_k


def _yardstick(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, Tensors]:
    """out and gradients of attention with materialised scores, every operation in the inputs' dtype."""
    leaves = [x.detach().to(problem.dtype).requires_grad_() for x in inputs.tensors]
    q, k, v = leaves[:3]
    sink = leaves[3] if problem.has_sink else None
    out = q.new_zeros(inputs.dout.shape)
    loss = out.new_zeros((), dtype=torch.float32)
    dout, dlse = _upstream(problem, inputs, problem.dtype, inputs.dlse)
    for rows, keys in _sequences(problem):
        one, scores, weights = _plain(problem, q[rows], k[keys], v[keys], sink)
        out[rows] = one.detach()
        if dout is not None:
            loss = loss + (one.float() * dout[rows].float()).sum()
        if dlse is not None:
            # The gradient of lse with respect to the scores is the weights; a logsumexp in 16 bits would spoil it.
            own = dlse[:, rows] if problem.is_packed else dlse[rows]
            loss = loss + ((weights.detach() * scores).sum(-1).float() * own.float()).sum()
    return out, _gradients(loss, [x for x, w in zip(leaves, problem.gradients_of, strict=False) if w])


def _plain(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One sequence, (rows, heads, head_dim): its output, its finite scores and its weights, (heads, rows, keys)."""
    named = dict(problem.options)
    scale = problem.head_dim**-0.5 if named["softmax_scale"] is None else named["softmax_scale"]
    group = problem.heads // problem.kv_heads
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.mT * scale
    if named["softcap"] > 0:
        scores = named["softcap"] * torch.tanh(scores / named["softcap"])
    left, right = named["window_size"]
    right = 0 if named["causal"] else right
    distance = torch.arange(k.shape[1], device=q.device) - torch.arange(q.shape[0], device=q.device)[:, None]
    distance = distance - (k.shape[1] - q.shape[0])
    hidden = (distance > right) & (right >= 0) | (distance < -left) & (left >= 0)
    if sink is not None:
        scores = torch.cat((scores, sink[:, None, None].expand(-1, q.shape[0], 1)), -1)
        hidden = torch.nn.functional.pad(hidden, (0, 1))
    dead = hidden.all(-1, keepdim=True)
    finite = scores.masked_fill(hidden, 0.0)
    weights = scores.masked_fill(hidden & ~dead, -math.inf).softmax(-1).masked_fill(hidden, 0.0)
    return (weights[..., : k.shape[1]] @ v).transpose(0, 1), finite, weights


def verdict(problem: Problem, device: str, poison: Callable[[], None] = lambda: None) -> str | None:
    """None where the engine that serves a problem computes it right, else what is wrong."""
    inputs = Inputs(problem, device)
    (out, lse), found = run(problem, inputs, poison)
    (exact_out, exact_lse), exact, moved = _oracle(problem, inputs, out)
    assert (out.shape, out.dtype, out.is_contiguous()) == (exact_out.shape, problem.dtype, True)
    is_wide = problem.dtype == torch.float64
    assert (lse.shape, lse.dtype) == (exact_lse.shape, torch.float64 if is_wide else torch.float32)
    if not torch.equal(lse == -math.inf, exact_lse == -math.inf):
        return "lse is -inf for other rows than float64's"
    plain_out, plain = _yardstick(problem, inputs)
    names = [f"d{name}" for name, w in zip(NAMES, problem.gradients_of, strict=False) if w]
    tolerance = LSE_TOLERANCE.get(problem.dtype, OTHER_LSE_TOLERANCE)
    dead = exact_lse == -math.inf
    numbers = [_error(lse.double().masked_fill(dead, 0.0), exact_lse.masked_fill(dead, 0.0))]
    bounds = [torch.full_like(numbers[0], tolerance)]
    nothing = torch.zeros_like(exact_out)
    for mine, right, yardstick, shift in zip(
        (out, *found), (exact_out, *exact), (plain_out, *plain), (nothing, *moved), strict=True
    ):
        assert mine.shape == right.shape
        numbers.append(_error(mine, right))
        size = _error(right, torch.zeros_like(right))
        unit = torch.finfo(problem.dtype).eps / 2 * size
        bound = 2 * _error(yardstick, right) + 1e-5 + unit + _error(shift, torch.zeros_like(shift))
        bounds.append(FLOAT64_TOLERANCE * (1 + size) if is_wide else bound)
    errors, allowed = torch.stack([torch.stack(numbers), torch.stack(bounds)]).tolist()
    wrong = [
        f"{name}: max error {error:.3e}, allowed {bound:.3e}"
        for name, error, bound in zip(("lse", "out", *names), errors, allowed, strict=True)
        if not error <= bound
    ]
    return "; ".join(wrong) or None


def _error(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Largest difference, float64; NaN counts as infinite."""
    if a.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=a.device)
    return (a.double() - b.double()).abs().nan_to_num(math.inf).max()
