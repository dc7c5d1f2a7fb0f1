"""transformers' models in bf16 on the kernels: tiny and random, with padding, from a cache, and training, no further
from a float32 model than transformers' own attention is. Needs transformers (its release: pyproject.toml).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own deprecations

SIZES = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
WINDOWS = {"sliding_window": 70, "layer_types": ["sliding_attention", "full_attention"]}
# One expert: among several, rounding may send a token to another one, and that error has nothing to do with attention.
EXPERTS = {"num_local_experts": 1, "num_experts_per_tok": 1, "experts_implementation": "eager"}
MODELS = {
    "grouped queries": ("Llama", {}),
    "sliding windows": ("Gemma3Text", WINDOWS | {"query_pre_attn_scalar": 64}),
    "softcap": ("Gemma2", WINDOWS | {"query_pre_attn_scalar": 64, "attn_logit_softcapping": 5.0}),
    "sinks": ("GptOss", WINDOWS | EXPERTS),
}


@pytest.fixture
def integration() -> Any:
    try:
        from flashhopper.integrations import transformers

        transformers.register()
    except ImportError as error:
        pytest.fail(str(error))
    return transformers


def make(kind: str, dtype: torch.dtype) -> torch.nn.Module:
    import transformers

    name, options = MODELS[kind]
    config = getattr(transformers, f"{name}Config")(**(SIZES | options))
    torch.manual_seed(0)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.08)
    return model.to("cuda", dtype).eval()


def batch(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Three rows of 300, 131 and 1 tokens; side "" pads none."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    ids = torch.randint(1, 97, (3, 300), device="cuda", generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate((300, 131, 1)):
        mask[row, : 300 - length if side == "left" else 0] = 0
        mask[row, length if side == "right" else 300 :] = 0
    return ids * mask, mask


def judge(make_rows: Any, kind: str, name: str) -> None:
    """make_rows(model) on flashhopper in bf16 is as near to eager in float32 as eager in bf16 is, but for a factor."""
    rows = {}
    for label, dtype, attention in (
        ("exact", torch.float32, "eager"),
        ("eager", torch.bfloat16, "eager"),
        ("ours", torch.bfloat16, name),
    ):
        model = make(kind, dtype)
        model.set_attn_implementation(attention)
        rows[label] = make_rows(model).float()
    assert rows["ours"].isfinite().all()
    errors = {label: float((rows[label] - rows["exact"]).norm()) for label in ("eager", "ours")}
    assert errors["ours"] <= 1.5 * errors["eager"]
    assert 0 < errors["eager"] < 0.2 * float(rows["exact"].norm())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("side", ["", "left", "right"])
def test_logits(kind: str, side: str, integration: Any) -> None:
    ids, mask = batch(side)

    @torch.no_grad()
    def logits(model: torch.nn.Module) -> torch.Tensor:
        return model(ids, attention_mask=mask).logits[mask == 1]

    judge(logits, kind, integration.NAME)


@pytest.mark.parametrize("kind", MODELS)
def test_decoding_from_a_cache(kind: str, integration: Any) -> None:
    """The prompt in two parts, then tokens one by one, with rows padded on the left."""
    ids, mask = batch("left")
    parts = [200, 96, 1, 1, 1, 1]

    @torch.no_grad()
    def logits(model: torch.nn.Module) -> torch.Tensor:
        from transformers import DynamicCache

        cache, found, end = DynamicCache(config=model.config), [], 0
        for part in ids.split(parts, dim=1):
            end += part.shape[1]
            positions = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, -part.shape[1] :]
            out = model(part, attention_mask=mask[:, :end], position_ids=positions, past_key_values=cache)
            found.append(out.logits)
        return torch.cat(found, 1)[mask == 1]

    judge(logits, kind, integration.NAME)


@pytest.mark.parametrize("kind", MODELS)
def test_gradients(kind: str, integration: Any) -> None:
    ids, mask = batch("right")

    def gradients(model: torch.nn.Module) -> torch.Tensor:
        model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        named = sorted((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
        return torch.cat([gradient.float().flatten() for name, gradient in named if "self_attn" in name])

    judge(gradients, kind, integration.NAME)
