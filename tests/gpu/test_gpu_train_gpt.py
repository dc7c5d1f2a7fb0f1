"""examples/train_gpt.py on the GPU: 200 steps on the kernels, forward and backward, follow SDPA's loss curve."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.usefixtures("hopper_gradients")
PROGRAM = Path(__file__).parents[2] / "examples" / "train_gpt.py"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


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
