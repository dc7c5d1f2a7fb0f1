"""The compiled module itself, as far as it goes without a GPU: a prepared call takes seven integers and reports what
the library says of them; plans say what would be launched.
"""

from __future__ import annotations

import pytest
import torch

from flashhopper.engine import hopper
from flashhopper.engine.mask import Mask

if hopper.module is None:
    pytest.skip(hopper.load_error, allow_module_level=True)

STRIDES = (65536, 1024, 64) * 4
SIZES = (1, 16, 16, 64, 64, 64, 64)


def prepare(*, sizes: tuple[int, ...] = SIZES, sm_margin: int = 0) -> object:
    return hopper.module.prepare_forward(*STRIDES, *sizes, -1, 0, 0.125, hopper.module.BF16, sm_margin, -1)


@pytest.mark.parametrize("arguments", [(), (16,) * 6, (16,) * 8, (16,) * 6 + (1.0,), (None,) + (16,) * 6])
def test_a_call_takes_seven_integers(arguments: tuple[object, ...]) -> None:
    with pytest.raises(TypeError, match="integer"):
        prepare()(*arguments)


def test_prepare_wants_every_number() -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        hopper.module.prepare_forward(*STRIDES, *SIZES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the addresses here are nobody's")
def test_without_a_gpu_a_call_reports_the_error_of_cuda() -> None:
    call = prepare()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cuda"):
            call(*(16,) * 6, 0)


@pytest.mark.skipif(hopper.read_layouts is hopper.layouts, reason="torch has no exchange table that the module reads")
def test_layouts_tell_apart_what_python_tells_apart() -> None:
    base = torch.randn(2, 6, 4, 64, dtype=torch.bfloat16)
    variants = [base, base.half(), base.float(), base[:1], base[:, :5], base[:, :, :2], base[..., :32], base[..., ::2]]
    variants += [base.transpose(1, 2).contiguous().transpose(1, 2), base.expand(2, 6, 4, 64)[:, :, :1].expand_as(base)]
    keys = {hopper.read_layouts(*(x if i == place else base for i in range(3))) for x in variants for place in range(3)}
    assert len(keys) == 3 * (len(variants) - 1) + 1
    assert all(isinstance(key, bytes) for key in keys)
    assert hopper.read_layouts(base, base, base) == hopper.read_layouts(*(torch.randn_like(base) for _ in range(3)))
    parameter = torch.nn.Parameter(base)
    assert hopper.read_layouts(parameter, parameter, parameter) == hopper.read_layouts(base, base, base)


@pytest.mark.skipif(hopper.read_layouts is hopper.layouts, reason="torch has no exchange table that the module reads")
def test_what_has_no_layout_has_no_key() -> None:
    base = torch.randn(2, 6, 4, 64)
    for x in (base[0], base.to_sparse(), torch.empty(2, 6, 4, 64, device="meta")):
        assert hopper.read_layouts(base, x, base) is None
    with pytest.raises(TypeError, match="3 tensors"):
        hopper.read_layouts(base, base)
    assert hopper.module.layout_reader(object()) is None


# batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v, window_left, window_right
PROBLEM = (2, 8, 2, 1000, 777, 8, 8, -1, 0)
VIEWS = [(16, 65536, 1024, 64)] * 8
ADDRESSES = (16, 0, 0, 0, 256, 0, 0, 0, 0)  # lse, dlse, sink, dsink, workspace, offsets
DENSE = (0, 0)


def plan(direction: str, problem: object, *, sm_margin: int = 0, deterministic: bool = False) -> dict[str, object]:
    numbers = (hopper.module.BF16, sm_margin)
    if direction == "forward":
        made: dict[str, object] = hopper.module.forward_plan(problem, *numbers, 132, DENSE, 0)
    else:
        made = hopper.module.backward_plan(problem, *numbers, deterministic, 132)
    return made


def rows(direction: str) -> list[dict[str, object]]:
    """What this build has, which may be narrowed."""
    built: list[dict[str, object]] = getattr(hopper.module, f"{direction}_configs")()
    if not built:
        pytest.skip(f"this build has no {direction} kernel")
    return built


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_plan_is_a_row_and_a_grid(direction: str) -> None:
    built = rows(direction)
    made = plan(direction, PROBLEM)
    (row,) = [row for row in built if row["config"] == made["config"]]
    work = {"grid", "tiles", "flops", "bytes", "workspace_bytes"}
    assert {k: v for k, v in made.items() if k not in work} == {k: v for k, v in row.items() if k not in work}
    blocks = -(-1000 // row["tile_m"]) * 8 if direction == "forward" else -(-777 // row["tile_n"]) * 2
    assert made["tiles"] == 2 * blocks
    assert made["grid"] == min(132, made["tiles"])
    assert plan(direction, PROBLEM, sm_margin=120)["grid"] == 12
    kept = 777 * 778 / 2
    columns = 8 + 8 if direction == "forward" else 3 * 8 + 2 * 8
    assert made["flops"] == 2 * 2 * 8 * kept * columns


def test_a_grid_has_no_more_thread_blocks_than_there_are_tiles() -> None:
    """Also where the last cluster of a head has one tile with rows and one without."""
    rows("forward")
    for seqlen_q in (128 * 17, 128 * 17 + 1, 128 * 15, 5):
        for heads in (1, 3, 8):
            for window in ((-1, -1), (-1, 0), (64, 0)):
                for num_sms in (1, 7, 132):
                    sizes = (1, heads, 1, seqlen_q, 700, 128, 128, *window)
                    made = hopper.module.forward_plan(sizes, hopper.module.BF16, 0, num_sms, DENSE, 0)
                    assert made["tiles"] == heads * -(-seqlen_q // (128 * made["cluster"])) * made["cluster"]
                    assert made["grid"] == min(num_sms // made["cluster"] * made["cluster"], made["tiles"])


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_plans_refuse_what_the_library_refuses(direction: str) -> None:
    rows(direction)
    with pytest.raises(ValueError, match="sm_margin is 132: it must be between 0 and 131"):
        plan(direction, PROBLEM, sm_margin=132)
    with pytest.raises(ValueError, match="heads is 8, kv_heads is 3"):
        plan(direction, (2, 8, 3, *PROBLEM[3:]))
    with pytest.raises(ValueError, match="head_dim_v is 264"):
        plan(direction, (*PROBLEM[:6], 264, -1, 0))
    with pytest.raises(RuntimeError, match="split the batch"):
        plan(direction, (1 << 30, *PROBLEM[1:]))
    for problem in (PROBLEM[:8], (*PROBLEM, 0), None):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            plan(direction, problem)


def test_flops_of_windows_are_those_of_kept_scores() -> None:
    rows("forward")
    for seqlen_q, seqlen_k in ((100, 77), (77, 100), (5, 300), (300, 5), (64, 64), (1, 9)):
        for left, right in ((-1, -1), (-1, 0), (0, 0), (3, -1), (20, 4), (1000, 2), (0, 1000), (7, 90)):
            made = plan("forward", (1, 1, 1, seqlen_q, seqlen_k, 8, 8, left, right))
            kept = 0
            for row in range(seqlen_q):
                diagonal = row + seqlen_k - seqlen_q
                begin = 0 if left < 0 else max(0, diagonal - left)
                end = seqlen_k if right < 0 else min(seqlen_k, diagonal + right + 1)
                kept += max(0, end - begin)
            assert made["flops"] == 2 * kept * (8 + 8)


def test_a_plan_of_a_packed_batch_needs_no_lengths() -> None:
    rows("forward")
    numbers = (hopper.module.BF16, 0, 132)
    made = hopper.module.forward_plan(PROBLEM, *numbers, totals=(1500, 1600))
    blocks = 1500 // made["tile_m"] + 2 + 1  # each of two sequences, and the rows behind them, may end with part of one
    assert made["tiles"] == 8 * blocks
    packed = hopper.module.packed_workspace_bytes(2, 1500)
    assert made["workspace_bytes"] == hopper.module.workspace_bytes() + packed
    assert packed >= 16 + 32 * blocks
    assert hopper.module.forward_plan((0, *PROBLEM[1:3], 0, 0, *PROBLEM[5:]), *numbers, totals=(3, 0))["tiles"] == 8
    assert plan("forward", (*PROBLEM[:7], 5, 0))["config"] == made["config"]
    with pytest.raises(ValueError, match="total_q is 1, total_k is 2147483648"):
        hopper.module.forward_plan(PROBLEM, *numbers, totals=(1, 1 << 31))
    with pytest.raises(RuntimeError, match="split the batch"):
        hopper.module.forward_plan((1 << 29, *PROBLEM[1:]), *numbers, totals=(1500, 1600))


def test_a_forward_call_takes_four_tensors_and_eight_addresses() -> None:
    numbers = ((0, 0), 0.125, 0.0, hopper.module.BF16, 0, -1)
    for views, count in ((VIEWS[:3], 8), (VIEWS[:4], 7)):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            hopper.module.forward(views, [0] * count, PROBLEM, *numbers, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the addresses here are nobody's")
def test_without_a_gpu_a_forward_call_reports_the_error_of_cuda() -> None:
    with pytest.raises(RuntimeError, match="cuda"):
        hopper.module.forward(VIEWS[:4], [16] * 8, PROBLEM, (10, 10), 0.125, 5.0, hopper.module.BF16, 0, -1, 0)


@pytest.mark.parametrize("window", [(-1, -1), (5, 0), (0, 0), (-1, 900), (300, 40), (2000, 3)])
def test_flops_of_a_backward_are_those_of_the_kept_scores(window: tuple[int, int]) -> None:
    rows("backward")
    for lengths in ((1000, 777), (777, 1000)):
        problem = (*PROBLEM[:3], *lengths, 8, 8, *window)
        assert plan("backward", problem)["flops"] == 2 * 2 * 8 * Mask(*lengths, *window).kept() * (3 * 8 + 2 * 8)


def test_a_backward_plan_of_a_packed_batch_needs_no_lengths() -> None:
    rows("backward")
    numbers = (hopper.module.BF16, 0, True, 132)
    made = hopper.module.backward_plan(PROBLEM, *numbers, totals=(1500, 1600))
    assert made["tiles"] == 2 * (1600 // made["tile_n"] + 2 + 1)
    chunks = 8 * (1500 // made["tile_m"] + 2 + 1)
    least = 4 * chunks * made["tile_m"] * made["head_dim"]
    assert least < made["workspace_bytes"] < 1.2 * least
    # Without keys there is nothing to walk; without sequences all rows are still to be written.
    empty = (0, *PROBLEM[1:3], 0, 0, *PROBLEM[5:])
    assert hopper.module.backward_plan(empty, *numbers, totals=(3, 0))["grid"] == 0
    assert hopper.module.backward_plan(empty, *numbers, totals=(3, 5))["tiles"] == 2
    with pytest.raises(RuntimeError, match="split the batch"):
        hopper.module.backward_plan((1 << 29, *PROBLEM[1:]), *numbers, totals=(1500, 1600))


def test_the_workspace_holds_the_sums_of_dq() -> None:
    rows("backward")
    made, ordered = (plan("backward", PROBLEM, deterministic=x) for x in (False, True))
    blocks = -(-1000 // int(str(made["tile_m"])))
    chunk = made["tile_m"] * made["head_dim"]
    least = 4 * 2 * 8 * blocks * chunk
    assert least <= made["workspace_bytes"] < 1.2 * least
    assert made["workspace_bytes"] <= ordered["workspace_bytes"] < 1.01 * made["workspace_bytes"]
    assert plan("backward", (*PROBLEM[:4], 0, *PROBLEM[5:]))["grid"] == 0


def test_a_backward_call_takes_eight_tensors_and_nine_sizes() -> None:
    numbers = (0.125, 0.0, hopper.module.BF16, 0, False, 0)
    for views, problem in ((VIEWS[:7], PROBLEM), (VIEWS, PROBLEM[:8]), ([view[:3] for view in VIEWS], PROBLEM)):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            hopper.module.backward(views, ADDRESSES, problem, DENSE, *numbers)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        hopper.module.backward(VIEWS, ADDRESSES, PROBLEM, DENSE, *numbers[:5])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the addresses here are nobody's")
def test_without_a_gpu_a_backward_call_reports_the_error_of_cuda() -> None:
    with pytest.raises(RuntimeError, match="cuda"):
        hopper.module.backward(VIEWS, ADDRESSES, PROBLEM, DENSE, 0.125, 0.0, hopper.module.BF16, 0, False, 0)
