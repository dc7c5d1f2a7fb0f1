"""Who is measured, and what each is held to. Before it: collect.py, benchmarks/recipes.py; after it: fp8/recipe.py,
interface.py.

The 8-bit recipes stand beside fp16, bf16, fp16 with nothing wider than fp16, and the scales of released
FlashAttention-3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .. import fp8
from ..engine.mask import Mask
from ..fp8 import Fp8Recipe
from ..interface import flash_attn_func
from ..plan import explain
from ..testing import Inputs

NAMED = {"paper": Fp8Recipe.paper(), "e4m3": Fp8Recipe.e4m3(), "accurate": Fp8Recipe.accurate()}
# What released FlashAttention-3 has for 8 bits: one scale a (batch, KV head), one accumulator.
FA3 = Fp8Recipe("e4m3", False, False, False, 0, 0, 0, False)
BASELINE = "fa3"
RECIPES = ("accurate", "e4m3", "paper")  # as the report lists them: the default first

# family -> relative rmse over that of FA3's scales, at most
TARGETS: dict[str, dict[str, float]] = {
    "normal": {"accurate": 0.80, "e4m3": 1.05, "paper": 1.05},
    "outlier": {"accurate": 0.50, "e4m3": 0.70, "paper": 0.70},
    "kbias": {"accurate": 0.40, "e4m3": 0.60},
    "peaky": {"accurate": 0.80, "e4m3": 1.05, "paper": 1.05},
    "llm": {"accurate": 0.65, "e4m3": 0.95},
}
VMEAN_TARGET = 3e-3  # relative rmse, for every recipe: values have mean 1
TARGETS_FROM = 2048  # keys: targets are stated for this length and longer ones
NAIVE_KEYS = 128  # keys whose part of a sum naive fp16 adds at once


@dataclass(frozen=True)
class Problem:
    """One set of inputs and how they attend."""

    family: str
    inputs: Inputs  # 16-bit
    softmax_scale: float
    window_size: tuple[int, int]
    causal: bool
    layer: str = ""

    def options(self) -> dict[str, object]:
        """Keyword arguments of the public functions."""
        return {"softmax_scale": self.softmax_scale, "window_size": self.window_size, "causal": self.causal}


@dataclass(frozen=True)
class Outcome:
    """What a contender made of a problem, and where it ran."""

    out: torch.Tensor
    engine: str  # "hopper", "tiled", "emulated" or "torch"
    why: str


@dataclass(frozen=True)
class Contender:
    """One column of the report."""

    name: str
    label: str
    text: str  # one line for readers
    recipe: Fp8Recipe | None
    attend: Callable[[Problem], Outcome]


def judge(recipe: str, family: str, seqlen_k: int, relative: float, baseline: float) -> tuple[float, float] | None:
    """The figure that a recipe's target is about and the most that it may be; None where there is no target."""
    if recipe not in NAMED or seqlen_k < TARGETS_FROM:
        return None
    if family == "vmean":
        return relative, VMEAN_TARGET
    most = TARGETS.get(family, {}).get(recipe)
    return None if most is None or not baseline > 0 else (relative / baseline, most)


def contenders(recipes: tuple[str, ...]) -> tuple[Contender, ...]:
    """Sixteen bits first, then FA3's scales, then the named recipes."""
    sixteen = (
        Contender("fp16", "fp16", "flash_attn_func on fp16 inputs", None, lambda p: _dense(p, torch.float16)),
        Contender("bf16", "bf16", "flash_attn_func on bf16 inputs", None, lambda p: _dense(p, torch.bfloat16)),
        Contender("naive_fp16", "naive fp16", "scores, probabilities and sums all held in fp16", None, _naive),
    )
    # Its sums are taken in float32, which flatters it: the report is about scales here, accumulation has its own table.
    fa3 = replace(FA3, two_level=True)
    text = "one e4m3 scale a (batch, KV head), as released FlashAttention-3, in float32 sums"
    eight = [Contender(BASELINE, "FA3's scales", text, fa3, lambda p: attend_8bit(p, fa3))]
    for name in recipes:
        eight.append(_named(name, NAMED[name]))
    return (*sixteen, *eight)


def _named(name: str, recipe: Fp8Recipe) -> Contender:
    return Contender(name, f"{name}()", str(recipe).replace("QK^T", "QKᵀ"), recipe, lambda p: attend_8bit(p, recipe))


def attend_8bit(problem: Problem, recipe: Fp8Recipe) -> Outcome:
    """One call of the public function, and what explain() says of it."""
    q, k, v = problem.inputs
    options = problem.options()
    plan = explain(q, k, v, **options, fp8=recipe)  # type: ignore[arg-type]
    out = flash_attn_func(q, k, v, **options, fp8=recipe)  # type: ignore[arg-type]
    assert isinstance(out, torch.Tensor)
    return Outcome(out, "hopper" if plan.backend == "hopper" else "emulated", plan.why)


def attend_14bit(problem: Problem, recipe: Fp8Recipe) -> torch.Tensor:
    """Emulation with the sums of Hopper's 8-bit accumulator, in one level or two as the recipe says."""
    qkv = fp8.quantize.quantize(*problem.inputs, recipe)
    out, _ = fp8.emulate.attention(qkv, **problem.options(), accumulation="14bit")  # type: ignore[arg-type]
    return out


def _dense(problem: Problem, dtype: torch.dtype) -> Outcome:
    q, k, v = (x.to(dtype) for x in problem.inputs)
    options = problem.options()
    plan = explain(q, k, v, **options)  # type: ignore[arg-type]
    out = flash_attn_func(q, k, v, **options)  # type: ignore[arg-type]
    assert isinstance(out, torch.Tensor)
    return Outcome(out, plan.backend, plan.why)


def _naive(problem: Problem) -> Outcome:
    """Materialised attention that rounds every intermediate to fp16: scores, probabilities, and after every 128 keys
    the row sum and the output.
    """
    q, k, v = (_round(x.float()) for x in problem.inputs)
    group = q.shape[2] // k.shape[2]
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float16, device=q.device)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            out[b, :, h] = _naive_head(q[b, :, h], k[b, :, h // group], v[b, :, h // group], problem)
    return Outcome(out, "torch", "torch operations; no engine computes this way")


def _naive_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> torch.Tensor:
    rows, keys = q.shape[0], k.shape[0]
    left, right = problem.window_size
    mask = Mask(rows, keys, left, 0 if problem.causal else right)
    scores = _round(_round(q @ k.mT) * problem.softmax_scale)
    scores.masked_fill_(~mask.keep(0, rows, 0, keys, q.device), -math.inf)
    top = scores.amax(-1, keepdim=True).nan_to_num_(neginf=0.0)
    weights = _round(scores.sub_(top).exp_())
    total = q.new_zeros(rows, v.shape[1])
    row_sum = q.new_zeros(rows, 1)
    for begin in range(0, keys, NAIVE_KEYS):
        some = weights[:, begin : begin + NAIVE_KEYS]
        row_sum = _round(row_sum + _round(some.sum(-1, keepdim=True)))
        total = _round(total + _round(some @ v[begin : begin + NAIVE_KEYS]))
    return (total / row_sum.masked_fill(row_sum == 0, 1.0)).half()


def _round(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()
