"""DTensor's sharding rules of the registered operators. Before it: flashhopper.distributed; after it: library.py and
fp8/operators.py, whose schemas name the tensors.

Sequences of a batch do not meet, and neither do groups of heads, so attention needs no communication when q, k and v
are split along the batch or along the heads alike. Whatever else they are split along is gathered first, by DTensor.
Packed sequences lie in one dimension: they are split along the heads alone, with replicated offsets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .. import library
from ..fp8 import operators

Placements = list[Any]  # a placement for each tensor, None for other arguments
Option = tuple[Placements, Placements]  # of outputs and inputs, on one dimension of a mesh

# Of each tensor of a schema: its dimension of the batch, its dimension of the heads.
Dims = dict[str, tuple[int | None, int | None]]
_ROWS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
_OF_HEADS: Dims = dict.fromkeys(("sink", "dsink"), (None, 0))
DENSE: Dims = {**dict.fromkeys(_ROWS, (0, 2)), **dict.fromkeys(("lse", "dlse"), (0, 1)), **_OF_HEADS}
PACKED: Dims = {**dict.fromkeys(_ROWS, (None, 1)), **dict.fromkeys(("lse", "dlse"), (None, 0)), **_OF_HEADS}

_RULES: dict[Any, Dims] = {
    library.forward_op: DENSE,
    library.backward_op: DENSE,
    library.varlen_forward_op: PACKED,
    library.varlen_backward_op: PACKED,
    operators.fp8_forward_op: DENSE,
    operators.fp8_varlen_forward_op: PACKED,
    operators.quantize_op: {},  # 8-bit tensors have layouts of their own: replicated
    operators.forward8_op: {},
}


def register() -> None:
    """Tell DTensor the rules; import of flashhopper.distributed does it."""
    for operator, dims in _RULES.items():
        register_sharding(operator)(_rule(operator._schema, dims))


def _rule(schema: Any, dims: Dims) -> Callable[..., list[Option]]:
    def options(*arguments: Any) -> list[Option]:
        names = [argument.name for argument in schema.arguments[: len(arguments)]]
        tensors = {name: x for name, x in zip(names, arguments, strict=True) if hasattr(x, "mesh")}

        def option(place: Callable[[str], Any]) -> Option:
            return [place(one.name) for one in schema.returns], [
                place(name) if name in tensors else None for name in names
            ]

        found = [option(lambda name: Replicate())]
        if dims:
            found += [option(place) for place in _splits(tensors, dims)]
        return found

    return options


def _splits(tensors: dict[str, Any], dims: Dims) -> list[Callable[[str], Any]]:
    """The ways to split a call: each says where a tensor lies."""

    def split(axis: int, exceptions: dict[str, Any]) -> Callable[[str], Any]:
        def place(name: str) -> Any:
            dim = dims.get(name, (None, None))[axis]
            return exceptions.get(name, Replicate() if dim is None else Shard(dim))

        return place

    heads_dim = dims["q"][1]
    assert heads_dim is not None
    heads, kv_heads = (tensors[name].shape[heads_dim] for name in ("q", "k"))
    nothing = {} if "sink" in tensors else {"dsink": Replicate()}  # without a sink it has no element
    ways = []
    if dims["q"][0] is not None:
        ways.append(split(0, {"dsink": Partial(), **nothing}))
    if heads == kv_heads or _splits_evenly(kv_heads, tensors["q"].mesh.shape):
        ways.append(split(1, nothing))
    elif kv_heads == 1:  # each rank has some of the heads that share the one of k and v, and a part of their gradients
        shared = {**dict.fromkeys(("k", "v"), Replicate()), **dict.fromkeys(("dk", "dv"), Partial())}
        ways.append(split(1, {**shared, **nothing}))
    return ways


def _splits_evenly(kv_heads: int, mesh_shape: tuple[int, ...]) -> bool:
    """Whether every number of shards that a mesh can make of the heads, and that leaves none empty, divides them: only
    then do a rank's query heads belong to the same rank's key heads.
    """
    dims = range(1, len(mesh_shape) + 1)
    counts = {math.prod(some) for count in dims for some in itertools.combinations(mesh_shape, count)}
    return all(kv_heads % count == 0 for count in counts if count <= kv_heads) and min(counts) <= kv_heads
