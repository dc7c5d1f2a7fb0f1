"""transformers' own models, tiny and random, with flashhopper against their eager attention."""

import inspect

import pytest
import torch
from frameworks import require

import tiny_models
from tiny_models import tokens

transformers = require("transformers")

from flashhopper import Fp8Recipe  # noqa: E402
from flashhopper.integrations import transformers as integration  # noqa: E402

SCALE = tiny_models.SMALL
LENGTHS = (13, 7, 1)


@pytest.fixture(autouse=True)
def _registered() -> None:
    integration.register()


def make(kind: str) -> torch.nn.Module:
    return tiny_models.make(kind, SCALE)


def both(model: torch.nn.Module, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of eager attention and of flashhopper's."""
    results = []
    for name in ("eager", integration.NAME):
        model.set_attn_implementation(name)
        results.append(model(*args, **kwargs).logits)
    return results[0], results[1]


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    return tiny_models.padded(LENGTHS, side)


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_logits(kind: str) -> None:
    expected, actual = both(make(kind), tokens(2, 17))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", tiny_models.KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(kind: str, side: str) -> None:
    ids, mask = padded(side)
    expected, actual = both(make(kind), ids, attention_mask=mask)
    torch.testing.assert_close(actual[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-4)
    assert actual.isfinite().all()


@pytest.mark.parametrize("kind", tiny_models.KINDS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(kind: str, cache: str) -> None:
    """Past the window, from a cache, with rows padded on the left."""
    model = make(kind)
    ids, mask = padded("left")
    options = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    if cache == "static":
        options["cache_implementation"] = "static"
    made = []
    for name in ("eager", integration.NAME):
        model.set_attn_implementation(name)
        made.append(model.generate(ids, attention_mask=mask, **options))
    assert torch.equal(made[0].sequences, made[1].sequences)
    for expected, actual in zip(made[0].logits, made[1].logits, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_chunks_from_a_static_cache(kind: str) -> None:
    """No mask at all: what the cache has not written yet must not be seen."""
    model = make(kind)
    model.set_attn_implementation(integration.NAME)
    ids = tokens(2, 12)
    whole = model(ids).logits
    cache = transformers.StaticCache(config=model.config, max_cache_len=20)
    names = inspect.signature(model.forward).parameters
    arguments = {"cache" if "cache" in names else "past_key_values": cache, "use_cache": True}
    parts = [model(chunk, **arguments).logits for chunk in ids.split((5, 1, 4, 2), dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["grouped queries", "sliding windows"])
@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens"])
def test_packed_sequences(kind: str, how: str) -> None:
    model = make(kind)
    model.set_attn_implementation(integration.NAME)
    ids, lengths = tokens(1, 20), [9, 1, 10]
    arguments: dict[str, object] = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    if how == "cu_seq_lens":
        offsets = torch.tensor([0, 9, 10, 20], dtype=torch.int32)
        arguments |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 10, "max_length_k": 10}
    packed = model(ids, use_cache=False, **arguments).logits
    alone = torch.cat([model(row).logits for row in ids.split(lengths, dim=1)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_training(kind: str) -> None:
    model = make(kind).train()
    ids, mask = padded("right")
    gradients = []
    for name in ("eager", integration.NAME):
        model.set_attn_implementation(name)
        model.zero_grad()
        model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        gradients.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for key, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], expected, rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.parametrize("side", ["", "left"])
def test_compiled(side: str) -> None:
    """With graph breaks at the mask, which is read on the host."""
    model = make("sliding windows")
    model.set_attn_implementation(integration.NAME)
    ids, mask = padded("left") if side else (tokens(3, 13), None)
    compiled = torch.compile(model, backend="eager")
    arguments = {} if mask is None else {"attention_mask": mask}
    torch.testing.assert_close(compiled(ids, **arguments).logits, model(ids, **arguments).logits)


def _encoder(name: str, **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {key: size for key, size in SCALE.sizes().items() if key not in ("num_key_value_heads", "head_dim")}
    config = getattr(transformers, f"{name}Config")(**(sizes | options))
    return tiny_models.randomize(getattr(transformers, f"{name}Model")(config), SCALE)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Bert", {}),
        ("ModernBert", {"global_attn_every_n_layers": 2, "local_attention": 6, "bos_token_id": 1, "cls_token_id": 1}),
    ],
)
def test_encoders(name: str, options: dict[str, object]) -> None:
    """Bidirectional, padded, with a window to both sides."""
    model = _encoder(name, **options)
    ids, mask = padded("right")
    hidden = []
    for attention in ("eager", integration.NAME):
        model.set_attn_implementation(attention)
        hidden.append(model(ids, attention_mask=mask).last_hidden_state[mask == 1])
    torch.testing.assert_close(hidden[1], hidden[0], rtol=1e-4, atol=1e-4)


def test_cross_attention() -> None:
    """Queries and keys of different sequences, keys padded."""
    model = _encoder("Bert", is_decoder=True, add_cross_attention=True)
    _, mask = padded("right")
    arguments = {"encoder_hidden_states": torch.randn(3, 13, 32), "encoder_attention_mask": mask}
    ids, hidden = tokens(3, 6), []
    for attention in ("eager", integration.NAME):
        model.set_attn_implementation(attention)
        hidden.append(model(ids, **arguments).last_hidden_state)
    torch.testing.assert_close(hidden[1], hidden[0], rtol=1e-4, atol=1e-4)


def test_8_bits_are_a_name_of_their_own() -> None:
    model = make("grouped queries").bfloat16()
    integration.register("flashhopper-e4m3", fp8=Fp8Recipe.e4m3())
    ids = tokens(2, 17)
    logits = {}
    for name in ("eager", integration.NAME, "flashhopper-e4m3"):
        model.set_attn_implementation(name)
        logits[name] = model(ids).logits.float()
    ours, eight = (logits[name] - logits["eager"] for name in (integration.NAME, "flashhopper-e4m3"))
    assert 0 < ours.norm() < eight.norm() < 0.2 * logits["eager"].norm()


def test_the_implementation_is_taken_from_the_name_alone() -> None:
    """transformers may exchange a flash implementation for one that a model lists: not this one."""
    integration.register()
    integration.register()
    model = make("grouped queries")
    model._compatible_flash_implementations = ["kernels-community/vllm-flash-attn3"]
    model.set_attn_implementation(integration.NAME)
    assert model.config._attn_implementation == integration.NAME
    loaded = type(model)._from_config(model.config, attn_implementation=integration.NAME)
    assert loaded.config._attn_implementation == integration.NAME
    with pytest.raises(ValueError, match="name is 'sdpa'"):
        integration.register("sdpa")


def test_models_without_flash_attention_are_refused_by_name() -> None:
    for name in ("Bloom", "T5"):
        config = getattr(transformers, f"{name}Config")(vocab_size=97, hidden_size=32, d_model=32, n_layer=1, n_head=2)
        with pytest.raises(ValueError, match=f"{name}Model declares no support for flash attention"):
            getattr(transformers, f"{name}Model")._from_config(config, attn_implementation=integration.NAME)


def test_refusals_by_name() -> None:
    model = make("grouped queries")
    model.set_attn_implementation(integration.NAME)
    ids = tokens(1, 5)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 1, 5, 5\).*arbitrary masks are refused"):
        model(ids, attention_mask=torch.zeros(1, 1, 5, 5))
    with pytest.raises(ValueError, match="attention_mask has zeros between ones"):
        model(ids, attention_mask=torch.tensor([[1, 0, 1, 1, 1]]))
    with pytest.raises(ValueError, match="output_attentions is True"):
        model(ids, output_attentions=True)
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"dropout is 0\.1.*no dropout"):
        model(ids)
    q = torch.randn(1, 2, 3, 8)
    for name in ("position_bias", "alibi", "head_mask", "block_table"):
        with pytest.raises(ValueError, match=f"{name}.*not available in flashhopper"):
            integration.attention(model, q, q, q, None, **{name: q})


@pytest.mark.parametrize("how", ["or_mask_function", "and_mask_function", "block_sequence_ids"])
def test_masks_of_other_patterns_are_refused_by_name(how: str) -> None:
    config = make("grouped queries").config
    config._attn_implementation = integration.NAME
    extra = torch.zeros(1, 5, dtype=torch.int64) if how == "block_sequence_ids" else (lambda *index: index[2] >= 0)
    with pytest.raises(ValueError, match=r"the model asks for the mask .*arbitrary masks are refused"):
        transformers.masking_utils.create_causal_mask(config, torch.randn(1, 5, 32), None, None, **{how: extra})
