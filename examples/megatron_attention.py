"""flashhopper as the core attention of a Megatron-core model.

    pip install megatron-core
    python examples/megatron_attention.py      # a tiny GPT with it, on one process

A layer specification names the class of its core attention, so a model takes flashhopper by naming Attention there:

    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = Attention
    model = GPTModel(config, spec, ...)

Tensor, sequence and pipeline parallelism are outside of core attention and stay as they are. Causal, full, windowed and
packed (thd) attention, grouped queries and softmax offsets (sinks) are served; dropout, biases, arbitrary masks and
context parallelism are refused by name.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

import flashhopper

CAUSAL = {
    AttnMaskType.causal: True,
    AttnMaskType.padding_causal: True,  # of packed sequences
    AttnMaskType.no_mask: False,
    AttnMaskType.padding: False,
}


class Attention(torch.nn.Module):
    """Core attention: queries (seqlen, batch, heads, head_dim) to (seqlen, batch, heads * head_dim)."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout != 0.0:
            raise ValueError(f"attention_dropout is {dropout}: flashhopper has no dropout; set it to 0.0")
        if config.context_parallel_size != 1:
            raise ValueError(f"context_parallel_size is {config.context_parallel_size}: must be 1 with this attention")
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale or config.kv_channels**-0.5
        is_windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window_size = tuple(config.window_size) if is_windowed else (-1, -1)
        self.deterministic = config.deterministic_mode
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        if config.softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            if config.perform_initialization:
                config.init_method(self.softmax_offset)
        else:
            zeros = torch.zeros(heads) if config.softmax_type == "off-by-one" else None
            self.register_buffer("softmax_offset", zeros, persistent=False)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """attention_mask is not read, as in Transformer Engine: the mask's type says what it is."""
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if mask_type not in CAUSAL or (mask_type.name.startswith("padding") and packed_seq_params is None):
            raise ValueError(
                f"attn_mask_type is {mask_type.name}: flashhopper has causal and no_mask; padded batches go in as "
                "packed sequences (packed_seq_params), arbitrary masks are refused"
            )
        if attention_bias is not None:
            raise ValueError("attention_bias is given: flashhopper has no bias of the scores; pass None")
        options: dict[str, Any] = {
            "softmax_scale": self.softmax_scale,
            "causal": CAUSAL[mask_type],
            "window_size": self.window_size,
            "sink": self.softmax_offset,
            "deterministic": self.deterministic,
        }
        if packed_seq_params is not None:
            p = packed_seq_params
            offsets = (p.cu_seqlens_q, p.cu_seqlens_kv, p.max_seqlen_q, p.max_seqlen_kv)
            return flashhopper.flash_attn_varlen_func(query, key, value, *offsets, **options).flatten(1)
        out = flashhopper.flash_attn_func(*(x.transpose(0, 1) for x in (query, key, value)), **options)
        return out.transpose(0, 1).flatten(2)


def tiny_gpt(core_attention: type[torch.nn.Module] | None, **options: Any) -> torch.nn.Module:
    """A GPT of two layers, with this core attention or with Megatron's own."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    spec = get_gpt_layer_local_spec()
    if core_attention is not None:
        spec.submodules.self_attention.submodules.core_attention = core_attention
    settings = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
    settings |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "use_cpu_initialization": True}
    config = TransformerConfig(**(settings | options))
    torch.manual_seed(0)
    return GPTModel(config, spec, vocab_size=96, max_sequence_length=64, position_embedding_type="learned_absolute")


def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    seqlen = ids.shape[1]
    hidden = torch.ones(seqlen, seqlen, dtype=torch.bool, device=ids.device).triu(1)
    return model(ids, torch.arange(seqlen, device=ids.device).expand_as(ids), hidden[None, None])


def main() -> None:
    from megatron.core import parallel_state

    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        os.environ.setdefault(name, value)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model = tiny_gpt(Attention)
    ids = torch.randint(0, 96, (2, 48))
    loss = torch.nn.functional.cross_entropy(logits(model, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    print(f"loss {loss.item():.4f}, gradients of {sum(p.grad is not None for p in model.parameters())} parameters")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
