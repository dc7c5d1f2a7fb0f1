"""The contenders of 8-bit rows: flashhopper's recipes, FA3's e4m3 and cuDNN's, each turned into a call that enqueues
one forward. Before it: fp8.py, accuracy_fp8.py; after it: peers.py, flashhopper.fp8.

Every contender quantises the 16-bit inputs in its own way. What is timed is attention alone on 8-bit tensors, or (the
`_call` contenders) the whole call of a user who holds 16-bit tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.cells import Cell
from benchmarks.peers import Call, load
from benchmarks.timing import describe

E4M3, E4M3_MAX, LEAST_AMAX = torch.float8_e4m3fn, 448.0, 1e-12
BF16 = "flashhopper_bf16"
PROBABILITY_SCALE = 256.0  # cuDNN casts probabilities, at most 1, after this factor
_Tensor = torch.Tensor


@dataclass
class Prepared:
    """call() enqueues one forward; output() turns what it returned into (batch, seqlen_q, heads, head_dim_v) values."""

    call: Call
    output: Callable[[Any], _Tensor]


Prepare = Callable[[Cell, _Tensor, _Tensor, _Tensor], Prepared]


@dataclass
class Peer8:
    name: str
    prepare: Prepare | None = None
    unavailable: str | None = None


def first(result: Any) -> _Tensor:
    """The output of a call that may return more."""
    out = result[0] if isinstance(result, tuple) else result
    assert isinstance(out, _Tensor)
    return out


def recipes() -> dict[str, Any]:
    """name -> flashhopper.Fp8Recipe, the named ones."""
    recipe = importlib.import_module("flashhopper").Fp8Recipe
    return {"paper": recipe.paper(), "e4m3": recipe.e4m3(), "accurate": recipe.accurate()}


def quantize_per_head(x: _Tensor, kv_heads: int) -> tuple[_Tensor, _Tensor]:
    """FA3's convention: one scale for each (batch, KV head), for queries over all heads of the group.

    Args:
        x: 16-bit (batch, seqlen, heads, head_dim), heads a multiple of kv_heads.

    Returns:
        float8_e4m3fn of x's shape; float32 descale (batch, kv_heads), value = data * descale.
    """
    batch, _, heads, _ = x.shape
    amax = x.abs().amax((1, 3)).float().view(batch, kv_heads, heads // kv_heads).amax(2)
    descale = amax.clamp(min=LEAST_AMAX) / E4M3_MAX
    each = descale.repeat_interleave(heads // kv_heads, 1)[:, None, :, None]
    return (x.float() / each).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), descale


def quantize_per_tensor(x: _Tensor) -> tuple[_Tensor, _Tensor]:
    """float8_e4m3fn of x's shape, and its float32 descale (1, 1, 1, 1)."""
    descale = x.abs().amax().float().clamp(min=LEAST_AMAX) / E4M3_MAX
    return (x.float() / descale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), descale.view(1, 1, 1, 1)


def _kernel_alone(recipe: Any) -> Prepare:
    package = importlib.import_module("flashhopper")
    operators = importlib.import_module("flashhopper.fp8.operators")
    backend = importlib.import_module("flashhopper.backends").backend()

    def prepare(cell: Cell, q: _Tensor, k: _Tensor, v: _Tensor) -> Prepared:
        with torch.no_grad():
            qkv = package.quantize_fp8(q, k, v, recipe)
        scale, right = cell.head_dim**-0.5, 0 if cell.causal else -1
        return Prepared(lambda: operators.run_attention(qkv, scale, -1, right, 0, backend), first)

    return prepare


def _whole_call(recipe: Any) -> Prepare:
    function = importlib.import_module("flashhopper").flash_attn_func

    def prepare(cell: Cell, q: _Tensor, k: _Tensor, v: _Tensor) -> Prepared:
        return Prepared(lambda: function(q, k, v, causal=cell.causal, fp8=recipe), first)

    return prepare


def _bf16() -> Prepare:
    function = importlib.import_module("flashhopper").flash_attn_func

    def prepare(cell: Cell, q: _Tensor, k: _Tensor, v: _Tensor) -> Prepared:
        return Prepared(lambda: function(q, k, v, causal=cell.causal), first)

    return prepare


def _fa3() -> Prepare:
    function = importlib.import_module("fa3_fwd_interface").flash_attn_func

    def prepare(cell: Cell, q: _Tensor, k: _Tensor, v: _Tensor) -> Prepared:
        (q8, q_descale), (k8, k_descale), (v8, v_descale) = (quantize_per_head(x, cell.kv_heads) for x in (q, k, v))
        scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
        return Prepared(lambda: function(q8, k8, v8, causal=cell.causal, **scales), first)

    return prepare


class _CudnnGraph:
    """One FP8 attention of cuDNN, planned for a cell: e4m3 in and out, a scale a tensor, top-left causal."""

    def __init__(self, cudnn: Any, cell: Cell, q: _Tensor, k: _Tensor, v: _Tensor, declare_amax_s: bool) -> None:
        e4m3, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
        self.handle = cudnn.create_handle()
        cudnn.set_stream(self.handle, torch.cuda.current_stream(q.device).cuda_stream)
        types = {"io_data_type": e4m3, "intermediate_data_type": fp32, "compute_data_type": fp32}
        self.graph = graph = cudnn.pygraph(handle=self.handle, **types)
        data, descales = zip(*(quantize_per_tensor(x) for x in (q, k, v)), strict=True)
        # Outputs are means of values: they cannot exceed the largest of them.
        self.out_descale: _Tensor = descales[2]
        one = torch.ones(1, 1, 1, 1, device=q.device)
        scales = (*descales, one / PROBABILITY_SCALE, one * PROBABILITY_SCALE, 1.0 / self.out_descale)
        self.out = torch.empty((*q.shape[:3], v.size(3)), dtype=E4M3, device=q.device)
        heads_first = [x.transpose(1, 2) for x in (*data, self.out)]
        ports = [
            graph.tensor(name=name, dim=list(x.shape), stride=list(x.stride()), data_type=e4m3)
            for name, x in zip("qkv", heads_first[:3], strict=True)
        ]
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        scalar = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1], "data_type": fp32}
        scale_ports = [graph.tensor(name=name, **scalar) for name in names]
        options = {"attn_scale": cell.head_dim**-0.5, "use_causal_mask": cell.causal, "generate_stats": False}
        out, _, amax_s, amax_o = graph.sdpa_fp8(
            **dict(zip("qkv", ports, strict=True)), **dict(zip(names, scale_ports, strict=True)), **options
        )
        out.set_output(True).set_dim(list(heads_first[3].shape)).set_stride(list(heads_first[3].stride()))
        out.set_data_type(e4m3)
        for amax, is_output in ((amax_s, declare_amax_s), (amax_o, True)):
            amax.set_output(is_output).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1]).set_data_type(fp32)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        self.workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)
        self.buffers = dict(zip([*ports, *scale_ports, out], [*heads_first[:3], *scales, heads_first[3]], strict=True))
        self.buffers[amax_o] = torch.zeros(1, 1, 1, 1, device=q.device)
        if declare_amax_s:
            self.buffers[amax_s] = torch.zeros(1, 1, 1, 1, device=q.device)

    def __call__(self) -> _Tensor:
        self.graph.execute(self.buffers, self.workspace, handle=self.handle)
        return self.out

    def output(self, out: _Tensor) -> _Tensor:
        return out.float() * self.out_descale


def _cudnn() -> Prepare:
    cudnn = importlib.import_module("cudnn")

    def prepare(cell: Cell, q: _Tensor, k: _Tensor, v: _Tensor) -> Prepared:
        if cell.causal and cell.seqlen_q != cell.seqlen_k:
            raise ValueError("cuDNN's FP8 causal mask is top-left aligned: not the same problem")
        try:  # newer frontends want the largest probability left alone, older ones to have it declared
            graph = _CudnnGraph(cudnn, cell, q, k, v, declare_amax_s=False)
        except Exception as error:
            print(f"cudnn: {describe(error)}; again with amax_s as an output", flush=True)
            graph = _CudnnGraph(cudnn, cell, q, k, v, declare_amax_s=True)
        return Prepared(graph, graph.output)

    return prepare


def loaders() -> dict[str, Callable[[], Prepare]]:
    """Contender -> what imports it, in the order in which they take their turns."""
    timed = ("e4m3", "accurate")
    found: dict[str, Callable[[], Prepare]] = {}
    for name in timed:
        found[f"flashhopper_{name}"] = lambda name=name: _kernel_alone(recipes()[name])  # type: ignore[misc]
    for name in timed:
        found[f"flashhopper_{name}_call"] = lambda name=name: _whole_call(recipes()[name])  # type: ignore[misc]
    return {**found, BF16: _bf16, "fa3": _fa3, "cudnn": _cudnn}


def load_all(backend: str = "hopper") -> list[Peer8]:
    """Every contender; one that does not import keeps its error. flashhopper runs on `backend` alone."""
    package = load("flashhopper").unavailable if backend == "hopper" else None
    if package is None:
        importlib.import_module("flashhopper").set_backend(backend)  # a silent emulation would be timed as the kernel
    found = []
    for name, loader in loaders().items():
        try:
            if name.startswith("flashhopper") and package is not None:
                raise RuntimeError(package)
            found.append(Peer8(name, loader()))
        except Exception as error:  # an import may fail in any way
            found.append(Peer8(name, unavailable=describe(error)))
    return found
