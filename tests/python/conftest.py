"""Shared set-up: one thread a test (the suite measures and must not fight for cores), a clean backend choice."""

from collections.abc import Iterator

import pytest
import torch

import flashhopper
from flashhopper import backends

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _clean_backend() -> Iterator[None]:
    torch.manual_seed(0)
    flashhopper.set_backend("auto")
    backends.forget()
    yield
    flashhopper.set_backend("auto")
    backends.forget()
