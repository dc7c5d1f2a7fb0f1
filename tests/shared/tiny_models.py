"""transformers' own models, tiny and random, and batches for them. Before it: tests/python/integrations (CPU) and
tests/gpu, which bring a scale; after it: transformers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

VOCABULARY = 97
# One expert: among several, rounding may send a token to another one, and that error has nothing to do with attention.
EXPERTS = {"num_local_experts": 1, "num_experts_per_tok": 1, "experts_implementation": "eager"}
KINDS = ("grouped queries", "sliding windows", "softcap", "sinks")


class Scale(NamedTuple):
    """How large the models are; of the weights, their spread: large enough for attention to matter."""

    hidden: int
    intermediate: int
    head_dim: int
    positions: int
    window: int
    softcap: float
    spread: float

    def sizes(self) -> dict[str, Any]:
        """As configurations of transformers call them."""
        return {
            "vocab_size": VOCABULARY,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.positions,
            "pad_token_id": 0,
        }

    def model(self, kind: str) -> tuple[str, dict[str, Any]]:
        """The name of a model of one of KINDS, and what its configuration has beside the sizes."""
        windows = {"sliding_window": self.window, "layer_types": ["sliding_attention", "full_attention"]}
        scaled = windows | {"query_pre_attn_scalar": self.head_dim}
        return {
            "grouped queries": ("Llama", {}),
            "sliding windows": ("Gemma3Text", scaled),
            "softcap": ("Gemma2", scaled | {"attn_logit_softcapping": self.softcap}),
            "sinks": ("GptOss", windows | EXPERTS),
        }[kind]


SMALL = Scale(32, 48, 16, 64, 5, 2.0, 0.3)
LARGE = Scale(256, 256, 64, 1024, 70, 5.0, 0.08)  # many blocks of the kernels


def make(kind: str, scale: Scale) -> torch.nn.Module:
    """A model of one of KINDS, on the CPU, with the same weights in every call."""
    import transformers

    name, options = scale.model(kind)
    config = getattr(transformers, f"{name}Config")(**(scale.sizes() | options))
    torch.manual_seed(0)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    return randomize(model, scale)


def randomize(model: torch.nn.Module, scale: Scale) -> torch.nn.Module:
    """The model itself, with weights of the scale's spread."""
    for parameter in model.parameters():
        parameter.data.normal_(0.0, scale.spread)
    return model.eval()


def tokens(batch: int, seqlen: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, seqlen))


def padded(lengths: tuple[int, ...], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask of rows of these lengths, the first the longest; side "" pads none."""
    longest = lengths[0]
    ids = tokens(len(lengths), longest)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : longest - length if side == "left" else 0] = 0
        mask[row, length if side == "right" else longest :] = 0
    return ids * mask, mask
