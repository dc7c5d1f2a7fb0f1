"""Any call that the API admits, on the tiled engine against float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import small_tiles
from hypothesis import HealthCheck, given, settings

import attention_problems
import flashhopper as fh
from attention_problems import Limits, Problem, problems, verdict

LIMITS = Limits(
    dtypes=(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    lengths=(0, 1, 2, 15, 16, 17, 31, 32, 33),
    most_tokens=90,
    most_head_dim=40,
)
PROPERTY = settings(
    max_examples=300, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@PROPERTY
@given(problem=problems(LIMITS))
def test_any_call(problem: Problem) -> None:
    with small_tiles():
        wrong = verdict(problem, "cpu")
    assert wrong is None, wrong


BASE = Problem(
    *((40, 40), (50, 50), None, None, False, 0, 4, 2, 16, 16, torch.bfloat16),
    (
        *(("causal", True), ("window_size", (20, 0)), ("softcap", 2.0), ("softmax_scale", 0.5)),
        *(("deterministic", False), ("sm_margin", 0)),
    ),
    *(True, (True,) * 4, "both", ("contiguous",) * 4, 5),
)


@pytest.mark.parametrize(
    "change",
    [
        *({"window_size": (19, 0)}, {"causal": False, "window_size": (20, 1)}, {"softcap": 0.0}, {"softcap": 2.1}),
        *({"softmax_scale": 0.49}, {"sink": None}),
    ],
    ids=str,
)
def test_a_call_that_computes_something_else_is_noticed(
    change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fh.flash_attn_func
    assert verdict(BASE, "cpu") is None
    monkeypatch.setattr(fh, "flash_attn_func", lambda *x, **options: right(*x, **{**options, **change}))
    if "sink" in change:  # its gradient, too, would be missing
        with pytest.raises(RuntimeError, match="not have been used"):
            verdict(BASE, "cpu")
    else:
        assert verdict(BASE, "cpu") is not None


@pytest.mark.parametrize("index", range(4))
def test_a_gradient_that_is_off_is_noticed(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention_problems.run

    def off(*arguments: Any) -> Any:
        results, gradients = right(*arguments)
        gradients[index] = gradients[index] * 1.03
        return results, gradients

    monkeypatch.setattr(attention_problems, "run", off)
    assert f"d{attention_problems.NAMES[index]}: max error" in (verdict(BASE, "cpu") or "")


def test_what_is_drawn_covers_the_interface() -> None:
    """Each feature alone and with each other, forward alone and backward, empty and single tokens."""
    drawn: list[Problem] = []

    @PROPERTY
    @given(problem=problems(LIMITS))
    def collect(problem: Problem) -> None:
        drawn.append(problem)

    collect()
    features = {"packed", "window", "softcap", "sink"}
    for some in itertools.chain(itertools.combinations(features, 1), itertools.combinations(features, 2)):
        assert any(set(some) <= problem.features for problem in drawn), some
    assert sum(not problem.features for problem in drawn) >= 3
    for question in (
        lambda p: p.wants_gradient,
        lambda p: not p.wants_gradient,
        lambda p: 0 in (*p.lengths_q, *p.lengths_k),
        lambda p: 1 in (*p.lengths_q, *p.lengths_k),
        lambda p: p.used_q is not None,
        lambda p: p.heads > p.kv_heads > 1,
        lambda p: p.heads > p.kv_heads and dict(p.options)["pack_gqa"] is True,
        lambda p: p.heads > p.kv_heads and dict(p.options)["pack_gqa"] is False,
        lambda p: p.head_dim != p.head_dim_v,
        lambda p: any(q > k for q, k in zip(p.lengths_q, p.lengths_k, strict=True)) and dict(p.options)["causal"],
    ):
        assert sum(map(question, drawn)) >= 10
