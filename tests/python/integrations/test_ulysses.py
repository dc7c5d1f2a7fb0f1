"""examples/ulysses.py in two processes over gloo: output and gradients of attention in one process."""

import pytest
import torch
from frameworks import require

deepspeed = require("deepspeed")

import ulysses_processes  # noqa: E402
from ulysses_processes import ulysses  # noqa: E402


def test_all_to_all() -> None:
    assert max(ulysses.compare(ulysses.attend)) < 1e-5


def test_deepspeed() -> None:
    assert max(ulysses.compare(ulysses_processes.with_deepspeed)) < 1e-5


def test_a_wrong_attention_is_noticed() -> None:
    assert 0.01 < max(ulysses.compare(ulysses_processes.without_exchange)) < 100


def test_heads_that_do_not_divide_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 4)
    q = torch.randn(1, 3, 8, 16)
    with pytest.raises(ValueError, match="k has 2 heads: must be a multiple of the 4 processes"):
        ulysses.attend(q, q[:, :, :2], q[:, :, :2])
