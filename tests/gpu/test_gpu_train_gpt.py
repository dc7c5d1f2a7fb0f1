"""examples/train_gpt.py on the GPU: 200 steps on the kernels, forward and backward, follow SDPA's loss curve."""

from __future__ import annotations

from types import ModuleType

import pytest

import example_programs

pytestmark = pytest.mark.usefixtures("hopper_gradients")


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return example_programs.load("train_gpt")


@pytest.mark.xdist_group("training")
def test_trains_like_sdpa(program: ModuleType) -> None:
    settings = program.Settings("cuda", steps=200)
    assert program.engine(settings).startswith("hopper; gradients hopper")
    runs = program.train_all(settings)
    losses = runs[program.OURS].losses
    assert losses.isfinite().all()
    assert losses[-20:].mean() < losses[:20].mean() - 1.0
    found = program.compare(runs, "cuda")
    assert found.agrees, found
