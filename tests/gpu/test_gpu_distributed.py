"""DTensor and FSDP2 on two GPUs with NCCL: the cases of tests/shared/sharding_cases.py on the kernels. A suite of its
own, for machines with two Hopper GPUs (benchmarks/gpu_tests.py).
"""

from __future__ import annotations

import pytest
import torch

import sharding_cases
import two_processes

pytestmark = [pytest.mark.two_gpus, pytest.mark.xdist_group("two_gpus")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> two_processes.Results:
    if torch.cuda.device_count() < sharding_cases.WORLD:
        pytest.skip("needs two GPUs")
    return two_processes.run(sharding_cases.GPU, tmp_path_factory.mktemp("processes"), seconds=150)


@pytest.mark.parametrize("case", sharding_cases.CASES)
def test_two_gpus(results: two_processes.Results, case: str) -> None:
    problem = two_processes.problem(results, case)
    assert problem is None, problem
