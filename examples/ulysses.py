"""Sequence parallelism by all-to-all (Ulysses, Jacobs et al. 2023) around flashhopper.

    python examples/ulysses.py                              # two processes on the CPU, checked against one
    torchrun --nproc-per-node 8 your_training.py            # with attend() or with DeepSpeed, below

Each process holds every head of its part of the sequence. One all-to-all gives it the whole sequence of its part of the
heads, flashhopper attends as on one device, and a second all-to-all turns the result back. attend() needs torch alone.
DeepSpeed's layer takes the same function:

    from deepspeed.sequence.layer import DistributedAttention

    attention = DistributedAttention(local_attention, group, scatter_idx=2, gather_idx=1)
    out = attention(q, k, v, 0, causal=True)  # (batch, seqlen / processes, heads, head_dim); 0 is the batch's dimension
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flashhopper import flash_attn_func


def local_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """What each process runs on its heads, (batch, seqlen, heads / processes, head_dim)."""
    out = flash_attn_func(q, k, v, **options)
    assert isinstance(out, torch.Tensor)
    return out


class AllToAll(torch.autograd.Function):
    """(batch, seqlen, heads, head_dim): scatters one dimension over the processes and gathers another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scatter: int, gather: int, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.dims, ctx.group = (gather, scatter), group
        sent = [part.contiguous() for part in x.chunk(dist.get_world_size(group), dim=scatter)]
        received = [torch.empty_like(part) for part in sent]
        dist.all_to_all(received, sent, group=group)
        return torch.cat(received, dim=gather)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return AllToAll.apply(dx, *ctx.dims, ctx.group), None, None, None


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup | None = None, **options: Any
) -> torch.Tensor:
    """Attention over a sequence that is split over the processes of a group; options are flash_attn_func's.

    Args:
        q: (batch, seqlen / processes, heads, head_dim); k, v: likewise with kv_heads. Both numbers of heads must be
            multiples of the number of processes.
    """
    processes = dist.get_world_size(group)
    for name, heads in (("q", q.shape[2]), ("k", k.shape[2])):
        if heads % processes != 0:
            raise ValueError(f"{name} has {heads} heads: must be a multiple of the {processes} processes of the group")
    q, k, v = (AllToAll.apply(x, 2, 1, group) for x in (q, k, v))
    return AllToAll.apply(local_attention(q, k, v, **options), 1, 2, group)


def whole_inputs() -> list[torch.Tensor]:
    """q, k, v and the gradient of out, as one process has them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 48, 4, 16), (2, 48, 2, 16), (2, 48, 2, 16), (2, 48, 4, 16)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def check(attention: Any) -> float:
    """Largest difference of this process's part of out and of the gradients from attention in one process."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    options = {"causal": True, "window_size": (20, 0)}
    *whole, dout = whole_inputs()
    whole = [x.requires_grad_() for x in whole]
    out = local_attention(*whole, **options)
    expected = [out, *torch.autograd.grad(out, whole, dout)]
    parts = [x.detach().chunk(processes, dim=1)[rank].contiguous().requires_grad_() for x in whole]
    part = attention(*parts, **options)
    actual = [part, *torch.autograd.grad(part, parts, dout.chunk(processes, dim=1)[rank])]
    wanted = [x.chunk(processes, dim=1)[rank] for x in expected]
    return max(float((x - y).detach().abs().max()) for x, y in zip(actual, wanted, strict=True))


def with_deepspeed(*inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    """attend() by DeepSpeed's layer."""
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)
    layer = DistributedAttention(local_attention, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return layer(*inputs, 0, **options)


def run(rank: int, processes: int, store: str, attention: Any, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    results[rank] = check(attention)
    dist.destroy_process_group()


def compare(attention: Any, processes: int = 2) -> list[float]:
    """check() in each of several processes."""
    results = torch.full((processes,), float("nan")).share_memory_()
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run, (processes, str(Path(directory, "store")), attention, results), nprocs=processes)
    return results.tolist()


if __name__ == "__main__":
    print("largest difference from attention in one process:", max(compare(attend)))
