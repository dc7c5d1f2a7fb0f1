"""What attention on two devices must do: cases that run in each of two processes, on CPUs with gloo or on GPUs with
NCCL. Before it: two_processes.py starts them, tests/python/test_distributed.py and tests/gpu/test_gpu_distributed.py
say where; after it: flashhopper.distributed, FSDP2, DTensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import example_programs
import flashhopper as fh
import flashhopper.distributed

WORLD = 2
STEPS = 5


@dataclass(frozen=True)
class Place:
    """Where the cases run, on how large problems, and how far sharded results may be from one device's, in parts of the
    largest number unless it says otherwise.
    """

    device: str
    backend: str  # of flashhopper
    dtype: torch.dtype
    seqlens: tuple[int, int]
    head_dim: int
    window: int
    of_results: float
    of_gradients: float
    of_losses: float
    of_steps: float  # what all training steps change a parameter by, in norms

    def tensors(self, heads: int = 4, kv_heads: int = 2) -> list[torch.Tensor]:
        """q, k, v of a batch of 2, the same in every process."""
        lengths = ((self.seqlens[0], heads), (self.seqlens[1], kv_heads), (self.seqlens[1], kv_heads))
        return [self.draw(2, n, h, self.head_dim) for n, h in lengths]

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64).to(self.device, self.dtype)

    def sink(self, heads: int = 4) -> torch.Tensor:
        return torch.randn(heads, dtype=torch.float64 if self.dtype == torch.float64 else torch.float32).to(self.device)

    def mesh(self) -> Any:
        return init_device_mesh(self.device, (WORLD,))

    def attend(self, *x: torch.Tensor) -> Any:
        """Dense attention with every option; x is q, k, v and perhaps a sink."""
        sink = x[3] if len(x) == 4 else None
        options = {"window_size": (self.window, 0), "softcap": 2.0, "sink": sink, "deterministic": True}
        return fh.flash_attn_func(*x[:3], causal=True, return_lse=True, **options)  # type: ignore[arg-type]


CPU = Place("cpu", "auto", torch.float64, (9, 11), 8, 6, 1e-12, 1e-10, 1e-9, 1e-9)
# The kernels give every head the same bits wherever it is computed; sums of partial gradients round once more. In
# training, matrix products of half a batch round otherwise than those of the whole one.
GPU = Place("cuda", "hopper", torch.bfloat16, (333, 401), 64, 60, 0.0, 2**-6, 1e-3, 0.03)


def assert_near(found: torch.Tensor, right: torch.Tensor, tolerance: float, what: str) -> None:
    """NaN never is."""
    assert found.shape == right.shape, what
    found, right = (x.detach().double() for x in (found, right))
    difference, most = float((found - right).abs().max()), tolerance * float(right.abs().max())
    assert difference <= most, f"{what}: {difference:.3e} apart, {most:.3e} allowed"


def check(
    place: Place,
    tensors: list[torch.Tensor],
    placements: list[Any],
    attend: Callable[..., Any],
    expected_placement: Any,
) -> None:
    """attend on sharded tensors against the same on whole ones, forward and backward. expected_placement: of the
    result, without communication; None: DTensor moves what it finds cheapest.
    """
    mesh = place.mesh()
    whole = [x.clone().requires_grad_() for x in tensors]
    out, lse = attend(*whole)
    upstream = [torch.randn(x.shape).to(x) for x in (out, lse)]
    expected = torch.autograd.grad((out, lse), whole, upstream)
    parts = [distribute_tensor(x, mesh, [p]).requires_grad_() for x, p in zip(tensors, placements, strict=True)]
    with CommDebugMode() as counter:
        result = attend(*parts)
    assert (counter.get_total_counts() > 0) == (expected_placement is None), counter.get_comm_counts()
    assert all(isinstance(x, DTensor) for x in result)
    assert expected_placement in (None, *result[0].placements), result[0].placements
    for name, found, right in zip(("out", "lse"), result, (out, lse), strict=True):
        assert_near(found.full_tensor(), right, place.of_results, name)
    sharded = [distribute_tensor(x, mesh, r.placements) for x, r in zip(upstream, result, strict=True)]
    gradients = torch.autograd.grad(result, parts, sharded)
    for name, mine, right in zip(("dq", "dk", "dv", "dsink"), gradients, expected, strict=False):
        assert_near(mine.full_tensor(), right, place.of_gradients, name)


def batch(place: Place) -> None:
    check(place, place.tensors(), [Shard(0)] * 3, place.attend, Shard(0))


def heads(place: Place) -> None:
    check(place, place.tensors(), [Shard(2)] * 3, place.attend, Shard(2))


def heads_and_sink(place: Place) -> None:
    tensors = [*place.tensors(), place.sink()]
    check(place, tensors, [Shard(2), Shard(2), Shard(2), Shard(0)], place.attend, Shard(2))


def batch_and_sink(place: Place) -> None:
    """The sink is everybody's: its gradient is a sum over the ranks."""
    tensors = [*place.tensors(), place.sink()]
    check(place, tensors, [Shard(0), Shard(0), Shard(0), Replicate()], place.attend, Shard(0))


def one_kv_head(place: Place) -> None:
    check(place, place.tensors(4, 1), [Shard(2), Replicate(), Replicate()], place.attend, Shard(2))


def uneven_groups(place: Place) -> None:
    """Three KV heads on two ranks: query heads would not meet their own, so the heads cannot stay split."""
    check(place, place.tensors(6, 3), [Shard(2)] * 3, place.attend, None)


def replicated(place: Place) -> None:
    check(place, place.tensors(), [Replicate()] * 3, place.attend, Replicate())


def sequence_is_gathered(place: Place) -> None:
    tensors = place.tensors()
    parts = [distribute_tensor(x, place.mesh(), [Shard(1)]) for x in tensors]
    assert_near(place.attend(*parts)[0].full_tensor(), place.attend(*tensors)[0], place.of_results, "out")


def packed(place: Place) -> None:
    """Three sequences, one without queries and one without keys."""
    offsets = []
    for total in place.seqlens:
        offsets.append(torch.tensor([0, total // 3, total // 3, total], dtype=torch.int32, device=place.device))
    offsets[1][1] = 0

    def attend(*x: torch.Tensor) -> Any:
        lengths = offsets
        if isinstance(x[0], DTensor):
            lengths = [DTensor.from_local(c, x[0].device_mesh, [Replicate()]) for c in offsets]
        return fh.flash_attn_varlen_func(*x, *lengths, *place.seqlens, return_lse=True, deterministic=True)

    check(place, [x[0] for x in place.tensors()], [Shard(1)] * 3, attend_finite(attend), Shard(1))


def attend_finite(attend: Callable[..., Any]) -> Callable[..., Any]:
    """attend with 0 for the lse of rows that see nothing: infinities have no difference."""

    def run(*x: torch.Tensor) -> Any:
        out, lse = attend(*x)
        return out, torch.where(lse.isinf(), torch.zeros_like(lse), lse)

    return run


def eight_bits(place: Place) -> None:
    tensors = [torch.randn(2, 140, h, 64).to(place.device, torch.bfloat16) for h in (4, 2, 2)]
    expected = fh.flash_attn_func(*tensors, fp8=fh.Fp8Recipe())
    for dim in (0, 2):
        parts = [distribute_tensor(x, place.mesh(), [Shard(dim)]) for x in tensors]
        out = fh.flash_attn_func(*parts, fp8=fh.Fp8Recipe())
        assert out.placements == (Shard(dim),)
        assert torch.equal(out.full_tensor(), expected)


def fsdp2(place: Place) -> None:
    """A small GPT trains alike on halves of a batch, with parameters, gradients and optimizer sharded, as on one device
    with the whole batch. SGD: unlike Adam it notices gradients of the wrong size.
    """
    program = example_programs.load("train_gpt")
    exact = place.dtype == torch.float64
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": place.head_dim, "seqlen": 24 if exact else 128}
    settings = program.Settings(place.device, batch=4 if exact else 8, **sizes)
    plain, sharded = (program.Gpt(settings, program.attend_flashhopper).double() for _ in range(2))
    sharded.load_state_dict(plain.state_dict())
    models = [model.to(place.device, torch.float64 if exact else torch.float32) for model in (plain, sharded)]
    before = [p.detach().clone() for p in plain.parameters()]
    for block in sharded.blocks:
        fully_shard(block, mesh=place.mesh())
    fully_shard(sharded, mesh=place.mesh())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    places = torch.arange(settings.batch)[:, None] * 500 + torch.arange(settings.seqlen + 1)
    window = program.read_text()[places].to(place.device)
    losses = []
    for _ in range(STEPS):
        both = []
        for model, optimizer, part in zip(
            models, optimizers, (window, window.chunk(WORLD)[dist.get_rank()]), strict=True
        ):
            with torch.autocast(place.device, torch.bfloat16, enabled=not exact):
                logits = model(part[:, :-1])
            loss = F.cross_entropy(logits.double().flatten(0, 1), part[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            both.append(loss.detach())
        dist.all_reduce(both[1])
        both[1] /= WORLD
        losses.append(torch.stack(both))
    whole, split = torch.stack(losses).unbind(1)
    assert whole[-1] < whole[0] - 0.5, whole
    assert_near(split, whole, place.of_losses, "losses")
    for (name, mine), right, old in zip(sharded.named_parameters(), plain.parameters(), before, strict=True):
        assert isinstance(mine, DTensor), name
        change, expected = (x.detach().double() - old for x in (mine.full_tensor(), right))
        assert (change - expected).norm() <= place.of_steps * expected.norm(), name


CASES: dict[str, Callable[[Place], None]] = {
    case.__name__: case
    for case in (
        *(batch, heads, heads_and_sink, batch_and_sink, one_kv_head, uneven_groups, replicated),
        *(sequence_is_gathered, packed, eight_bits, fsdp2),
    )
}
