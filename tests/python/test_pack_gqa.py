"""pack_gqa on its way to the compiled module, what it refuses and what explain() says of it; the library's own choice
where the compiled module is there.
"""

from __future__ import annotations

import re

import pytest
import torch
from fake_module import FakeModule, install

import flashhopper as fh
from flashhopper.engine import hopper

REAL = hopper.module
CODES = {None: -1, False: 0, True: 1}
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    return install(monkeypatch)


def tensors(heads: int = 8, kv_heads: int = 2, seqlen_q: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    q = torch.randn(2, seqlen_q, heads, 64).to(dtype)
    k, v = (torch.randn(2, 7, kv_heads, 64).to(dtype) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize(("pack_gqa", "code"), CODES.items(), ids=str)
def test_each_way_to_the_module_carries_it(module: FakeModule, pack_gqa: bool | None, code: int) -> None:
    q, k, v = tensors()
    fh.flash_attn_func(q, k, v, pack_gqa=pack_gqa)
    fh.flash_attn_qkvpacked_func(torch.cat((q[:, :5], k[:, :5], v[:, :5]), 2), num_heads_q=8, pack_gqa=pack_gqa)
    fh.flash_attn_func(q.requires_grad_(), k, v, pack_gqa=pack_gqa).sum().backward()
    torch.ops.flashhopper.forward(q.detach(), k, v, None, 0.1, -1, 0, 0.0, 0, False, "auto", pack_gqa)
    assert [call["pack_gqa"] for call in module.calls] == [code] * 4
    fh.flash_attn_func(q.detach(), k, v, softcap=20.0, pack_gqa=pack_gqa)
    assert [call["pack_gqa"] for call in module.forward_calls] == [code]
    assert len(module.backward_calls) == 1


def test_operators_pack_where_it_pays_unless_told(module: FakeModule) -> None:
    torch.ops.flashhopper.forward(*tensors(), None, 0.1, -1, 0, 0.0, 0, False, "auto")
    assert module.calls[0]["pack_gqa"] == -1
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    fh.flash_attn_varlen_func(*(x[0] for x in tensors()), offsets, offsets, 5, 5)
    assert module.forward_calls[0]["pack_gqa"] == -1


def test_remembered_calls_differ_by_it(module: FakeModule) -> None:
    given = tensors()
    for _ in range(2):
        for pack_gqa in CODES:
            fh.flash_attn_func(*given, pack_gqa=pack_gqa)
    assert module.prepared == 3
    assert [call["pack_gqa"] for call in module.calls] == [-1, 0, 1] * 2
    for equal in (0, 1):  # as dictionary keys, equal to the remembered ones
        with pytest.raises(ValueError, match=f"pack_gqa is {equal}: must be None"):
            fh.flash_attn_func(*given, pack_gqa=equal)  # type: ignore[arg-type]


def test_the_tiled_engine_ignores_it() -> None:
    given = tensors(dtype=torch.float32)
    with fh.set_backend("tiled"):
        expected, *others = (fh.flash_attn_func(*given, causal=True, pack_gqa=pack) for pack in CODES)
        assert all(torch.equal(other, expected) for other in others)
        assert fh.explain(*given, pack_gqa=True).packing == ""


@pytest.mark.parametrize("pack_gqa", [1, 0, "auto"])
def test_what_is_no_choice(pack_gqa: object) -> None:
    for call in (fh.flash_attn_func, fh.explain):
        with pytest.raises(ValueError, match=re.escape(f"pack_gqa is {pack_gqa!r}: must be None (where it pays)")):
            call(*tensors(), pack_gqa=pack_gqa)  # type: ignore[arg-type]


def test_groups_that_cannot_be_packed() -> None:
    given = tensors(67, 1)
    message = re.escape("pack_gqa is True, q has 67 heads, k has 1: heads / kv_heads must have a divisor from 2 to 64")
    for call in (fh.flash_attn_func, fh.explain):
        with pytest.raises(ValueError, match=message):
            call(*given, pack_gqa=True)
    fake = [x.to("meta") for x in given]
    with pytest.raises(ValueError, match=message):
        torch.ops.flashhopper.forward(*fake, None, 0.1, -1, 0, 0.0, 0, False, "auto", True)
    for pack_gqa in (None, False):
        assert fh.flash_attn_func(*given, pack_gqa=pack_gqa).shape == given[0].shape
    for heads in (1, 2, 7, 64, 134):
        assert fh.flash_attn_func(*tensors(heads, 1), pack_gqa=True).shape[2] == heads
    assert fh.flash_attn_func(*tensors(67, 67), pack_gqa=True).shape[2] == 67


def test_calls_without_packing_refuse_it_by_name() -> None:
    q, k, v = tensors()
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="pack_gqa=True is not available in flash_attn_varlen_func"):
        fh.flash_attn_varlen_func(q[0], k[0], v[0], offsets, offsets, 5, 5, pack_gqa=True)
    packing = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 5, "max_seqlen_k": 5}
    with pytest.raises(NotImplementedError, match="pack_gqa=True is not available in packed calls"):
        fh.explain(q[0], k[0], v[0], pack_gqa=True, **packing)  # type: ignore[arg-type]
    for call in (fh.flash_attn_func, fh.explain):
        with pytest.raises(NotImplementedError, match="pack_gqa=True is not available in 8-bit calls"):
            call(q, k, v, fp8=fh.Fp8Recipe(), pack_gqa=True)
        call(q, k, v, fp8=fh.Fp8Recipe(), pack_gqa=False)


def test_compiled_calls_carry_it(module: FakeModule) -> None:
    q, k, v = tensors()
    run = torch.compile(lambda *x: fh.flash_attn_func(*x, pack_gqa=True), backend="eager", fullgraph=True)
    run(q, k, v)
    assert [call["pack_gqa"] for call in module.calls] == [1]


def test_explain(module: FakeModule) -> None:
    plan = fh.explain(*tensors(), pack_gqa=True)
    assert plan.packed_heads == 4
    assert "packing    4 of the 4 query heads of a KV head share a tile: pack_gqa=True" in str(plan)
    assert "each query head has tiles of its own: pack_gqa=False" in str(fh.explain(*tensors(), pack_gqa=False))
    assert "its own: no sharing saves key blocks" in str(fh.explain(*tensors()))
    assert "packing" not in str(fh.explain(*tensors(2, 2)))
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    plan = fh.explain(
        *(x[0] for x in tensors()), cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=5, max_seqlen_k=5
    )
    assert "packing    each query head has tiles of its own, as in all packed sequences" in str(plan)


needs_module = pytest.mark.skipif(REAL is None or not REAL.forward_configs(), reason=hopper.load_error)


def real_plan(
    heads: int,
    kv_heads: int,
    seqlen_q: int,
    pack_gqa: int = -1,
    totals: tuple[int, int] = (0, 0),
    window: tuple[int, int] = (-1, 0),
) -> dict[str, object]:
    sizes = (2, heads, kv_heads, seqlen_q, 8192, 8, 8, *window)
    made: dict[str, object] = REAL.forward_plan(sizes, REAL.BF16, 0, 132, totals, pack_gqa)
    return made


@needs_module
@pytest.mark.parametrize(
    ("heads", "kv_heads", "seqlen_q", "packed"),
    [(64, 8, 1, 8), (64, 8, 40, 8), (8, 8, 1, 1), (64, 8, 8192, 8), (71, 1, 1, 1), (128, 1, 1, 64), (21, 3, 5, 7)],
)
def test_heads_share_tiles_where_it_pays(heads: int, kv_heads: int, seqlen_q: int, packed: int) -> None:
    plan = real_plan(heads, kv_heads, seqlen_q)
    assert plan["packed_heads"] == packed
    positions = plan["tile_m"] // 64 * (64 // packed)  # type: ignore[operator]
    assert plan["tiles"] == 2 * (heads // packed) * -(-seqlen_q // positions)
    assert plan["grid"] == min(132, plan["tiles"])  # type: ignore[type-var]
    assert plan["flops"] == real_plan(heads, kv_heads, seqlen_q, 0)["flops"]


@needs_module
def test_long_queries_share_tiles_where_a_mask_lets_them() -> None:
    """Without one, tiles of 192 rows are as many as those of 24 positions of eight heads at 192 queries, not at 200."""
    full = (-1, -1)
    assert real_plan(64, 8, 1, window=full)["packed_heads"] == 8
    assert real_plan(64, 8, 192, window=full)["packed_heads"] == 1
    assert real_plan(64, 8, 200, window=full)["packed_heads"] == 8
    assert real_plan(64, 8, 8192, window=(127, 0))["packed_heads"] == 8
    assert real_plan(40, 8, 8192)["packed_heads"] == 1  # 4 of 64 rows would stay unused


@needs_module
def test_pack_gqa_overrides_the_choice() -> None:
    assert real_plan(64, 8, 1, 0)["packed_heads"] == 1
    assert real_plan(64, 8, 8192, 0)["packed_heads"] == 1
    assert real_plan(40, 8, 8192, 1)["packed_heads"] == 5
    assert real_plan(8, 8, 1, 1)["packed_heads"] == 1
    with pytest.raises(ValueError, match="pack_gqa is 1, heads is 67, kv_heads is 1: heads / kv_heads must have a div"):
        real_plan(67, 1, 1, 1)
    with pytest.raises(ValueError, match="pack_gqa is 2: it must be -1"):
        real_plan(64, 8, 1, 2)
    assert real_plan(64, 8, 1, -1, (2, 99))["packed_heads"] == 1
    with pytest.raises(RuntimeError, match="pack_gqa is 1: heads of packed sequences do not share tiles"):
        real_plan(64, 8, 1, 1, (2, 99))
