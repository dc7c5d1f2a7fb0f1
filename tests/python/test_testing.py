"""Input families are seeded and are what they are called; metrics are right on small numbers; stored layers load."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flashhopper.testing import FAMILIES, error_metrics, load_llm_layers, load_safetensors, make_inputs


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_seeded(family: str) -> None:
    sizes = {"batch": 2, "seqlen_q": 5, "seqlen_k": 7, "heads": 4, "kv_heads": 2, "head_dim": 16, "head_dim_v": 8}
    first, again = (make_inputs(family, **sizes, seed=3) for _ in range(2))
    assert [x.shape for x in first] == [(2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 8)]
    assert all(x.dtype == torch.bfloat16 for x in first)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.q, make_inputs(family, **sizes, seed=4).q)
    assert make_inputs(family, seqlen_q=0, dtype=torch.float64).q.shape == (1, 0, 8, 128)


def test_families_are_what_they_are_called() -> None:
    sizes = {"seqlen_q": 1000, "heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.float32}
    assert make_inputs("normal", **sizes).q.std() == pytest.approx(1, abs=0.02)
    outlier = make_inputs("outlier", **sizes).q
    assert 50 < int((outlier.abs() > 6).sum()) < 256000 * 2e-3
    kbias = make_inputs("kbias", **sizes).k.mean(1)
    assert bool((kbias[..., :4] > 2).all())
    assert kbias[..., 4:].std() == pytest.approx(3, abs=0.6)
    vmean = make_inputs("vmean", **sizes).v
    assert vmean.mean() == pytest.approx(1, abs=0.01)
    assert vmean.std() == pytest.approx(0.1, abs=0.01)
    peaky = make_inputs("peaky", **sizes)
    assert torch.equal(peaky.k[:, 997], peaky.q[:, 0, ::2] / 2)
    with pytest.raises(ValueError, match=r"family is 'llm': must be one of normal, .*load_llm_layers"):
        make_inputs("llm")


def test_error_metrics() -> None:
    ref = torch.tensor([3.0, 4.0])
    metrics = error_metrics(torch.tensor([3.0, 5.0]), ref)
    assert metrics.rmse == pytest.approx(math.sqrt(0.5))
    assert metrics.relative_rmse == pytest.approx(math.sqrt(0.5) / math.sqrt(12.5))
    assert metrics.max_error == 1.0
    assert metrics.cosine == pytest.approx(29 / (5 * math.sqrt(34)))
    assert error_metrics(ref, ref).cosine == pytest.approx(1.0)
    assert error_metrics(torch.zeros(2), torch.zeros(2)) == (0.0, 0.0, 0.0, 1.0)
    assert error_metrics(torch.zeros(0), torch.zeros(0)).rmse == 0.0
    assert math.isnan(error_metrics(torch.tensor([math.nan, 1.0]), ref).rmse)
    assert error_metrics(torch.ones(2), torch.zeros(2)).relative_rmse == math.inf
    with pytest.raises(ValueError, match="out has shape"):
        error_metrics(torch.zeros(2), torch.zeros(3))


def test_stored_layers(tmp_path: Path) -> None:
    path = tmp_path / "layers.safetensors"
    tensors = {f"{layer}.{part}": torch.randn(1, 6, 2, 8).bfloat16() for layer in ("a", "b") for part in "qkv"}
    tensors["b.k"] = torch.randn(1, 6, 0, 8).bfloat16()
    save_file(tensors, path, {"softmax_scale": "0.5", "windows": json.dumps({"a": 4})})
    loaded, metadata = load_safetensors(path)
    assert metadata["softmax_scale"] == "0.5"
    assert all(torch.equal(loaded[name], x) for name, x in tensors.items())
    first, second = load_llm_layers(path, dtype=torch.float32)
    assert (first.name, first.softmax_scale, first.window_size, second.window_size) == ("a", 0.5, (3, 0), (-1, 0))
    assert torch.equal(first.inputs.q, tensors["a.q"].float())
    assert load_llm_layers(path, softmax_scale=2.0, windows={})[0].softmax_scale == 2.0
    save_file({"a.q": torch.zeros(1), "a.k": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"layer 'a' lacks a\.v"):
        load_llm_layers(path)
    save_file({"a.q": torch.zeros(1, dtype=torch.int8)}, path)
    with pytest.raises(ValueError, match=r"a\.q has dtype I8, must be one of F64"):
        load_safetensors(path)
