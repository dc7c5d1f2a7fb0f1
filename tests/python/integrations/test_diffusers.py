"""diffusers' dispatcher and one of its models with flashhopper against torch's own attention."""

import pytest
import torch
from frameworks import require

diffusers = require("diffusers")
dispatch = pytest.importorskip("diffusers.models.attention_dispatch")

from flashhopper.integrations import diffusers as integration  # noqa: E402


@pytest.fixture(autouse=True)
def _registered() -> None:
    integration.register()
    integration.register()


def inputs(seqlen_k: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, 7, 4, 16), torch.randn(2, seqlen_k, 4, 16), torch.randn(2, seqlen_k, 4, 16)


def test_the_backend_is_a_member_like_any_other() -> None:
    name = dispatch.AttentionBackendName(integration.NAME)
    assert name.value == integration.NAME == str(name.value)
    assert name is dispatch.AttentionBackendName.__members__["FLASHHOPPER"]
    assert list(dispatch.AttentionBackendName).count(name) == 1
    assert name in dispatch._AttentionBackendRegistry.list_backends()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_dispatch(options: dict[str, object]) -> None:
    q, k, v = inputs(7)
    expected = dispatch.dispatch_attention_fn(q, k, v, **options, backend="native")
    torch.testing.assert_close(dispatch.dispatch_attention_fn(q, k, v, **options, backend=integration.NAME), expected)
    with dispatch.attention_backend(integration.NAME):
        torch.testing.assert_close(dispatch.dispatch_attention_fn(q, k, v, **options), expected)


def test_grouped_queries() -> None:
    q, k, v = inputs(7)
    expected = dispatch.dispatch_attention_fn(q, k[:, :, :2], v[:, :, :2], enable_gqa=True, backend="native")
    actual = dispatch.dispatch_attention_fn(q, k[:, :, :2], v[:, :, :2], enable_gqa=True, backend=integration.NAME)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("broadcast", [False, True])
def test_padding_of_the_keys(broadcast: bool) -> None:
    q, k, v = inputs()
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    four = mask[:, None, None, :]
    expected = dispatch.dispatch_attention_fn(q, k, v, four, backend="native")
    given = four if broadcast else mask
    torch.testing.assert_close(dispatch.dispatch_attention_fn(q, k, v, given, backend=integration.NAME), expected)


def test_refusals_by_name() -> None:
    q, k, v = inputs()
    refused = {
        "dropout_p is 0.1": {"dropout_p": 0.1},
        r"attn_mask is torch.float32 \(7, 9\).*arbitrary masks": {"attn_mask": torch.zeros(7, 9)},
        r"attn_mask is torch.bool \(2, 4, 7, 9\)": {"attn_mask": torch.ones(2, 4, 7, 9, dtype=torch.bool)},
        "attn_mask is given with is_causal": {"attn_mask": torch.ones(2, 9, dtype=torch.bool), "is_causal": True},
        "parallel_config is given": {"parallel_config": object()},
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=message):
            dispatch.dispatch_attention_fn(q, k, v, **options, backend=integration.NAME)


def test_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flux: joint attention of text and image tokens."""
    calls = []
    serve = integration.flash_attn_func
    monkeypatch.setattr(integration, "flash_attn_func", lambda *args, **rest: calls.append(1) or serve(*args, **rest))
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2)
    arguments = {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 6, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.randint(0, 4, (16, 3)).float(),
        "txt_ids": torch.zeros(6, 3),
    }
    with torch.no_grad():
        model.set_attention_backend("native")
        expected = model(**arguments).sample
        model.set_attention_backend(integration.NAME)
        assert not calls
        actual = model(**arguments).sample
    assert len(calls) == 2
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
