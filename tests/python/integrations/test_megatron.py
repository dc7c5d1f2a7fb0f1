"""examples/megatron_attention.py in Megatron-core's GPT, against Megatron's own core attention."""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from frameworks import require

import example_programs
import flashhopper

require("megatron.core.transformer.dot_product_attention")

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return example_programs.load("megatron_attention")


@pytest.fixture(scope="module", autouse=True)
def _one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


class _NoTracker:
    """Megatron's own attention forks a CUDA random state around its dropout, here of nothing."""

    def fork(self) -> Any:
        return contextlib.nullcontext()


@pytest.fixture
def _megatron_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", _NoTracker)


@pytest.mark.usefixtures("_megatron_on_a_cpu")
@pytest.mark.parametrize("options", [{}, {"num_query_groups": 4, "apply_query_key_layer_scaling": True}])
def test_a_model_as_with_its_own_attention(program: ModuleType, options: dict[str, Any]) -> None:
    ids = torch.randint(0, 96, (2, 21))
    results = []
    for core_attention in (None, program.Attention):
        model = program.tiny_gpt(core_attention, **options)
        found = program.logits(model, ids)
        torch.nn.functional.cross_entropy(found.flatten(0, 1), ids.flatten()).backward()
        results.append((found, {name: p.grad for name, p in model.named_parameters()}))
    (expected, gradients), (actual, ours) = results
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert gradients.keys() == ours.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def attention(
    program: ModuleType, mask_type: AttnMaskType = AttnMaskType.causal, layer: int = 1, **options: Any
) -> torch.nn.Module:
    settings = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
    config = program.TransformerConfig(**(settings | {"attention_dropout": 0.0} | options))
    return program.Attention(config, layer, mask_type, "self")


def test_packed_sequences(program: ModuleType) -> None:
    module = attention(program, AttnMaskType.padding_causal)
    q, k, v = torch.randn(9, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = PackedSeqParams("thd", offsets, offsets, max_seqlen_q=5, max_seqlen_kv=5)
    out = module(q, k, v, None, packed_seq_params=packed)
    plain = attention(program)
    for rows in (slice(0, 4), slice(4, 9)):
        alone = plain(q[rows, None], k[rows, None], v[rows, None], None)
        torch.testing.assert_close(out[rows], alone[:, 0])


def test_windows_of_some_layers(program: ModuleType) -> None:
    """window_attn_skip_freq=2: every second layer is full; Megatron makes this mask on a GPU alone."""
    q, k = torch.randn(9, 2, 4, 16), torch.randn(9, 2, 2, 16)
    for layer, window in ((1, (3, 0)), (2, (-1, -1))):
        options = {"num_layers": 2, "window_size": (3, 0), "window_attn_skip_freq": 2}
        out = attention(program, layer=layer, **options)(q, k, k, None)
        inputs = (x.transpose(0, 1) for x in (q, k, k))
        expected, _ = flashhopper.reference_attention(*inputs, causal=True, window_size=window)
        torch.testing.assert_close(out, expected.transpose(0, 1).flatten(2).float())


def test_softmax_offsets_are_sinks(program: ModuleType) -> None:
    """ "off-by-one" adds exp(0) to each denominator."""
    q, v = torch.zeros(3, 1, 4, 16), torch.ones(3, 1, 2, 16)
    out = attention(program, softmax_type="off-by-one")(q, v, v, None)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([1 / 2, 2 / 3, 3 / 4]))
    learnable = attention(program, softmax_type="learnable")
    learnable(q, v, v, None).sum().backward()
    assert learnable.softmax_offset.grad.abs().min() > 0


def test_refusals_by_name(program: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"attention_dropout is 0\.1"):
        attention(program, attention_dropout=0.1)
    q = torch.randn(3, 1, 4, 16)
    with pytest.raises(ValueError, match="attn_mask_type is arbitrary"):
        attention(program, AttnMaskType.arbitrary)(q, q, q, None)
    with pytest.raises(ValueError, match="attn_mask_type is padding"):
        attention(program, AttnMaskType.padding)(q, q, q, torch.ones(1, 1, 3, 3))
    with pytest.raises(ValueError, match="attention_bias is given"):
        attention(program)(q, q, q, None, attention_bias=q)
