"""From the gradients of packed sequences to the arguments of the compiled module's backward, with a fake one. Dense
calls: test_backward_plumbing.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_module import FakeModule, install

Tensors = list[torch.Tensor]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    return install(monkeypatch)


def packed_inputs(total_q: int = 9, total_k: int = 11) -> tuple[Tensors, Tensors]:
    """q, k, v, out, dout and lse of three sequences, and their offsets."""
    shapes = ((total_q, 4, 64), (total_k, 2, 64), (total_k, 2, 40), (total_q, 4, 40), (total_q, 4, 40))
    tensors = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    offsets = [torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 2, total_q], [0, 5, 6, total_k])]
    return [*tensors, torch.randn(4, total_q)], offsets


def run_packed(
    tensors: Tensors, offsets: Tensors, used: tuple[torch.Tensor | None, ...] = (None, None), **options: Any
) -> Tensors:
    q, k, v, out, dout, lse = tensors
    sink, dlse = options.pop("sink", None), options.pop("dlse", None)
    numbers = (0.25, *options.pop("window", (-1, 0)), options.pop("softcap", 0.0), 3, True, "hopper")
    packing = (*offsets, *used, 7, 5)
    found: Tensors = list(
        torch.ops.flashhopper.varlen_backward(dout, dlse, q, k, v, out, lse, *packing, sink, *numbers)
    )
    return found


def test_packed_arguments(module: FakeModule) -> None:
    tensors, offsets = packed_inputs()
    q, k, v, out, dout, lse = tensors
    used = (torch.tensor([1, 0, 7], dtype=torch.int32), None)
    dlse, sink = torch.randn(4, 9), torch.randn(4)
    *gradients, dsink = run_packed(tensors, offsets, used, dlse=dlse, sink=sink, window=(3, 2), softcap=20.0)
    (call,) = module.backward_calls
    for name, x in zip(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), (q, k, v, out, dout, *gradients), strict=True):
        assert call[name] == x.data_ptr()
        assert call[f"{name}_strides"][1:] == x.stride()[:2]
    assert [call[name] for name in ("lse", "dlse", "sink")] == [x.data_ptr() for x in (lse, dlse, sink)]
    assert [call[name] for name in ("cu_seqlens_q", "cu_seqlens_k")] == [x.data_ptr() for x in offsets]
    assert (call["seqused_q"], call["seqused_k"]) == (used[0].data_ptr(), 0)  # type: ignore[union-attr]
    sizes = {"batch": 3, "heads": 4, "kv_heads": 2, "seqlen_q": 7, "seqlen_k": 5, "head_dim": 64, "head_dim_v": 40}
    rest = {"window_left": 3, "window_right": 2, "softcap": 20.0, "totals": (9, 11), "softmax_scale": 0.25}
    assert call | sizes | rest == call
    assert (call["sm_margin"], call["deterministic"]) == (3, True)
    for gradient, x in zip((*gradients, dsink), (q, k, v, sink), strict=True):
        assert (gradient.shape, gradient.dtype, gradient.is_contiguous()) == (x.shape, x.dtype, True)
    assert module.backward_plans[-1] == ((3, 4, 2, 7, 5, 64, 40, 3, 2), FakeModule.BF16, 3, True, 132, (9, 11))


def test_packed_offsets_that_are_not_contiguous_are_copied(module: FakeModule) -> None:
    tensors, offsets = packed_inputs()
    strided = [torch.stack([x, x], 1)[:, 0] for x in offsets]
    run_packed(tensors, strided)
    (call,) = module.backward_calls
    assert all(
        call[name] not in (0, x.data_ptr()) for name, x in zip(("cu_seqlens_q", "cu_seqlens_k"), strided, strict=True)
    )


@pytest.mark.parametrize("totals", [(0, 11), (9, 0), (0, 0)])
def test_a_packed_batch_without_tokens_gives_zeros(module: FakeModule, totals: tuple[int, int]) -> None:
    tensors, offsets = packed_inputs(*totals)
    for gradient, x in zip(run_packed(tensors, offsets), tensors[:3], strict=False):
        assert gradient.shape == x.shape
        assert not gradient.any()
    assert module.backward_calls == []
