"""The contenders: flashhopper and every peer that imports, each turned into a call that enqueues one forward or one
backward.

A peer that cannot be imported keeps its error, which the harness prints; one that refuses a shape raises when called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cells import Cell

Call = Callable[[], object]
Prepare = Callable[[Cell, torch.Tensor, torch.Tensor, torch.Tensor], Call]

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Peer:
    """prepare(cell, q, k, v) returns the forward's call; q, k, v are (batch, seqlen, heads, head_dim).

    no_gradient says why there is none, for a peer that has a forward alone.
    """

    name: str
    prepare: Prepare | None = None
    version: str = ""
    unavailable: str | None = None
    no_gradient: str | None = None

    def call(self, cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *dout: torch.Tensor) -> Call:
        """The call that the cell asks for, with dout for a backward; an exception where there is none."""
        if self.prepare is None:
            raise RuntimeError(self.unavailable or "unavailable")
        if cell.op != "bwd":
            return self.prepare(cell, q, k, v)
        if self.no_gradient is not None:
            raise NotImplementedError(self.no_gradient)
        return backward_call(self.prepare, cell, q, k, v, *dout)


def backward_call(
    prepare: Prepare, cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
) -> Call:
    """The backward alone: autograd over the graph of one forward, which runs here. The call returns dq, dk and dv."""
    with torch.enable_grad():
        leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
        result = prepare(cell, *leaves)()
        out = result[0] if isinstance(result, tuple) else result
        if not isinstance(out, torch.Tensor) or out.grad_fn is None:
            raise NotImplementedError("its output has no gradient")
    if out.shape != dout.shape:  # SDPA's (batch, heads, seqlen, head_dim)
        dout = dout.transpose(1, 2)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def inputs(cell: Cell, seed: int, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fresh normal q, k, v of a cell. Never zeros: they draw less power and run faster than real data."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = TORCH_DTYPES[cell.dtype]
    shapes = (
        (cell.batch, cell.seqlen_q, cell.heads, cell.head_dim),
        (cell.batch, cell.seqlen_k, cell.kv_heads, cell.head_dim),
        (cell.batch, cell.seqlen_k, cell.kv_heads, cell.head_dim_v),
    )
    q, k, v = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)
    return q, k, v


def output_gradient(cell: Cell, seed: int, device: str = "cuda") -> torch.Tensor:
    """A normal dout for the backward pass of a cell."""
    generator = torch.Generator(device=device).manual_seed(seed + 1_000_003)
    shape = (cell.batch, cell.seqlen_q, cell.heads, cell.head_dim_v)
    return torch.randn(shape, generator=generator, device=device).to(TORCH_DTYPES[cell.dtype])


def _sdpa(backend: SDPBackend) -> Prepare:
    def prepare(cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        if cell.causal and cell.seqlen_q != cell.seqlen_k:
            raise ValueError("torch's is_causal is top-left aligned: not the same problem when seqlen_q != seqlen_k")
        qt, kt, vt = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        gqa = cell.heads != cell.kv_heads

        def call() -> object:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(qt, kt, vt, is_causal=cell.causal, enable_gqa=gqa)

        return call

    return prepare


def _function_peer(module: str, **fixed: Any) -> Prepare:
    function = importlib.import_module(module).flash_attn_func

    def prepare(cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        return lambda: function(q, k, v, causal=cell.causal, **fixed)

    return prepare


def _flashhopper(**fixed: Any) -> Prepare:
    package = importlib.import_module("flashhopper")
    # A silent turn to the tiled engine would be timed as if it were the kernel.
    package.set_backend("hopper")
    return _function_peer("flashhopper", **fixed)


def _version(*names: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


_LOADERS: dict[str, tuple[Callable[[], Prepare], Callable[[], str]]] = {
    "flashhopper": (_flashhopper, lambda: str(importlib.import_module("flashhopper").__version__)),
    "cudnn": (lambda: _sdpa(SDPBackend.CUDNN_ATTENTION), lambda: f"cuDNN {torch.backends.cudnn.version()}"),
    "sdpa": (lambda: _sdpa(SDPBackend.FLASH_ATTENTION), lambda: f"torch {torch.__version__}"),
    "fa3": (lambda: _function_peer("fa3_fwd_interface"), lambda: _version("fa3-fwd", "fa3_fwd")),
    "fa4": (lambda: _function_peer("flash_attn.cute"), lambda: _version("flash-attn-4")),
}
NO_GRADIENT = {"fa3": "the fa3-fwd package has no backward"}
ALIASES = {"sdpa_cudnn": "cudnn", "sdpa_flash": "sdpa", "fa2": "sdpa", "fa3-fwd": "fa3", "flash-attn-4": "fa4"}
NAMES = tuple(_LOADERS)


def load(name: str) -> Peer:
    """Imports one peer; never raises for a peer that is missing or broken."""
    name = ALIASES.get(name, name)
    if name not in _LOADERS:
        raise ValueError(f"peer {name!r} is not one of {', '.join(NAMES)}")
    load_prepare, load_version = _LOADERS[name]
    try:
        return Peer(name, load_prepare(), load_version(), no_gradient=NO_GRADIENT.get(name))
    except Exception as error:  # an import may fail in any way: a missing library, a version clash
        return Peer(name, unavailable=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")


def load_all(names: list[str]) -> list[Peer]:
    return [load(name) for name in dict.fromkeys(ALIASES.get(n, n) for n in names)]


def load_deterministic() -> Peer:
    """flashhopper with bit-reproducible gradients, a contender of its own in backward rows."""
    peer = load("flashhopper")
    if peer.prepare is not None:
        peer.prepare = _flashhopper(deterministic=True)
    return Peer("flashhopper_det", peer.prepare, peer.version, peer.unavailable)
