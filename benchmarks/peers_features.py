"""The contenders of the feature rows: flashhopper, FA3, FA4 and cuDNN under windows, grouped heads and packing, and
flashhopper's own variants. Before it: features.py, parts.py; after it: peers.py, peers_cudnn.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import peers_cudnn
from benchmarks.cells import Cell
from benchmarks.features import SOFTCAP, Case
from benchmarks.peers import NO_GRADIENT, Call, Peer, Prepare, load
from benchmarks.timing import describe

MODULES = {"flashhopper": "flashhopper", "fa3": "fa3_fwd_interface", "fa4": "flash_attn.cute"}
DENSE, WITH_SOFTCAP, WITH_SINK = "flashhopper_dense", "flashhopper_softcap", "flashhopper_sink"
UNPACKED = "flashhopper_unpacked"  # tiles of one query head


def offsets(lengths: tuple[int, ...], device: str) -> torch.Tensor:
    """int32 (sequences + 1,): where each packed sequence begins, and the end of the last."""
    sizes = torch.tensor((0, *lengths), dtype=torch.int64)
    return sizes.cumsum(0).to(device=device, dtype=torch.int32)


def _function(name: str, case: Case, device: str, **fixed: Any) -> Prepare:
    """flash_attn_func or flash_attn_varlen_func of a package: all three take these arguments by the same names."""
    module = importlib.import_module(MODULES[name])
    options: dict[str, Any] = {"causal": case.cell.causal, **fixed}
    if case.left >= 0:
        options["window_size"] = (case.left, 0)
    if case.lengths:
        cu, longest = offsets(case.lengths, device), max(case.lengths)
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
    attend = module.flash_attn_varlen_func if case.lengths else module.flash_attn_func

    def prepare(cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        return lambda: attend(q, k, v, **options)

    return prepare


def _dense(case: Case) -> Prepare:
    """Packed sequences of one length as the batch that they are."""
    attend = importlib.import_module("flashhopper").flash_attn_func

    def prepare(cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        batch = [x.view(cell.batch, cell.seqlen_q, *x.shape[1:]) for x in (q, k, v)]
        return lambda: attend(*batch, causal=cell.causal).flatten(0, 1)

    return prepare


def _loaders(case: Case, device: str) -> dict[str, Callable[[], Prepare]]:
    """What builds each contender that runs flashhopper, FA3 or FA4."""
    found: dict[str, Callable[[], Prepare]] = {"flashhopper": lambda: _function("flashhopper", case, device)}
    if case.feature == "options":
        sink = torch.randn(case.cell.heads, generator=torch.Generator().manual_seed(0)).to(device)
        found[WITH_SOFTCAP] = lambda: _function("flashhopper", case, device, softcap=SOFTCAP)
        found[WITH_SINK] = lambda: _function("flashhopper", case, device, sink=sink)
        return found
    if case.is_short:
        found[UNPACKED] = lambda: _function("flashhopper", case, device, pack_gqa=False)
    if case.is_uniform:
        found[DENSE] = lambda: _dense(case)
    return {**found, **{name: (lambda name=name: _function(name, case, device)) for name in ("fa3", "fa4")}}  # type: ignore[misc]


def load_all(case: Case, device: str = "cuda", backend: str = "hopper") -> list[Peer]:
    """The contenders of one case, flashhopper first; one that does not import keeps its error. flashhopper runs on
    `backend` alone: a silent emulation would be timed as the kernel."""
    missing = load("flashhopper").unavailable if backend == "hopper" else None
    if missing is None:
        importlib.import_module("flashhopper").set_backend(backend)
    found = []
    for name, loader in _loaders(case, device).items():
        try:
            if name.startswith("flashhopper") and missing is not None:
                raise RuntimeError(missing)
            found.append(Peer(name, loader(), no_gradient=NO_GRADIENT.get(name)))
        except Exception as error:  # an import may fail in any way
            found.append(Peer(name, unavailable=describe(error)))
    if case.feature == "gqa":
        found.append(load("cudnn"))  # through torch's SDPA, which has neither windows nor packed sequences
    elif case.feature != "options":
        found.append(peers_cudnn.load(case))
    return found
