"""DTensor and FSDP2 on two processes with gloo: sharded attention equals that of one process, gradients too, and moves
nothing where batch or heads are split alike.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import flashhopper as fh
import flashhopper.distributed
from flashhopper.distributed import sharding

WORLD = 2
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")


def _enter(rank: int, rendezvous: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, init_method=f"file://{rendezvous}")
    try:
        for name in names:
            torch.manual_seed(0)
            CASES[name]()
    except BaseException as error:
        error.add_note(f"in case {name}") if hasattr(error, "add_note") else print(f"in case {name}", file=sys.stderr)
        raise
    finally:
        dist.destroy_process_group()


def inputs(heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(2, n, h, 8, dtype=dtype) for n, h in ((9, heads), (11, kv_heads), (11, kv_heads))]


def check(
    tensors: list[torch.Tensor],
    placements: list[Any],
    attend: Callable[..., Any],
    expected_placement: Any,
    communicates: bool = False,
) -> None:
    """attend on sharded tensors against the same on whole ones."""
    mesh = init_device_mesh("cpu", (WORLD,))
    whole = [x.clone().requires_grad_() for x in tensors]
    out, lse = attend(*whole)
    upstream = (torch.randn_like(out), torch.randn_like(lse))
    expected = torch.autograd.grad((out, lse), whole, upstream)
    parts = [distribute_tensor(x, mesh, [p]).requires_grad_() for x, p in zip(tensors, placements, strict=True)]
    with CommDebugMode() as counter:
        result = attend(*parts)
    assert (counter.get_total_counts() > 0) == communicates, counter.get_comm_counts()
    assert all(isinstance(x, DTensor) for x in result)
    assert result[0].placements == (expected_placement,), result[0].placements
    for found, right in zip(result, (out, lse), strict=True):
        assert torch.allclose(found.full_tensor(), right, rtol=1e-10, atol=1e-12)
    dout, dlse = (distribute_tensor(x, mesh, r.placements) for x, r in zip(upstream, result, strict=True))
    found = torch.autograd.grad(result, parts, (dout, dlse))
    for mine, right in zip(found, expected, strict=True):
        assert torch.allclose(mine.full_tensor(), right, rtol=1e-9, atol=1e-11)


def dense(*x: torch.Tensor) -> Any:
    sink = x[3] if len(x) == 4 else None
    return fh.flash_attn_func(*x[:3], causal=True, window_size=(6, 0), softcap=2.0, sink=sink, return_lse=True)


def batch() -> None:
    check(inputs(), [Shard(0)] * 3, dense, Shard(0))


def heads() -> None:
    check(inputs(), [Shard(2)] * 3, dense, Shard(2))


def heads_and_sink() -> None:
    tensors = [*inputs(), torch.randn(4, dtype=torch.float64)]
    check(tensors, [Shard(2), Shard(2), Shard(2), Shard(0)], dense, Shard(2))


def batch_and_sink() -> None:
    """The sink is everybody's: its gradient is a sum over the ranks."""
    tensors = [*inputs(), torch.randn(4, dtype=torch.float64)]
    check(tensors, [Shard(0), Shard(0), Shard(0), Replicate()], dense, Shard(0))


def one_kv_head() -> None:
    check(inputs(4, 1), [Shard(2), Replicate(), Replicate()], dense, Shard(2))


def uneven_groups() -> None:
    """Three KV heads on two ranks: query heads would not meet their own, so the heads are gathered."""
    check(inputs(6, 3), [Shard(2)] * 3, dense, Replicate(), communicates=True)


def replicated() -> None:
    check(inputs(), [Replicate()] * 3, dense, Replicate())


def sequence_is_gathered() -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    tensors = inputs()
    parts = [distribute_tensor(x, mesh, [Shard(1)]) for x in tensors]
    out, _ = dense(*parts)
    assert torch.allclose(out.full_tensor(), dense(*tensors)[0], rtol=1e-10, atol=1e-12)


def packed() -> None:
    cu_q, cu_k = torch.tensor([0, 4, 4, 9]).int(), torch.tensor([0, 0, 5, 11]).int()

    def attend(*x: torch.Tensor) -> Any:
        offsets = (cu_q, cu_k)
        if isinstance(x[0], DTensor):
            offsets = tuple(DTensor.from_local(c, x[0].device_mesh, [Replicate()]) for c in offsets)
        return fh.flash_attn_varlen_func(*x, *offsets, 5, 6, causal=True, return_lse=True)

    check([x[0] for x in inputs()], [Shard(1)] * 3, attend, Shard(1))


def eight_bits() -> None:
    tensors = [torch.randn(2, 140, h, 64, dtype=torch.bfloat16) for h in (4, 2, 2)]
    mesh = init_device_mesh("cpu", (WORLD,))
    expected = fh.flash_attn_func(*tensors, fp8=fh.Fp8Recipe())
    for dim in (0, 2):
        parts = [distribute_tensor(x, mesh, [Shard(dim)]) for x in tensors]
        out = fh.flash_attn_func(*parts, fp8=fh.Fp8Recipe())
        assert out.placements == (Shard(dim),)
        assert torch.equal(out.full_tensor(), expected)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = torch.nn.Linear(32, 3 * 32, dtype=torch.float64), torch.nn.Linear(32, 32).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, 4, 8))
        return x + self.proj(fh.flash_attn_qkvpacked_func(qkv, causal=True).flatten(2))


def fsdp2() -> None:
    """Three steps of SGD on halves of a batch, parameters and gradients sharded, as on one process."""
    mesh = init_device_mesh("cpu", (WORLD,))
    plain = torch.nn.Sequential(Block(), Block())
    sharded = torch.nn.Sequential(Block(), Block())
    sharded.load_state_dict(plain.state_dict())
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, sharded)]
    for _ in range(3):
        x = torch.randn(4, 10, 32, dtype=torch.float64)
        for model, optimizer, part in zip(
            (plain, sharded), optimizers, (x, x.chunk(WORLD)[dist.get_rank()]), strict=True
        ):
            optimizer.zero_grad()
            model(part).square().mean().backward()
            optimizer.step()
    for (name, mine), right in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(mine, DTensor), name
        assert torch.allclose(mine.full_tensor(), right, rtol=1e-9, atol=1e-12), name


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        *(batch, heads, heads_and_sink, batch_and_sink, one_kv_head, uneven_groups, replicated),
        *(sequence_is_gathered, packed, eight_bits, fsdp2),
    )
}


def test_two_processes(tmp_path: Path) -> None:
    """All cases in one pair of processes: starting them costs more than the cases."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.start_processes(_enter, (str(tmp_path / "rendezvous"), list(CASES)), WORLD, start_method="spawn")


@pytest.mark.parametrize(
    ("kv_heads", "mesh", "even"),
    [(8, (2,), True), (8, (2, 4), True), (8, (4, 4), True), (24, (4, 4), False), (3, (2,), False), (1, (2,), False)],
)
def test_when_heads_split_evenly(kv_heads: int, mesh: tuple[int, ...], even: bool) -> None:
    assert sharding._splits_evenly(kv_heads, mesh) == even


def test_every_operator_has_a_rule() -> None:
    names = [name for name in dir(torch.ops.flashhopper) if not name.startswith("_") and name != "name"]
    assert {operator._schema.name for operator in sharding._RULES} == {f"flashhopper::{name}" for name in names}
    assert flashhopper.distributed.register is sharding.register
