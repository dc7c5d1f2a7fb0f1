"""GPU tests: each carries the marker `gpu` and runs with the Hopper engine forced, so that nothing falls back."""

from __future__ import annotations

import faulthandler
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_support
import pytest
import torch

HERE = Path(__file__).parent
HANG_SECONDS = 75


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def hopper_engine() -> Iterator[None]:
    """Skips where there is no Hopper GPU; on one, an engine that cannot run is an error and never a skip."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    import flashhopper

    flashhopper.set_backend("hopper")
    # A kernel that never ends blocks every later one: end the process with a traceback (xdist starts another worker).
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()
    flashhopper.set_backend("auto")


@pytest.fixture(autouse=True)
def count_problems(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Beside each test, how many results it compared with an oracle; the record adds them up."""
    before = gpu_support.judged.count
    yield
    record_property("problems", gpu_support.judged.count - before)


@pytest.fixture
def hopper_gradients(hopper_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiled engine's gradients would pass most tests of the kernels': where there is work, it must not do it."""
    from flashhopper.engine import tiled

    def refusing(served: Any) -> Any:
        def refuse(dout: torch.Tensor, dlse: object, q: torch.Tensor, k: torch.Tensor, *rest: Any) -> object:
            assert q.numel() == 0 or k.numel() == 0, "the tiled engine was asked for gradients"
            return served(dout, dlse, q, k, *rest)

        return refuse

    for name in ("dense_backward", "packed_backward"):
        monkeypatch.setattr(tiled, name, refusing(getattr(tiled, name)))


@pytest.fixture
def empty_cache() -> Iterator[None]:
    """For tests with inputs of many gigabytes: gives the memory back, other workers share the GPU."""
    yield
    gc.collect()
    torch.cuda.empty_cache()
