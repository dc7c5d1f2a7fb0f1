"""DTensor and FSDP2 on two processes with gloo: sharded attention equals that of one process, gradients too, and moves
nothing where batch or heads are split alike.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import flashhopper.distributed
import sharding_cases
import two_processes
from flashhopper.distributed import sharding

needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> two_processes.Results:
    return two_processes.run(sharding_cases.CPU, tmp_path_factory.mktemp("processes"), seconds=300)


@needs_gloo
@pytest.mark.xdist_group("distributed")
@pytest.mark.parametrize("case", sharding_cases.CASES)
def test_two_processes(results: two_processes.Results, case: str) -> None:
    problem = two_processes.problem(results, case)
    assert problem is None, problem


def test_what_did_not_finish_or_failed_is_a_problem() -> None:
    assert two_processes.problem([{"batch": ""}, {"batch": ""}], "batch") is None
    assert two_processes.problem([{"batch": ""}, {}], "batch") == "rank 1 did not finish it"
    assert two_processes.problem([{"batch": "wrong"}, {"batch": ""}], "batch") == "rank 0: wrong"


def test_nan_and_differences_are_noticed() -> None:
    right = torch.ones(3)
    sharding_cases.assert_near(right.clone(), right, 0.0, "out")
    for wrong in (right * float("nan"), right * (1 + 1e-6), right[:2]):
        with pytest.raises(AssertionError, match="out"):
            sharding_cases.assert_near(wrong, right, 0.0, "out")


@pytest.mark.parametrize(
    ("kv_heads", "mesh", "even"),
    [(8, (2,), True), (8, (2, 4), True), (8, (4, 4), True), (24, (4, 4), False), (3, (2,), False), (1, (2,), False)],
)
def test_when_heads_split_evenly(kv_heads: int, mesh: tuple[int, ...], even: bool) -> None:
    assert sharding._splits_evenly(kv_heads, mesh) == even


def test_every_operator_has_a_rule() -> None:
    names = [name for name in dir(torch.ops.flashhopper) if not name.startswith("_") and name != "name"]
    assert {operator._schema.name for operator in sharding._RULES} == {f"flashhopper::{name}" for name in names}
    assert flashhopper.distributed.register is sharding.register
