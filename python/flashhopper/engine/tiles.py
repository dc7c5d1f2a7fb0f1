"""What the tiled forward and backward share: head folding, block sizes, products. Before it: tiled_forward.py,
tiled_backward.py; after it: mask.py.

Heads that share a KV head stand as extra rows of one matrix, so grouped-query attention never expands K or V:
q (batch, seqlen_q, heads, head_dim) becomes (batch * kv_heads, group, seqlen_q, head_dim), k and v (batch * kv_heads,
seqlen_k, ...).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .mask import Mask

# Elements of one tile of scores. On a CPU the tile and its operands should stay in the last-level cache; on a GPU one
# tile should fill the machine and its launch overheads should vanish.
CPU_TILE_ELEMENTS = 1 << 19
GPU_TILE_ELEMENTS = 1 << 24
# Keys per tile, then queries, come first: folded heads fill what is left of the budget.
CPU_BLOCK_K = 512
GPU_BLOCK_K = 1024
MIN_BLOCK_ROWS = 128

LOG2_E = math.log2(math.e)


class Problem(NamedTuple):
    """Numbers of one attention call on one batch of equally long sequences."""

    mask: Mask
    softmax_scale: float
    softcap: float


class Blocks(NamedTuple):
    """Loop steps: folded heads, queries and keys per tile."""

    heads: int
    q: int
    k: int


def choose_blocks(folded_heads: int, group: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> Blocks:
    """Block sizes whose tile of scores stays within the device's budget whatever the shape."""
    on_cpu = device.type == "cpu"
    budget = CPU_TILE_ELEMENTS if on_cpu else GPU_TILE_ELEMENTS
    block_k = max(1, min(seqlen_k, CPU_BLOCK_K if on_cpu else GPU_BLOCK_K))
    rows = max(budget // block_k, 1)  # of all folded heads together
    block_q = max(1, min(seqlen_q, max(MIN_BLOCK_ROWS, rows // max(folded_heads, 1)) // group))
    heads = max(1, min(folded_heads, rows // (group * block_q)))
    return Blocks(heads, block_q, block_k)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scores, softmax and sums are float32, float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def operand_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What the products multiply: the input dtype where tensor cores take it with float32 sums, else the accumulator's.

    CPUs without 16-bit dot products are an order of magnitude slower on 16-bit operands than on float32 ones.
    """
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if is_nvidia and dtype in (torch.float16, torch.bfloat16) and torch.cuda.get_device_capability(device) >= (8, 0):
        return dtype
    return accumulator_dtype(dtype)


class Scratch:
    """Memory for one tile, kept from step to step: on a CPU, fresh pages would cost as much as the softmax."""

    def __init__(self, elements: int, like: torch.Tensor) -> None:
        self._memory = like.new_empty(elements)

    def shaped(self, *shape: int) -> torch.Tensor:
        """The memory as a tensor of this shape; what it held before is lost."""
        return self._memory[: math.prod(shape)].view(shape)


def scratch(blocks: Blocks, group: int, operand: torch.Tensor) -> Scratch | None:
    """Memory for products of this operand; None for 16-bit ones, whose result has another dtype (a GPU's allocator is
    fast).
    """
    if operand.dtype in (torch.float16, torch.bfloat16):
        return None
    return Scratch(blocks.heads * group * blocks.q * blocks.k, operand)


def multiply(a: torch.Tensor, b: torch.Tensor, memory: Scratch | None = None) -> torch.Tensor:
    """Batched a @ b with float32 sums and result for 16-bit operands; into memory where given."""
    if a.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(a, b, out_dtype=torch.float32)
    if memory is None:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out=memory.shaped(a.shape[0], a.shape[1], b.shape[2]))


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b in total's dtype."""
    if a.dtype in (torch.float16, torch.bfloat16):
        total += torch.bmm(a, b, out_dtype=torch.float32)
    else:
        total.baddbmm_(a, b)


def fold_queries(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """(batch, seqlen, heads, d) -> (batch * kv_heads, group, seqlen, d)."""
    batch, seqlen, heads, d = x.shape
    return x.permute(0, 2, 1, 3).reshape(batch * kv_heads, heads // kv_heads, seqlen, d)


def fold_keys(x: torch.Tensor) -> torch.Tensor:
    """(batch, seqlen, kv_heads, d) -> (batch * kv_heads, seqlen, d)."""
    batch, seqlen, kv_heads, d = x.shape
    return x.permute(0, 2, 1, 3).reshape(batch * kv_heads, seqlen, d)


def unfold(x: torch.Tensor, batch: int) -> torch.Tensor:
    """(batch * kv_heads, [group,] seqlen, d) -> (batch, seqlen, heads, d), contiguous."""
    seqlen, d = x.shape[-2:]
    return x.reshape(batch, -1, seqlen, d).transpose(1, 2).contiguous()


def spans(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    """[begin, end) in steps."""
    for start in range(begin, end, step):
        yield start, min(start + step, end)


def scores(
    q_block: torch.Tensor,
    k_block: torch.Tensor,
    problem: Problem,
    group: int,
    q_span: tuple[int, int],
    k_span: tuple[int, int],
    memory: Scratch | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One tile of masked scores, (folded_heads, group * block_q, block_k), -inf where masked, times log2(e).

    The softmax then takes powers of two, as the kernels do, which are the cheaper ones.

    Also returns tanh(score / softcap), what the softcap's derivative is made of, when there is a softcap.
    """
    tile = multiply(q_block, k_block.mT, memory)
    tanh = None
    if problem.softcap > 0.0:
        tanh = tile.mul_(problem.softmax_scale / problem.softcap).tanh_()
        tile = tanh * (problem.softcap * LOG2_E)
    else:
        tile.mul_(problem.softmax_scale * LOG2_E)
    if problem.mask.needs_predicate(*q_span, *k_span):
        hidden = ~problem.mask.keep(*q_span, *k_span, tile.device)
        tile.view(tile.shape[0], group, *hidden.shape).masked_fill_(hidden, float("-inf"))
    return tile, tanh
