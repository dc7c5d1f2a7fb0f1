"""flashhopper as an attention implementation of transformers 5. Before it: your code; after it: padding.py,
interface.py.

    from flashhopper.integrations import transformers as flashhopper_transformers

    flashhopper_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="flashhopper")

Three hooks: an attention function, a mask function (padding stays a 2-D mask, anything that is no causal, sliding,
bidirectional or packed pattern is refused), and the check of attn_implementation, because transformers takes a name
with "flash" in it for a package of its own that it may exchange for another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..fp8 import Fp8Recipe
from ..interface import flash_attn_func
from . import padding

NAME = "flashhopper"
_names: set[str] = set()

# What attention functions of transformers may be given and flashhopper cannot do: argument, what it is.
_REFUSED = {
    "position_bias": "a bias of each score (ALiBi, T5)",
    "alibi": "ALiBi",
    "attention_bias": "a bias of each score",
    "head_mask": "a factor of each head",
    "layer_head_mask": "a factor of each head",
    "indices": "a sparse pattern",
    "block_indices": "a sparse pattern",
    "block_table": "a paged cache",
}
# The patterns that flash_attn_func has, by the names of transformers' mask functions. Sliding windows also come as the
# argument of the attention function; a packed batch's positions follow from its sequences.
_PATTERNS = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
}
_AND = "and_masks.<locals>.and_mask"
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
_REMAPPED = "remap_positions_for_packed_sequence.<locals>.inner_mask"


def register(name: str = NAME, *, fp8: Fp8Recipe | None = None, deterministic: bool = False) -> None:
    """Make attn_implementation=name mean flashhopper; may be called again, also with other options.

    Args:
        name: for several choices side by side, such as register("flashhopper-e4m3", fp8=Fp8Recipe.e4m3()).
        fp8: attention in 8 bits, flash_attn_func's argument.
        deterministic: flash_attn_func's argument.

    Raises:
        ImportError: no transformers 5.
        ValueError: name is one of transformers' own.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    except ImportError as error:
        raise ImportError("flashhopper.integrations.transformers needs transformers>=5: pip install it") from error
    if name not in _names and name in ("eager", *AttentionInterface._global_mapping):
        raise ValueError(f"name is {name!r}: must not be an attention implementation of transformers' own")
    AttentionInterface.register(name, functools.partial(attention, fp8=fp8, deterministic=deterministic))
    AttentionMaskInterface.register(name, torch.compiler.disable(mask))  # type: ignore[no-untyped-call]
    _names.add(name)
    if not hasattr(PreTrainedModel._check_and_adjust_attn_implementation, "flashhopper"):
        PreTrainedModel._check_and_adjust_attn_implementation = _checked(
            PreTrainedModel._check_and_adjust_attn_implementation
        )


def _checked(original: Callable[..., str]) -> Callable[..., str]:
    """transformers' check of attn_implementation, which lets flashhopper through where the model can take it."""

    @functools.wraps(original)
    def check(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation not in _names:
            return original(self, attn_implementation, *args, **kwargs)
        if not self._supports_flash_attn:
            raise ValueError(
                f"attn_implementation is {attn_implementation!r}: {type(self).__name__} declares no support for flash "
                'attention (a bias of its scores, or attention of its own); pass "eager" or "sdpa"'
            )
        return attn_implementation

    check.flashhopper = True  # type: ignore[attr-defined]
    return check


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    *,
    fp8: Fp8Recipe | None = None,
    deterministic: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers' AttentionInterface.

    Args:
        query: (batch, heads, seqlen_q, head_dim); key, value: (batch, kv_heads, seqlen_k, head_dim).
        attention_mask: None; or what mask() returned.
        sliding_window: keys that a query sees, itself included; in attention that is not causal, to either side.
        s_aux: (heads,) sinks.
        kwargs: cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k pack sequences; _REFUSED are refused; others
            do not concern attention.

    Returns:
        (batch, seqlen_q, heads, head_dim_v), and None for the weights.

    Raises:
        ValueError: dropout, a mask of more than 2 dimensions, an argument of _REFUSED.
    """
    _refuse(dropout, attention_mask, kwargs)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    left = -1 if sliding_window is None else sliding_window - 1
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "causal": is_causal,
        "window_size": (left, 0 if is_causal else left),
        "softcap": softcap or 0.0,
        "sink": None if s_aux is None else s_aux.reshape(-1),
        "fp8": fp8,
        "deterministic": deterministic,
    }
    packing = _packing_arguments(kwargs)
    if packing is None and attention_mask is not None:
        k, v = k[:, : attention_mask.shape[1]], v[:, : attention_mask.shape[1]]  # a static cache holds more
        packing = _packing_of_mask(attention_mask, q.shape[1], is_causal or sliding_window is not None)
    if packing is not None:
        return padding.attend(q, k, v, packing, **options), None
    out = flash_attn_func(q, k, v, **options)
    assert isinstance(out, torch.Tensor)
    return out, None


def _refuse(dropout: float, attention_mask: Any, kwargs: dict[str, Any]) -> None:
    if dropout != 0.0:
        raise ValueError(
            f"dropout is {dropout}: flashhopper has no dropout of attention weights; set the config's "
            "attention_dropout (attention_probs_dropout_prob) to 0.0, or take another attention implementation"
        )
    if attention_mask is not None and (not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}: must be (batch, seqlen), ones for tokens and "
            "zeros for padding; arbitrary masks are refused, take another attention implementation for them"
        )
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}, {what}, is not available in flashhopper: take another attention implementation")
    if kwargs.get("output_attentions"):
        raise ValueError('output_attentions is True: flashhopper has no attention weights; take "eager" for them')


def _packing_arguments(kwargs: dict[str, Any]) -> padding.Packing | None:
    """The packing that a caller or a collator passed through the model."""
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    cu_seqlens_q, cu_seqlens_k, longest_q, longest_k = (kwargs.get(name) for name in names)
    if cu_seqlens_q is None or cu_seqlens_k is None or longest_q is None or longest_k is None:
        return None
    return padding.Packing(cu_seqlens_q.int(), cu_seqlens_k.int(), int(longest_q), int(longest_k))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _packing_of_mask(mask: torch.Tensor, seqlen_q: int, aligned: bool) -> padding.Packing | None:
    if mask.dtype == torch.int32:  # sequence numbers, from mask() below; padding is bool, or int64 from a user
        return padding.remember(mask, "ids", lambda: padding.pack_sequence_ids(mask))
    make = functools.partial(padding.pack_padded, mask.bool(), seqlen_q, aligned)
    return padding.remember(mask, (seqlen_q, aligned), make)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """A mask function of transformers' AttentionMaskInterface.

    Returns:
        None where the attention function's own arguments say all; bool (batch, keys), which keys are tokens, where
        there is a padding mask or a static cache holds more keys than were written; int32 (batch, seqlen), the number
        of each token's sequence, where rows hold several.

    Raises:
        ValueError: mask_function is no pattern that flashhopper has.
    """
    parts = [] if mask_function is None else list(_parts(mask_function))
    for part in parts:
        if part.__qualname__ == _PACKED:
            numbers: torch.Tensor = _closure(part)["packed_sequence_mask"]
            # Under torch.compile transformers takes every batch for a packed one.
            return numbers.int() if bool((numbers != numbers[:, :1]).any()) else None
    if attention_mask is not None:
        return attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    is_causal = any(part.__qualname__ == "causal_mask_function" for part in parts)
    if not is_causal or (isinstance(q_offset, int) and kv_offset + kv_length == q_offset + q_length):
        return None
    written = int(q_offset) + q_length - kv_offset  # the keys of a static cache that exist
    return None if written == kv_length else torch.ones(batch_size, written, dtype=torch.bool, device=device)


def _parts(mask_function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The patterns whose intersection mask_function is.

    Raises:
        ValueError: one is unknown.
    """
    name = getattr(mask_function, "__qualname__", repr(mask_function))
    if name == _AND:
        for part in _closure(mask_function)["mask_functions"]:
            yield from _parts(part)
    elif name == _REMAPPED:
        yield from _parts(_closure(mask_function)["mask_function"])
    elif name in _PATTERNS or name == _PACKED:
        yield mask_function
    else:
        raise ValueError(
            f"the model asks for the mask {name}: flashhopper has causal, sliding-window, bidirectional and packed "
            "attention; arbitrary masks are refused, take another attention implementation for them"
        )


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    cells: tuple[Any, ...] = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
