"""flashhopper as an attention backend of diffusers. Before it: your code; after it: padding.py, interface.py.

    from flashhopper.integrations import diffusers as flashhopper_diffusers

    flashhopper_diffusers.register()
    pipe.transformer.set_attention_backend("flashhopper")

diffusers keeps its backends in an enum and a registry and has no call to add one from outside: this adds a member.
"""

from __future__ import annotations

from typing import Any

import torch

from ..interface import flash_attn_func
from . import padding

NAME = "flashhopper"


def register() -> None:
    """Make "flashhopper" a backend of diffusers; may be called again.

    Raises:
        ImportError: no diffusers, or one without the registry of attention backends.
    """
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    except ImportError as error:
        raise ImportError(
            "flashhopper.integrations.diffusers needs a diffusers with models.attention_dispatch: pip install "
            "'diffusers>=0.35'"
        ) from error
    if NAME not in AttentionBackendName._value2member_map_:
        member = str.__new__(AttentionBackendName, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        member._sort_order_ = len(AttentionBackendName._member_names_)
        AttentionBackendName._member_names_.append(member._name_)
        AttentionBackendName._member_map_[member._name_] = member
        AttentionBackendName._value2member_map_[NAME] = member
    _AttentionBackendRegistry.register(AttentionBackendName(NAME))(attention)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """An attention backend of diffusers.

    Args:
        query: (batch, seqlen_q, heads, head_dim); key, value: (batch, seqlen_k, kv_heads, head_dim).
        attn_mask: None; or which keys exist, bool (batch, seqlen_k) or (batch, 1, 1, seqlen_k), in each row one run of
            True. It is read on the host once.
        enable_gqa: heads may be a multiple of kv_heads in any case.

    Raises:
        ValueError: dropout_p, another mask, context parallelism.
    """
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p is {dropout_p}: flashhopper has no dropout of attention weights; pass 0.0")
    if _parallel_config is not None:
        raise ValueError(
            "parallel_config is given: context parallelism inside diffusers is not available in flashhopper; take "
            'another backend, such as "_native_cudnn"'
        )
    options: dict[str, Any] = {"softmax_scale": scale, "causal": is_causal, "window_size": window_size}
    if attn_mask is None:
        return flash_attn_func(query, key, value, return_lse=return_lse, **options)
    valid = _valid_keys(attn_mask, key)
    if is_causal or return_lse or tuple(window_size) != (-1, -1):
        raise ValueError("attn_mask is given with is_causal, window_size or return_lse: pass one or the other")
    seqlen_q = query.shape[1]
    packing = padding.remember(attn_mask, (seqlen_q, False), lambda: padding.pack_padded(valid, seqlen_q, False))
    if packing is None:
        return flash_attn_func(query, key, value, **options)
    return padding.attend(query, key, value, packing, **options)


def _valid_keys(mask: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    batch, seqlen_k = key.shape[:2]
    if mask.dtype != torch.bool or tuple(mask.shape) not in ((batch, seqlen_k), (batch, 1, 1, seqlen_k)):
        raise ValueError(
            f"attn_mask is {mask.dtype} {tuple(mask.shape)}: must be bool ({batch}, {seqlen_k}) or ({batch}, 1, 1, "
            f"{seqlen_k}), True for keys that exist; arbitrary masks and biases are refused, take another backend"
        )
    return mask.reshape(batch, seqlen_k)
