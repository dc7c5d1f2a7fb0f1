"""Any call that the API admits, on the GPU against float64: 768 problems. What the Hopper kernels serve runs on them;
what they lack is refused by name while they are asked for, and then runs on the tiled engine.
"""

from __future__ import annotations

import re

import pytest
import torch
from gpu_support import DTYPES, judged, poison_free_memory
from hypothesis import HealthCheck, Phase, given, seed, settings

import flashhopper
from attention_problems import Limits, Problem, problems, verdict

LIMITS = Limits(
    dtypes=DTYPES,
    lengths=(0, 1, 2, 7, 8, 63, 64, 65, 79, 80, 81, 127, 128, 129, 160, 191, 192, 193, 255, 256, 257, 384, 385, 512),
    most_tokens=1500,
    most_head_dim=256,
    groups=(1, 1, 2, 3, 4, 8),
)
PARTS, PER_PART = 16, 48
# What the kernels lack, forward or backward: a refusal must name one of these, and a call without them must be served.
LACKING = {"packed": "packed sequences", "window": "sliding windows", "softcap": "softcap", "sink": "attention sinks"}
PROPERTY = settings(
    max_examples=PER_PART,
    deadline=None,
    database=None,
    phases=(Phase.generate,),  # a failure is reported as drawn: making it smaller takes minutes
    suppress_health_check=list(HealthCheck),
)


def check(problem: Problem) -> None:
    judged.count += 1
    try:
        wrong = verdict(problem, "cuda", poison_free_memory)
    except RuntimeError as error:
        lacking = [text for name, text in LACKING.items() if name in problem.features]
        if not any(re.search(f'"hopper" cannot serve this call: .*{text}', str(error)) for text in lacking):
            raise
        with flashhopper.set_backend("auto"):
            wrong = verdict(problem, "cuda", poison_free_memory)
    assert wrong is None, f"{problem}: {wrong}"


@pytest.mark.parametrize("part", range(PARTS))
def test_any_call(part: int) -> None:
    seed(part)(PROPERTY(given(problem=problems(LIMITS))(check)))()


def _sum_of_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
    offsets = torch.tensor([0, q.shape[1]], dtype=torch.int32, device="cuda")
    return flashhopper.flash_attn_varlen_func(q[0], k[0], v[0], offsets, offsets, q.shape[1], q.shape[1]).sum()


def _sum_of_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
    return flashhopper.flash_attn_func(q, k, v, **options).sum()  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize("feature", list(LACKING))
def test_what_is_lacking_is_refused(feature: str) -> None:
    """LACKING tells the truth: take a feature out of it when the kernels have it."""
    q, k, v = (
        torch.randn(1, 200, heads, 64, dtype=torch.bfloat16, device="cuda").requires_grad_() for heads in (4, 2, 2)
    )
    options = {"window": {"window_size": (20, 0)}, "softcap": {"softcap": 2.0}}
    options["sink"] = {"sink": torch.zeros(4, device="cuda")}
    attend = _sum_of_packed if feature == "packed" else _sum_of_dense
    with pytest.raises(RuntimeError, match=LACKING[feature]):
        attend(q, k, v, **options.get(feature, {})).backward()
