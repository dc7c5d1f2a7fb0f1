"""The contenders: flashhopper and every peer that imports, each turned into a call that enqueues one forward.

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
    """prepare(cell, q, k, v) returns the call; q, k, v are (batch, seqlen, heads, head_dim)."""

    name: str
    prepare: Prepare | None = None
    version: str = ""
    unavailable: str | None = None


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


def _flashhopper() -> Prepare:
    package = importlib.import_module("flashhopper")
    # A silent turn to the tiled engine would be timed as if it were the kernel.
    package.set_backend("hopper")
    return _function_peer("flashhopper")


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
ALIASES = {"sdpa_cudnn": "cudnn", "sdpa_flash": "sdpa", "fa2": "sdpa", "fa3-fwd": "fa3", "flash-attn-4": "fa4"}
NAMES = tuple(_LOADERS)


def load(name: str) -> Peer:
    """Imports one peer; never raises for a peer that is missing or broken."""
    name = ALIASES.get(name, name)
    if name not in _LOADERS:
        raise ValueError(f"peer {name!r} is not one of {', '.join(NAMES)}")
    load_prepare, load_version = _LOADERS[name]
    try:
        return Peer(name, load_prepare(), load_version())
    except Exception as error:  # an import may fail in any way: a missing library, a version clash
        return Peer(name, unavailable=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")


def load_all(names: list[str]) -> list[Peer]:
    return [load(name) for name in dict.fromkeys(ALIASES.get(n, n) for n in names)]
