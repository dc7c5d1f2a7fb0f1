"""Any 16-bit call that the API admits, on the Hopper kernels against float64, forward and backward: 768 problems."""

from __future__ import annotations

import pytest
from gpu_support import DTYPES, judged, poison_free_memory
from hypothesis import HealthCheck, Phase, given, seed, settings

from attention_problems import Limits, Problem, problems, verdict

LIMITS = Limits(
    dtypes=DTYPES,
    lengths=(0, 1, 2, 7, 8, 63, 64, 65, 79, 80, 81, 127, 128, 129, 160, 191, 192, 193, 255, 256, 257, 384, 385, 512),
    most_tokens=1500,
    most_head_dim=256,
    groups=(1, 1, 2, 3, 4, 7, 8),
)
PARTS, PER_PART = 16, 48
PROPERTY = settings(
    max_examples=PER_PART,
    deadline=None,
    database=None,
    phases=(Phase.generate,),  # a failure is reported as drawn: making it smaller takes minutes
    suppress_health_check=list(HealthCheck),
)


def check(problem: Problem) -> None:
    judged.count += 1
    wrong = verdict(problem, "cuda", poison_free_memory)
    assert wrong is None, f"{wrong}: {problem}"


@pytest.mark.parametrize("part", range(PARTS))
def test_any_call(part: int) -> None:
    seed(part)(PROPERTY(given(problem=problems(LIMITS))(check)))()
