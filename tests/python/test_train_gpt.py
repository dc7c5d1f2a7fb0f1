"""examples/train_gpt.py for a few steps on the CPU: it agrees with SDPA, and notices an attention that is not right."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import typer

import example_programs

TINY = {"steps": 12, "device": "cpu", "layers": 1, "seqlen": 24, "batch": 2}


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return example_programs.load("train_gpt")


def test_trains_like_sdpa(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    program.main(**TINY)
    text = capsys.readouterr().out
    assert "tiled" in text
    assert "train alike" in text
    assert "do not" not in text


def test_the_loss_falls(program: ModuleType) -> None:
    settings = program.Settings("cpu", 40, 0, 1, 2, 1, 8, 24, 4, 3e-3)
    losses = program.train(settings, program.attend_flashhopper, program.read_text()).losses
    assert losses.isfinite().all()
    assert losses[-5:].mean() < losses[:5].mean() - 0.5


def _without_gradient_of_keys(program: ModuleType) -> object:
    return lambda q, k, v: program.attend_math(q, k.detach(), v)


def _not_causal(program: ModuleType) -> object:
    return lambda q, k, v: program.flashhopper.flash_attn_func(q, k, v)


def _slightly_scaled_values(program: ModuleType) -> object:
    return lambda q, k, v: program.attend_math(q, k, 1.01 * v)


@pytest.mark.parametrize("wrong", [_without_gradient_of_keys, _not_causal, _slightly_scaled_values])
def test_a_wrong_attention_is_noticed(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: object
) -> None:
    monkeypatch.setattr(program, "attend_flashhopper", wrong(program))  # type: ignore[operator]
    with pytest.raises(typer.Exit) as caught:
        program.main(**TINY)
    assert caught.value.exit_code == 1
    assert "do not train alike" in capsys.readouterr().out


def test_nan_never_agrees(program: ModuleType) -> None:
    good = program.Run(torch.ones(20), torch.ones(3))
    names = (program.OURS, program.REFERENCE, program.EQUIVALENT)
    runs = dict.fromkeys(names, good)
    assert program.compare(runs, "cpu").agrees
    for bad in (
        program.Run(torch.full((20,), float("nan")), torch.ones(3)),
        program.Run(torch.ones(20), 0 / torch.zeros(3)),
    ):
        assert not program.compare({**runs, program.OURS: bad}, "cpu").agrees
