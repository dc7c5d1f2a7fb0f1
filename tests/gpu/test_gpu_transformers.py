"""transformers' models in bf16 on the kernels: tiny and random, with padding, from a cache, and training, no further
from a float32 model than transformers' own attention is. Needs transformers (its release: pyproject.toml).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny_models

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own deprecations

LENGTHS = (300, 131, 1)


@pytest.fixture
def integration() -> Any:
    try:
        from flashhopper.integrations import transformers

        transformers.register()
    except ImportError as error:
        pytest.fail(str(error))
    return transformers


def batch(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    ids, mask = tiny_models.padded(LENGTHS, side)
    return ids.cuda(), mask.cuda()


def judge(make_rows: Any, kind: str, name: str) -> None:
    """make_rows(model) on flashhopper in bf16 is as near to eager in float32 as eager in bf16 is, but for a factor."""
    rows = {}
    for label, dtype, attention in (
        ("exact", torch.float32, "eager"),
        ("eager", torch.bfloat16, "eager"),
        ("ours", torch.bfloat16, name),
    ):
        model = tiny_models.make(kind, tiny_models.LARGE).to("cuda", dtype)
        model.set_attn_implementation(attention)
        rows[label] = make_rows(model).float()
    assert rows["ours"].isfinite().all()
    errors = {label: float((rows[label] - rows["exact"]).norm()) for label in ("eager", "ours")}
    assert errors["ours"] <= 1.5 * errors["eager"]
    assert 0 < errors["eager"] < 0.2 * float(rows["exact"].norm())


@pytest.mark.parametrize("kind", tiny_models.KINDS)
@pytest.mark.parametrize("side", ["", "left", "right"])
def test_logits(kind: str, side: str, integration: Any) -> None:
    ids, mask = batch(side)

    @torch.no_grad()
    def logits(model: torch.nn.Module) -> torch.Tensor:
        return model(ids, attention_mask=mask).logits[mask == 1]

    judge(logits, kind, integration.NAME)


@pytest.mark.parametrize("kind", tiny_models.KINDS)
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


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_gradients(kind: str, integration: Any) -> None:
    ids, mask = batch("right")

    def gradients(model: torch.nn.Module) -> torch.Tensor:
        model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        named = sorted((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
        return torch.cat([gradient.float().flatten() for name, gradient in named if "self_attn" in name])

    judge(gradients, kind, integration.NAME)
