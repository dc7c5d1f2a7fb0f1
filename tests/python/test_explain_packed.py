"""explain() of packed sequences: engine, config row, scheduler, workspace and counts, on both engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_module import FakeModule, install
from torch._subclasses.fake_tensor import FakeTensorMode

import flashhopper as fh
from flashhopper import backends

BF16 = torch.bfloat16
CU_Q, CU_K = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 8], [0, 4, 9, 12]))
USED_K = torch.tensor([4, 0, 2], dtype=torch.int32)
PACKING = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": 5, "max_seqlen_k": 6}


def tensors(total_q: int = 9, total_k: int = 12, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    q, k = torch.randn(total_q, 4, 128).to(dtype), torch.randn(total_k, 2, 128).to(dtype)
    return [q, k, torch.randn(total_k, 2, 64).to(dtype)]


def explain(**options: Any) -> fh.plan.Plan:
    return fh.explain(*tensors(), **{**PACKING, **options})


def test_tiled() -> None:
    plan = explain(causal=True, seqused_k=USED_K)
    assert (plan.backend, plan.why) == ("tiled", "q is on cpu, not on a CUDA device")
    assert (plan.grid, plan.workspace_bytes, plan.is_bound) == (0, 0, False)
    kept = (2 + 3 + 4) + 0 + (1 + 2)  # lengths (3, 4), (0, 0), (5, 2)
    assert plan.flops == 2 * 4 * kept * (128 + 64)
    assert plan.bytes == 2 * (9 * 4 * 128 + 12 * 2 * 192 + 9 * 4 * 64) + 4 * 9 * 4
    assert plan.tiles == 2  # a step for each sequence that has queries
    assert (plan.tile_m, plan.tile_n) == (5, 4)
    text = str(plan)
    for part in (
        "batch 3, 4 heads on 2 KV heads, 9 packed queries (at most 5), 12 keys (at most 6), head_dim 128/64, causal",
        "scheduler  sequence after sequence, their lengths read on the host",
        "2 KV head(s) of the sequence at a time",
        "gradients  tiled engine",
        "2 tiles",
    ):
        assert part in text


def test_it_counts_as_the_flop_counter_does() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    for options in ({}, {"causal": True, "seqused_k": USED_K}, {"window_size": (1, 2)}):
        with FlopCounterMode(display=False) as counter:
            fh.flash_attn_varlen_func(*tensors(), *PACKING.values(), **options)  # type: ignore[arg-type]
        assert counter.get_total_flops() == explain(**options).flops > 0


def test_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    module = install(monkeypatch)
    plan = explain(causal=True, sm_margin=2, softcap=5.0, sink=torch.zeros(4))
    sizes = (3, 4, 2, 5, 6, 128, 64, -1, 0)
    assert module.plan_arguments == (sizes, FakeModule.BF16, 2, 132, (9, 12))
    assert (plan.backend, plan.config) == ("hopper", "fwd_hd128_m128_n160")
    assert plan.workspace_bytes == module.workspace_bytes() + module.packed_workspace_bytes(3, 9)
    assert plan.is_bound
    assert "at most 64 tiles" in str(plan)
    assert "a list made on the device; sequences of the longest tiles first, in each as many KV heads" in plan.scheduler
    assert module.backward_plans[-1] == (sizes, FakeModule.BF16, 2, False, 132, (9, 12))
    assert plan.gradients.startswith("hopper, bwd_hd128_m128_n160: at most 64 tiles of 160 keys")
    assert "in each one KV head at a time" in explain().scheduler
    assert module.forward_calls == module.backward_calls == []


def test_the_list_is_sorted_up_to_as_many_sequences_as_its_kernel_has_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    for batch, order in ((1023, "of the longest tiles first"), (1024, "in their own order")):
        offsets = torch.zeros(batch + 1, dtype=torch.int32)
        assert f"sequences {order}" in explain(cu_seqlens_q=offsets, cu_seqlens_k=offsets).scheduler


def test_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    _, k, v = tensors()
    far = torch.randn(9, 4, 129).to(BF16)[..., :128]
    offsets = torch.stack([CU_Q, CU_Q], 1)[:, 0]
    plan = fh.explain(far, k, v, **{**PACKING, "cu_seqlens_q": offsets})
    assert plan.copies == ("q (row stride 1032 bytes is not a multiple of 16)", "cu_seqlens_q (its stride is not 1)")
    assert explain(seqused_k=USED_K).copies == ()


@pytest.mark.parametrize(("total_q", "total_k"), [(0, 5), (7, 0), (0, 0)])
def test_empty_tensors(monkeypatch: pytest.MonkeyPatch, total_q: int, total_k: int) -> None:
    install(monkeypatch)
    offsets = torch.zeros(3, dtype=torch.int32)
    packing = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 0, "max_seqlen_k": 0}
    plan = fh.explain(*tensors(total_q, total_k), **packing)
    assert plan.flops == 0
    assert ("the problem is empty: nothing is launched" in plan.notes) == (total_q == 0)
    assert plan.gradients == "hopper, zeros: the problem has no queries or no keys"


def test_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    module = install(monkeypatch)
    module.rows = ((64, 64),)
    backends.forget()
    assert "no forward kernel was built" in explain().why
    assert explain().gradients.startswith("hopper, bwd_hd128")
    with fh.set_backend("hopper"):
        assert explain().why.startswith("the call would raise RuntimeError, no forward kernel was built")


def test_offsets_beyond_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine that would run has them: cut off, or refused."""
    wrong = torch.tensor([0, 4, 2, 100], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens_k ends at 100, k has 12 tokens"):
        explain(cu_seqlens_k=wrong)
    install(monkeypatch)
    assert explain(cu_seqlens_k=wrong).flops == 2 * 4 * (3 * 4 + 0 + 5 * 10) * (128 + 64)


def test_fake_lengths_count_as_the_longest() -> None:
    with FakeTensorMode():
        fakes = {name: torch.zeros(4, dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        plan = fh.explain(*tensors(), **{**PACKING, **fakes})
    assert plan.flops == 2 * 4 * 3 * 5 * 6 * (128 + 64)


def test_what_is_missing_or_wrong_is_refused_by_name() -> None:
    for name in PACKING:
        with pytest.raises(ValueError, match=rf"{name} is None: packed sequences need cu_seqlens_q, cu_seqlens_k, max"):
            explain(**{name: None})
    with pytest.raises(ValueError, match="cu_seqlens_q is None"):
        fh.explain(*tensors(), seqused_k=USED_K)
    with pytest.raises(ValueError, match=r"q has shape \(2, 9, 4, 128\): must have 3 dimensions"):
        fh.explain(torch.zeros(2, 9, 4, 128), *tensors()[1:], **PACKING)
    with pytest.raises(ValueError, match=r"packed sequences go to flash_attn_varlen_func"):
        fh.explain(*tensors())
    with pytest.raises(ValueError, match=r"seqused_k has dtype torch\.int64"):
        explain(seqused_k=USED_K.long())
