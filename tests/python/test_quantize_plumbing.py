"""What the Hopper quantiser is called with: addresses, strides, sizes and flags, on the fake compiled module."""

from __future__ import annotations

import pytest
import torch
from fake_module import FakeModule, install

from flashhopper.engine.hopper_quantize import NO_OFFSETS, Numbers, quantize, quantize_packed, transpose_values
from flashhopper.engine.tiled import Packing


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    return install(monkeypatch)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """GQA, ragged lengths, head dimensions that are computed at the next larger ones."""
    q = torch.zeros(2, 4, 130, 72, dtype=torch.bfloat16).transpose(1, 2)
    return q, torch.zeros(2, 257, 2, 72, dtype=torch.bfloat16), torch.zeros(2, 257, 2, 104, dtype=torch.bfloat16)


def test_call(module: FakeModule) -> None:
    q, k, v = inputs()
    signs = torch.ones(96)
    found = quantize(q, k, v, Numbers("int8", signs, smooth_k=True, center_v=True, q_block=1))
    (call,) = module.quantize_calls
    assert call["tensors"] == [
        (q.data_ptr(), 4 * 130 * 72, 72, 130 * 72),
        (k.data_ptr(), 257 * 144, 144, 72),
        (v.data_ptr(), 257 * 208, 208, 104),
    ]
    assert call["outputs"] == tuple(x.data_ptr() for x in found if x is not None)
    assert 0 not in call["outputs"]
    assert call["signs"] == signs.data_ptr()
    assert call["sizes"] == (2, 4, 2, 130, 257, 72, 104, -1, -1)
    assert (call["columns"], call["blocks"], call["stream"]) == ((96, 128), (1, 0), module.stream)
    assert (call["dtype"], call["format"], call["flags"]) == (module.BF16, module.INT8, 7)
    assert (call["offsets"], call["totals"]) == (NO_OFFSETS, (0, 0))
    shapes = [tuple(x.shape) for x in found if x is not None]
    assert shapes == [
        *((2, 130, 4, 96), (2, 257, 2, 96), (2, 2, 128, 384)),
        *((2, 4, 130), (2, 2, 3), (2, 2, 3)),
        *((2, 4, 130), (2, 2, 96), (2, 2, 128)),
    ]
    assert [x.dtype for x in (found.q, found.k, found.v)] == [torch.int8, torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize(("options", "flags"), [({}, 0), ({"smooth_k": True}, 2), ({"center_v": True}, 4)])
def test_what_a_recipe_lacks_is_null(module: FakeModule, options: dict[str, bool], flags: int) -> None:
    found = quantize(*inputs(), Numbers(**options))  # type: ignore[arg-type]
    (call,) = module.quantize_calls
    assert (call["flags"], call["signs"], call["format"], call["blocks"]) == (flags, 0, module.E4M3, (128, 0))
    assert [address == 0 for address in call["outputs"][6:]] == [x is None for x in found[6:]]
    assert found.q_scale.shape == (2, 4, 2)
    assert found.q.dtype == torch.float8_e4m3fn


def test_rows_that_are_not_contiguous_are_copied(module: FakeModule) -> None:
    q, _, v = inputs()
    spread = torch.zeros(2, 257, 2, 144, dtype=torch.bfloat16)[..., ::2]
    quantize(q, spread, v)
    address, *strides = module.quantize_calls[0]["tensors"][1]
    assert address != spread.data_ptr()
    assert strides == [257 * 144, 144, 72]


@pytest.mark.parametrize(("q_block", "q_scales"), [(1, 130), (128, 130 // 128 + 3 + 1)])
def test_packed_call(module: FakeModule, q_block: int, q_scales: int) -> None:
    """Three sequences, in chunks of 128 rows that they do not share."""
    q, k, v = (x[0] for x in inputs())
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 100, 100, 130], [0, 7, 200, 257]))
    used = torch.tensor([7, 0, 50], dtype=torch.int32)
    sizes = (3, 130, 4, 72, 257, 2, 104)
    numbers = Numbers("int8", smooth_k=True, center_v=True, q_block=q_block)
    found = quantize_packed(q, k, v, numbers, Packing(cu_q, cu_k, None, used, 100, 193), sizes)
    (call,) = module.quantize_calls
    assert [(a, *rest) for a, _, *rest in call["tensors"]] == [(x.data_ptr(), *x.stride()[:2]) for x in (q, k, v)]
    assert call["offsets"] == (cu_q.data_ptr(), cu_k.data_ptr(), 0, used.data_ptr(), 0)
    assert (call["totals"], call["sizes"]) == ((130, 257), (3, 4, 2, 100, 193, 72, 104, -1, -1))
    blocks = 257 // 128 + 3 + 1
    assert [tuple(x.shape) for x in found if x is not None] == [
        *((130, 4, 96), (257, 2, 96), (2, 128, 128 * blocks)),
        *((4, q_scales), (2, blocks), (2, blocks)),
        *((4, 130), (3, 2, 96), (3, 2, 128)),
    ]


def test_transposition(module: FakeModule) -> None:
    v = torch.zeros(2, 2, 300, 50, dtype=torch.float8_e4m3fn).transpose(1, 2)
    found = transpose_values(v)
    assert found.shape == (2, 2, 64, 384)
    (call,) = module.transpose_calls
    assert call["v"] == (v.data_ptr(), 2 * 300 * 50, 50, 300 * 50)
    assert list(call.values())[1:] == [found.data_ptr(), 2, 2, 300, 50, module.stream]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qk_format": "e5m2"}, "qk_format is 'e5m2'"),
        ({"q_block": 64}, "q_block is 64"),
        ({"signs": torch.ones(72)}, r"signs is torch.float32 \(72,\): it must be float32 \(96,\)"),
        ({"signs": torch.ones(96, dtype=torch.float64)}, "signs is torch.float64"),
    ],
)
def test_refusals(module: FakeModule, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(*inputs(), Numbers(**options))  # type: ignore[arg-type]
    assert module.quantize_calls == []
