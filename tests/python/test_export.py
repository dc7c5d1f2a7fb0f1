"""torch.export and torch.compile with lengths, batches and packings that change after tracing: one graph, and what
eager calls give.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_close
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim

import flashhopper as fh

# What torch itself does and then warns about: compilation instantiates an autograd.Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


class Dense(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.sink = torch.nn.Parameter(torch.tensor([0.5, -1.0, 0.0, 2.0]))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return fh.flash_attn_func(q, k, v, sink=self.sink, return_lse=True, **self.options)


class Packed(torch.nn.Module):
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor
    ) -> torch.Tensor:
        return fh.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 64, 64, causal=True)


def dense(batch: int, seqlen_q: int, seqlen_k: int) -> list[torch.Tensor]:
    return [torch.randn(batch, n, h, d) for n, h, d in ((seqlen_q, 4, 8), (seqlen_k, 2, 8), (seqlen_k, 2, 12))]


def packed(lengths_q: list[int], lengths_k: list[int]) -> list[torch.Tensor]:
    tensors = [torch.randn(sum(n), h, 8) for n, h in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2))]
    return [*tensors, *(torch.tensor([0, *n]).cumsum(0).int() for n in (lengths_q, lengths_k))]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (5, 2), "softcap": 3.0}], ids=str)
def test_export_of_dense_attention(options: dict[str, Any]) -> None:
    """Batch and both lengths are symbols of the exported program, which holds one operator."""
    model = Dense(**options)
    batch, seqlen_q, seqlen_k = Dim("batch", min=2), Dim("seqlen_q", min=8), Dim("seqlen_k", min=8)
    shapes = ({0: batch, 1: seqlen_q}, {0: batch, 1: seqlen_k}, {0: batch, 1: seqlen_k})
    program = torch.export.export(model, tuple(dense(3, 16, 20)), dynamic_shapes=shapes)
    calls = [node.target for node in program.graph.nodes if "flashhopper" in str(node.target)]
    assert calls == [torch.ops.flashhopper.forward.default]
    for sizes in ((3, 16, 20), (2, 33, 9), (5, 8, 70)):
        inputs = dense(*sizes)
        for mine, right in zip(program.module()(*inputs), model(*inputs), strict=True):
            assert_close(mine, right, 1e-6)


def test_export_of_packed_attention(tmp_path: Any) -> None:
    """The number of sequences and tokens are symbols; the program survives being saved."""
    tokens_q, tokens_k, offsets = Dim("tokens_q", min=4), Dim("tokens_k", min=4), Dim("offsets", min=3)
    shapes = ({0: tokens_q}, {0: tokens_k}, {0: tokens_k}, {0: offsets}, {0: offsets})
    program = torch.export.export(Packed(), tuple(packed([4, 0, 9], [7, 2, 11])), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "attention.pt2")
    loaded = torch.export.load(tmp_path / "attention.pt2").module()
    for lengths in (([4, 0, 9], [7, 2, 11]), ([30, 1], [0, 40]), ([5, 6, 7, 8], [8, 7, 6, 5])):
        inputs = packed(*lengths)
        assert_close(loaded(*inputs), Packed()(*inputs), 1e-6)


def _compare(compiled: Any, eager: Any, inputs: list[torch.Tensor]) -> None:
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
    wanted = [x for x in leaves if x.requires_grad]
    results = [function(*leaves) for function in (compiled, eager)]
    assert_close(*results, 1e-6)
    for mine, right in zip(*(torch.autograd.grad(x.square().sum(), wanted) for x in results), strict=True):
        assert_close(mine, right, 1e-5)


def attend_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out, lse = fh.flash_attn_func(q, k, v, causal=True, window_size=(6, 0), return_lse=True)
    return out.sum(-1).transpose(1, 2) + lse


# Sizes that are equal when traced would be one symbol to torch: in the first problem of each list none are.
DENSE = [dense(*sizes) for sizes in ((3, 9, 11), (5, 24, 31), (7, 16, 40))]
PACKED = [
    packed(*lengths)
    for lengths in (([4, 0, 9, 1, 2], [7, 2, 11, 3, 0]), ([30, 1], [3, 40]), ([5, 6, 7, 8], [8, 7, 6, 5]))
]


@pytest.mark.parametrize(("attend", "problems"), [(attend_dense, DENSE), (Packed(), PACKED)], ids=["dense", "packed"])
def test_one_graph_for_all_shapes(attend: Any, problems: list[list[torch.Tensor]]) -> None:
    """Forward and backward with dynamic=True: nothing is compiled anew when batch, lengths or packing change."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True)
    _compare(compiled, attend, problems[0])
    first = counter.frame_count
    for inputs in problems[1:]:
        _compare(compiled, attend, inputs)
    assert counter.frame_count == first
