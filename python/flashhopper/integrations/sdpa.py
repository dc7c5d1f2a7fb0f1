"""flashhopper behind torch.nn.functional.scaled_dot_product_attention and torch.nn.attention.varlen. Before it: your
code; after it: library.py.

    from flashhopper.integrations import sdpa

    sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("flashhopper")  # until restore_flash_attention_impl()

Active, it serves the operators of torch's flash backend on CUDA devices. torch still chooses the backend: masks, and
causal attention of unequal lengths, go to others; sdpa_kernel(SDPBackend.FLASH_ATTENTION) refuses to.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from .. import backends, checks, library

NAME = "flashhopper"
_Tensor = torch.Tensor
_Arguments = dict[str, Any]

# Arguments of torch's operators that ask for what flashhopper does not have, and the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "dropout_p": (0.0,),
    "return_debug_mask": (False,),
    "alibi_slopes": (None,),
    "block_table": (None,),
    "num_splits": (None, 0, 1),
}
_KNOWN = {
    *("query", "key", "value", "out", "grad_out", "logsumexp", "scale", "is_causal", "cum_seq_q", "cum_seq_k"),
    *("max_q", "max_k", "window_size_left", "window_size_right", "seqused_k"),
    *("philox_seed", "philox_offset", "rng_state", "unused"),  # of dropout
}


def register() -> None:
    """Make "flashhopper" known to torch.nn.attention.activate_flash_attention_impl; may be called again.

    Raises:
        RuntimeError: this torch has no registry of flash attention implementations.
    """
    register_impl: Any = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register_impl is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl: take a newer one, or "
            "call flashhopper.flash_attn_func"
        )
    register_impl(NAME, register_fn=activate)


class Handle:
    """Keeps the operators replaced; remove() gives torch's own back."""

    def __init__(self, replaced: Any) -> None:
        self._replaced = replaced

    def remove(self) -> None:
        if self._replaced is not None:
            self._replaced._destroy()
        self._replaced = None


def activate(dispatch_key: str = "CUDA") -> Handle:
    """Replace torch's flash attention operators for this kind of device; torch's registry calls it."""
    replaced: Any = torch.library.Library("aten", "IMPL", dispatch_key)  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*[Oo]verriding a previously registered kernel.*")
        for name, implementation in _OPERATORS.items():
            operator = getattr(torch.ops.aten, name, None)  # older versions of torch lack some
            if operator is not None:
                replaced.impl(name, _bound(operator.default._schema, implementation), dispatch_key)
    return Handle(replaced)


def _bound(schema: Any, implementation: Callable[[_Arguments], Any]) -> Callable[..., Any]:
    """The implementation as a function of this operator's own arguments, which change between versions of torch."""
    names = [argument.name for argument in schema.arguments]
    defaults = {argument.name: argument.default_value for argument in schema.arguments}

    def call(*args: Any, **kwargs: Any) -> Any:
        given = defaults | dict(zip(names, args, strict=False)) | kwargs
        for name in given.keys() - _KNOWN:
            value, allowed = given[name], _REFUSED.get(name, (defaults[name],))
            if isinstance(value, _Tensor) or value not in allowed:
                shown = f"a tensor {tuple(value.shape)}" if isinstance(value, _Tensor) else repr(value)
                raise ValueError(
                    f"{schema.name}: {name} is {shown}, which flashhopper does not have; pass {allowed[0]!r}, or call "
                    "torch.nn.attention.restore_flash_attention_impl()"
                )
        return implementation(given)

    return call


def _numbers(given: _Arguments) -> tuple[Any, ...]:
    """From softmax_scale to backend, the numbers of flashhopper's operators."""
    scale = given["scale"]
    if scale is None:
        scale = given["query"].shape[-1] ** -0.5
    sides = (given.get("window_size_left"), given.get("window_size_right"))
    left, right = (-1 if side is None else side for side in sides)
    left, right = checks.normalize_window(given["is_causal"], (left, right))
    left, right = checks.widen_window(left, right, given["max_q"], given["max_k"])
    return scale, left, right, 0.0, 0, torch.are_deterministic_algorithms_enabled(), backends.backend()


def _like(result: _Tensor, example: _Tensor) -> _Tensor:
    """result with the strides that torch's fake kernel promises, empty_like's."""
    promised = torch.empty_like(example, device="meta")
    if result.shape != promised.shape or result.stride() == promised.stride():
        return result
    return torch.empty_like(example).copy_(result)


def _forward(given: _Arguments) -> tuple[_Tensor, _Tensor]:
    tensors: list[Any] = [given[name] for name in ("query", "key", "value")]
    is_packed = given["cum_seq_q"] is not None
    run: Any = library.varlen_forward if is_packed else library.dense_forward
    out, lse = run(*tensors, *(_packing(given) if is_packed else ()), None, *_numbers(given))
    return out, lse


def _backward(given: _Arguments) -> tuple[_Tensor, _Tensor, _Tensor]:
    tensors = [given[name] for name in ("query", "key", "value", "out", "logsumexp")]
    is_packed = given["cum_seq_q"] is not None
    run: Any = library.varlen_backward if is_packed else library.dense_backward
    packing = _packing(given) if is_packed else ()
    dq, dk, dv, _ = run(given["grad_out"], None, *tensors, *packing, None, *_numbers(given))  # no gradient of lse
    return dq, dk, dv


def _packing(given: _Arguments) -> list[Any]:
    return [given["cum_seq_q"], given["cum_seq_k"], None, given.get("seqused_k"), given["max_q"], given["max_k"]]


def _without_dropout(q: _Tensor) -> tuple[_Tensor, _Tensor, _Tensor]:
    """The random state, its offset and the debug mask that torch's operators return."""
    state = q.new_zeros(2, dtype=torch.uint64)
    return state, q.new_zeros((), dtype=torch.uint64), q.new_empty(0)


def _flash_forward(given: _Arguments) -> tuple[_Tensor, ...]:
    out, lse = _forward(given)
    return _like(out, given["query"]), lse, *_without_dropout(given["query"])


def _flash_forward_inplace(given: _Arguments) -> _Tensor:
    out, lse = _forward(given)
    given["out"].copy_(out)
    return lse


def _transposed(given: _Arguments) -> _Arguments:
    """SDPA's operators have (batch, heads, seqlen, head_dim) and neither windows nor packed sequences."""
    names = ("query", "key", "value", "out", "grad_out")
    turned = {name: given[name].transpose(1, 2) for name in names if name in given}
    lengths = {"max_q": given["query"].shape[2], "max_k": given["key"].shape[2]}
    return given | turned | lengths | {"cum_seq_q": None, "cum_seq_k": None}


def _sdpa_forward(given: _Arguments) -> tuple[Any, ...]:
    out, lse = _forward(_transposed(given))
    query, key = given["query"], given["key"]
    sizes = (None, None, query.shape[2], key.shape[2])
    return _like(out.transpose(1, 2), query), lse, *sizes, *_without_dropout(query)


def _flash_backward(given: _Arguments) -> tuple[_Tensor, ...]:
    inputs = (given["query"], given["key"], given["value"])
    return tuple(map(_like, _backward(given), inputs))


def _sdpa_backward(given: _Arguments) -> tuple[_Tensor, ...]:
    inputs = (given["query"], given["key"], given["value"])
    return tuple(map(_like, (x.transpose(1, 2) for x in _backward(_transposed(given))), inputs))


_OPERATORS: dict[str, Callable[[_Arguments], Any]] = {
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_inplace,
    "_flash_attention_backward": _flash_backward,
}
