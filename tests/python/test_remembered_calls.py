"""A repeated plain call runs what the first one prepared: when it does, when it must not, and what is kept."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from fake_module import FakeModule, install
from torch.utils.flop_counter import FlopCounterMode

import flashhopper as fh
from flashhopper import backends
from flashhopper.engine import hopper

ADDRESSES = {"q", "k", "v", "out", "lse", "workspace", "stream"}


@pytest.fixture(params=["python", "compiled"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    """Once for each way to read the layouts of tensors."""
    if request.param == "python":
        monkeypatch.setattr(hopper, "read_layouts", hopper.layouts)
    elif hopper.read_layouts is hopper.layouts:
        pytest.skip("this torch or this build has no other way to read layouts")
    return install(monkeypatch)


def inputs(seqlen: int = 6, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (torch.randn(2, seqlen, heads, 64).to(dtype) for heads in (4, 2, 2))
    return q, k, v


def static(call: dict[str, float]) -> dict[str, float]:
    """What does not belong to one call alone."""
    return {name: value for name, value in call.items() if name not in ADDRESSES}


def test_a_repeated_call_equals_the_first(module: FakeModule) -> None:
    first, second = inputs(), inputs()
    for q, k, v in (first, second):
        out = fh.flash_attn_func(q, k, v, causal=True)
        assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, q.dtype, True)
        assert [module.calls[-1][name] for name in "qkv"] == [x.data_ptr() for x in (q, k, v)]
        assert module.calls[-1]["out"] == out.data_ptr()
    assert module.prepared == 1
    assert static(module.calls[0]) == static(module.calls[1])
    out, lse = fh.flash_attn_func(*first, causal=True, return_lse=True)  # lse is no part of what is prepared
    assert module.prepared == 1
    assert (lse.shape, lse.dtype, lse.data_ptr()) == ((2, 4, 6), torch.float32, module.calls[-1]["lse"])
    module.stream = 88
    fh.flash_attn_func(*first, causal=True)
    assert (module.prepared, module.calls[-1]["stream"], module.calls[-1]["workspace"]) == (1, 88, 1002)


def test_whatever_the_kernel_is_told_is_told_apart(module: FakeModule) -> None:
    q, k, v = inputs()
    wide = torch.randn(2, 6, 2, 128, dtype=q.dtype)[..., :64]
    calls = [
        ((q, k, v), {}),
        ((q, k, v), {"causal": True}),
        ((q, k, v), {"softmax_scale": 0.5}),
        ((q, k, v), {"softmax_scale": 0.25}),
        ((q, k, v), {"sm_margin": 2}),
        ((q, wide, v), {}),
        ((q, k, wide), {}),
        ((torch.randn(2, 6, 4, 128, dtype=q.dtype)[..., :64], k, v), {}),
        ((q.half(), k.half(), v.half()), {}),
        ((q[:, :5], k, v), {}),
        ((q, k[:, :5], v[:, :5]), {}),
        ((q, k, torch.randn(2, 6, 2, 32, dtype=q.dtype)), {}),
    ]
    for tensors, options in calls:
        fh.flash_attn_func(*tensors, **options)
    assert module.prepared == len(calls)
    for tensors, options in calls:
        fh.flash_attn_func(*tensors, **options)
    assert module.prepared == len(calls)
    assert [static(c) for c in module.calls[: len(calls)]] == [static(c) for c in module.calls[len(calls) :]]


def test_the_backend_is_asked_every_time(module: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs()
    fh.flash_attn_func(*tensors)
    with fh.set_backend("tiled"):
        out = fh.flash_attn_func(*tensors)
    assert len(module.calls) == 1
    assert (out - fh.reference_attention(*tensors)[0]).abs().max() < 2e-2
    with fh.set_backend("hopper"):
        fh.flash_attn_func(*tensors)
    assert len(module.calls) == 2
    backends.forget()
    assert hopper.remembered == {}
    monkeypatch.setattr(hopper, "_capabilities", {torch.device("cuda", 0): (8, 0)})
    fh.flash_attn_func(*tensors)
    assert len(module.calls) == 2


def test_an_odd_address_is_copied_and_spoils_nothing(module: FakeModule) -> None:
    q, k, v = inputs()
    odd = torch.randn(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape)
    for tensors in ((q, odd, v), (q, k, v), (q, odd, v), (q, k, v)):
        fh.flash_attn_func(*tensors)
        assert (module.calls[-1]["k"] == k.data_ptr()) == (tensors[1] is k)
        assert module.calls[-1]["k"] % 16 == 0
    assert len({tuple(static(c).items()) for c in module.calls}) == 1
    assert len(hopper.remembered) == 1


def test_strides_that_need_a_copy_are_not_remembered(module: FakeModule) -> None:
    q, k, v = inputs()
    k = torch.randn(2, 6, 2, 128, dtype=k.dtype)[..., ::2]
    for _ in range(2):
        fh.flash_attn_func(q, k, v)
    assert hopper.remembered == {}
    assert all(c["k"] != k.data_ptr() for c in module.calls)


def test_bad_inputs_after_a_good_call_still_raise(module: FakeModule) -> None:
    q, k, v = inputs()
    fh.flash_attn_func(q, k, v)
    for tensors in (
        (q, k[:, :5], v),
        (q, k.half(), v),
        (q[:1], k, v),
        (q[0], k, v),
        (q, k[:, :, :, :32], v),
        (q, 3, v),
    ):
        with pytest.raises(ValueError, match="must"):
            fh.flash_attn_func(*tensors)
    for options in (
        {"softmax_scale": "1"},
        {"softmax_scale": float("nan")},
        {"softmax_scale": [1.0]},
        {"sm_margin": -1},
    ):
        with pytest.raises(ValueError, match="must"):
            fh.flash_attn_func(q, k, v, **options)
    with pytest.raises(ValueError, match="window_size"):
        fh.flash_attn_func(q, k, v, window_size=(-2, 0))
    with pytest.raises(NotImplementedError, match="num_splits"):
        fh.flash_attn_func(q, k, v, num_splits=2)
    assert len(module.calls) == len(hopper.remembered) == 1


@pytest.mark.parametrize("error", [RuntimeError("launch failed"), ValueError("q cannot be moved by TMA")])
def test_a_failed_call_is_not_remembered(module: FakeModule, error: Exception) -> None:
    tensors = inputs()
    module.error = error
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            fh.flash_attn_func(*tensors)
        assert hopper.remembered == {}
    module.error = None
    fh.flash_attn_func(*tensors)
    module.error = error
    with pytest.raises(type(error), match=str(error)):
        fh.flash_attn_func(*tensors)


def test_other_ways_are_not_cut_short(module: FakeModule) -> None:
    q, k, v = inputs()
    fh.flash_attn_func(q, k, v)
    with FlopCounterMode(display=False) as counter:
        fh.flash_attn_func(q, k, v)
    assert counter.get_total_flops() > 0
    with torch.autocast("cpu", dtype=torch.float16):
        fh.flash_attn_func(q, k, v)
    assert module.calls[-1]["dtype"] == FakeModule.FP16
    out = fh.flash_attn_func(q.requires_grad_(), k, v)
    assert isinstance(out, torch.Tensor)
    assert out.requires_grad
    with torch.no_grad():
        assert not fh.flash_attn_func(q, k, v).requires_grad
    assert len(module.calls) == 5
    q = q.detach()
    fh.flash_attn_func(q, k, v, window_size=(2, 0))
    assert module.calls[-1]["window_left"] == 2
    fh.flash_attn_func(q, k, v, softcap=3.0)
    fh.flash_attn_func(q, k, v, sink=torch.zeros(q.shape[2]))
    assert len(module.calls) == 6
    assert len(module.forward_calls) == 2
    assert len(hopper.remembered) == 1


def test_what_is_kept_is_bounded_and_holds_no_tensor(module: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "MOST_REMEMBERED", 4)
    references = []
    for seqlen in range(1, 11):
        tensors = inputs(seqlen)
        references += [weakref.ref(x) for x in tensors]
        fh.flash_attn_func(*tensors)
        assert 1 <= len(hopper.remembered) <= 4
    del tensors
    gc.collect()
    assert all(reference() is None for reference in references)


def test_the_default_stream_is_not_asked_whether_it_captures(
    module: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: asked.append(1) or module.capturing)
    tensors = inputs()
    module.stream = 0
    for _ in range(2):
        fh.flash_attn_func(*tensors)
    assert [c["workspace"] for c in module.calls] == [1001, 1001]
    assert asked == []
    module.stream, module.capturing = 77, True
    for _ in range(2):
        fh.flash_attn_func(*tensors)
    assert [c["workspace"] for c in module.calls[2:]] == [1002, 1003]


def test_threads_share_what_is_remembered(module: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "MOST_REMEMBERED", 3)
    problems = [inputs(seqlen) for seqlen in range(1, 6)]
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for turn in range(200):
                q, k, v = problems[turn % len(problems)]
                assert fh.flash_attn_func(q, k, v).shape == q.shape
        except BaseException as error:  # told below, in the thread of the test
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    seqlens = {x[0].data_ptr(): x[0].shape[1] for x in problems}
    assert len(module.calls) == 400
    assert all(c["seqlen_q"] == c["seqlen_k"] == seqlens[int(c["q"])] for c in module.calls)
