"""cuDNN's 16-bit attention with sliding windows and packed sequences, forward and backward, through its frontend's
graphs. Before it: peers_features.py; after it: the cudnn package.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from benchmarks.cells import Cell
from benchmarks.features import Case
from benchmarks.peers import Call, Peer
from benchmarks.timing import describe

_Tensor = torch.Tensor
TYPES = {
    torch.bfloat16: "BFLOAT16",
    torch.float16: "HALF",
    torch.float32: "FLOAT",
    torch.int32: "INT32",
}


class Graph:
    """One graph under construction, then a call. Its tensors are (batch, seqlen, heads, head_dim), any strides, or
    packed and contiguous (total, heads, head_dim)."""

    def __init__(self, cudnn: Any, case: Case, q: _Tensor) -> None:
        self.cudnn, self.case, self.device = cudnn, case, q.device
        self.handle = cudnn.create_handle()
        cudnn.set_stream(self.handle, torch.cuda.current_stream(q.device).cuda_stream)
        fp32 = cudnn.data_type.FLOAT
        types = {"io_data_type": self._type(q), "intermediate_data_type": fp32, "compute_data_type": fp32}
        self.graph = cudnn.pygraph(handle=self.handle, **types)
        self.buffers: dict[Any, _Tensor] = {}
        self._offsets: dict[int, Any] = {}

    def _type(self, x: _Tensor) -> Any:
        return getattr(self.cudnn.data_type, TYPES[x.dtype])

    def _plain(self, name: str, values: list[int]) -> Any:
        """A port of int32 values, one a batch entry."""
        x = torch.tensor(values, dtype=torch.int32).view(-1, 1, 1, 1).to(self.device)
        port = self.graph.tensor(name=name, dim=list(x.shape), stride=[1, 1, 1, 1], data_type=self._type(x))
        self.buffers[port] = x
        return port

    def _layout(self, x: _Tensor) -> tuple[list[int], list[int]]:
        """Dimensions and strides in cuDNN's order: batch, heads, seqlen, head_dim."""
        if not self.case.lengths:
            return list(x.transpose(1, 2).shape), list(x.transpose(1, 2).stride())
        (heads, dim), cell = x.shape[1:], self.case.cell
        return [cell.batch, heads, cell.seqlen_q, dim], [cell.seqlen_q * heads * dim, dim, heads * dim, 1]

    def _set_offsets(self, port: Any, x: _Tensor) -> None:
        """Where each packed sequence begins, in elements."""
        if not self.case.lengths:
            return
        width = x[0].numel()
        if width not in self._offsets:
            starts = [0]
            for length in self.case.lengths:
                starts.append(starts[-1] + length * width)
            self._offsets[width] = self._plain(f"offsets_{width}", starts)
        port.set_ragged_offset(self._offsets[width])

    def input(self, name: str, x: _Tensor) -> Any:
        dims, strides = self._layout(x)
        port = self.graph.tensor(name=name, dim=dims, stride=strides, data_type=self._type(x))
        self._set_offsets(port, x)
        self.buffers[port] = x
        return port

    def output(self, port: Any, x: _Tensor) -> None:
        dims, strides = self._layout(x)
        port.set_output(True).set_dim(dims).set_stride(strides).set_data_type(self._type(x))
        self._set_offsets(port, x)
        self.buffers[port] = x

    def options(self) -> dict[str, Any]:
        """Scale, mask and lengths. All problems are square, so both corners align the diagonal alike."""
        case = self.case
        chosen: dict[str, Any] = {"attn_scale": case.cell.head_dim**-0.5}
        if case.cell.causal:
            chosen["diagonal_alignment"] = self.cudnn.diagonal_alignment.TOP_LEFT
            chosen["diagonal_band_right_bound"] = 0
        if case.left >= 0:
            chosen["diagonal_band_left_bound"] = case.left + 1  # counts the query's own key
        if case.lengths:
            lengths = list(case.lengths)
            chosen |= {"use_padding_mask": True, "seq_len_q": self._plain("seq_len_q", lengths)}
            chosen["seq_len_kv"] = self._plain("seq_len_kv", lengths)
        return chosen

    def build(self) -> None:
        cudnn, graph = self.cudnn, self.graph
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        self.workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=self.device)

    def __call__(self) -> None:
        self.graph.execute(self.buffers, self.workspace, handle=self.handle)


def _forward(
    cudnn: Any, case: Case, q: _Tensor, k: _Tensor, v: _Tensor, stats: _Tensor | None
) -> tuple[Graph, _Tensor]:
    """The graph and its output; with the softmax statistics for a backward where memory for them is given."""
    graph = Graph(cudnn, case, q)
    ports = {name: graph.input(name, x) for name, x in zip("qkv", (q, k, v), strict=True)}
    out = q.new_empty((*q.shape[:-1], v.size(-1)))
    out_port, stats_port = graph.graph.sdpa(**ports, generate_stats=stats is not None, **graph.options())
    graph.output(out_port, out)
    if stats is not None:
        graph.output(stats_port, stats)
    graph.build()
    return graph, out


def _statistics(case: Case, q: _Tensor) -> _Tensor:
    """float32 memory of the statistics: heads innermost where packed, else heads before rows, which cuDNN's backward
    wants."""
    if case.lengths:
        return torch.empty((q.size(0), q.size(1), 1), dtype=torch.float32, device=q.device)
    return torch.empty((q.size(0), q.size(2), q.size(1), 1), dtype=torch.float32, device=q.device).transpose(1, 2)


def _backward(cudnn: Any, case: Case, q: _Tensor, k: _Tensor, v: _Tensor, dout: _Tensor) -> Call:
    """Runs the forward once; the call returns dq, dk and dv."""
    stats = _statistics(case, q)
    forward, out = _forward(cudnn, case, q, k, v, stats)
    forward()
    graph = Graph(cudnn, case, q)
    given = {"q": q, "k": k, "v": v, "o": out, "dO": dout, "stats": stats}
    ports = {name: graph.input(name, x) for name, x in given.items()}
    options = graph.options()
    if case.lengths:  # bounds cuDNN's workspace
        options |= {"max_total_seq_len_q": q.size(0), "max_total_seq_len_kv": k.size(0)}
    gradients = tuple(torch.empty_like(x) for x in (q, k, v))
    for port, x in zip(graph.graph.sdpa_backward(**ports, **options), gradients, strict=True):
        graph.output(port, x)
    graph.build()

    def call() -> object:
        graph()
        return gradients

    return call


class CudnnPeer(Peer):
    """cuDNN's graphs for one case: they hold their backward themselves, without autograd."""

    def __init__(self, cudnn: Any, case: Case) -> None:
        super().__init__("cudnn")
        self.cudnn, self.case = cudnn, case

    def call(self, cell: Cell, q: _Tensor, k: _Tensor, v: _Tensor, *dout: _Tensor) -> Call:
        if dout:
            return _backward(self.cudnn, self.case, q, k, v, dout[0])
        graph, out = _forward(self.cudnn, self.case, q, k, v, None)

        def call() -> object:
            graph()
            return out

        return call


def load(case: Case) -> Peer:
    """cuDNN, or why it is not there."""
    try:
        return CudnnPeer(importlib.import_module("cudnn"), case)
    except Exception as error:  # an import may fail in any way
        return Peer("cudnn", unavailable=describe(error))
