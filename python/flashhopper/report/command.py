"""`python -m flashhopper report`: reads the options, measures, writes. Before it: cli.py; after it: collect.py,
verdict.py, render.py.

An option that breaks a rule ends with exit code 2 and a message that names it, its value, the rule and the way out,
before anything is measured.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..fp8.formats import MAX_HEAD_DIM
from ..testing import FAMILIES, LlmLayer, load_llm_layers
from .collect import Settings, collect
from .contenders import RECIPES
from .rows import Report
from .verdict import BAD, GOOD, columns, summary, verdicts

EXTRA = ("jinja2", "matplotlib")
MAX_LENGTH = 1 << 20
_STYLES = {GOOD: "green", BAD: "bold red"}
# Where nothing else is said: quick on two cores of a CPU, thorough on a GPU.
CPU_DEFAULTS = {"lengths": "512,2k,8k", "head_dims": "128", "heads": "1"}
GPU_DEFAULTS = {"lengths": "2k,16k,128k", "head_dims": "64,128,256", "heads": "8"}
_FAMILIES_HELP = f"Input families, of {', '.join(FAMILIES)}, and llm with --tensors. Default: all."
_TENSORS_HELP = "safetensors file of NAME.q, NAME.k, NAME.v, (batch, seqlen, heads, head_dim): family llm."


def _default_help(what: str, name: str) -> str:
    return f"{what}. Default: {CPU_DEFAULTS[name]} on a CPU, {GPU_DEFAULTS[name]} on a GPU."


def report(
    recipes: Annotated[str, typer.Option(help=f"8-bit recipes, of {', '.join(RECIPES)}.")] = ",".join(RECIPES),
    families: Annotated[str | None, typer.Option(help=_FAMILIES_HELP)] = None,
    lengths: Annotated[str | None, typer.Option(help=_default_help("Keys", "lengths"))] = None,
    head_dims: Annotated[str | None, typer.Option(help=_default_help("Head dimensions", "head_dims"))] = None,
    heads: Annotated[int | None, typer.Option(help=_default_help("Heads of a problem", "heads"))] = None,
    tensors: Annotated[Path | None, typer.Option(help=_TENSORS_HELP)] = None,
    causal: Annotated[bool, typer.Option("--causal/--full", help="Mask of the synthetic families.")] = True,
    ablation: Annotated[bool, typer.Option(help="Measure accurate() without each of its building blocks.")] = True,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 1,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where there is one.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the page here; needs the extra `report`.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write every row here.")] = None,
) -> None:
    """Measure what 8-bit attention loses against float64, beside 16-bit attention."""
    where = _device(device)
    defaults = CPU_DEFAULTS if where == "cpu" else GPU_DEFAULTS
    chosen = _families(families, tensors)
    settings = Settings(
        recipes=_choices("--recipes", recipes, RECIPES),
        families=tuple(name for name in chosen if name != "llm"),
        lengths=tuple(sorted(_numbers("--lengths", lengths or defaults["lengths"], _length))),
        head_dims=_numbers("--head-dims", head_dims or defaults["head_dims"], _head_dim),
        heads=_at_least("--heads", int(defaults["heads"]) if heads is None else heads, 1),
        causal=causal,
        seed=_at_least("--seed", seed, 0),
        device=where,
        ablation=ablation,
    )
    layers = _layers(tensors) if tensors is not None and "llm" in chosen else ()
    for option, path in (("--html", html), ("--json", json_path)):
        _check_target(option, path)
    if html is not None:
        _require_extra()
    measured = _run(settings, layers)
    if json_path is not None:
        json_path.write_text(json.dumps(measured.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if html is not None:
        from .render import page

        html.write_text(page(measured), encoding="utf-8")
    _show(measured, [path for path in (html, json_path) if path is not None])


def _run(settings: Settings, layers: tuple[LlmLayer, ...]) -> Report:
    shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*shown, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def watch(done: int, total: int, text: str) -> None:
            progress.update(task, completed=done, total=total, description=text)

        return collect(settings, layers, watch)


def _show(measured: Report, written: list[Path]) -> None:
    console = Console(markup=False, highlight=False)
    for verdict in verdicts(measured):
        against = f"median error {verdict.typical}, {verdict.against} FA3's scales, worst {verdict.worst}"
        console.print(f"{verdict.label}: {verdict.headline}; {against}", style=_STYLES.get(verdict.status, ""))
    names = columns(measured)
    table = Table(*("", *names), box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.columns[0].no_wrap = True
    emulated = {row.contender for row in measured.rows if row.emulated}
    for name, cells in summary(measured).items():
        label = measured.contenders[name]["label"] + (" *" if name in emulated else "")
        table.add_row(label, *("–" if cell is None else cell.text for cell in cells))
    console.print("\nRelative rmse, the worst over lengths and head dimensions" + ("; * emulated" if emulated else ""))
    console.print(table)
    console.print()
    for note in measured.notes:
        console.print(note)
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True)


def _bad(option: str, value: object, rule: str) -> typer.BadParameter:
    return typer.BadParameter(f"{option} is {str(value)!r}: {rule}")


def _words(option: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise _bad(option, text, "must name at least one, separated by commas")
    return list(dict.fromkeys(words))


def _choices(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    words = _words(option, text)
    for word in words:
        if word not in known:
            raise _bad(option, word, f"must be of {', '.join(known)}, separated by commas")
    return tuple(words)


def _families(text: str | None, tensors: Path | None) -> tuple[str, ...]:
    if text is None:
        return (*FAMILIES, "llm") if tensors is not None else FAMILIES
    chosen = _choices("--families", text, (*FAMILIES, "llm"))
    if "llm" in chosen and tensors is None:
        raise _bad("--families", "llm", "needs a model's activations; pass --tensors file.safetensors")
    if "llm" not in chosen and tensors is not None:
        raise _bad("--families", text, "leaves out llm, which --tensors gives; add llm or drop --tensors")
    return chosen


def _numbers(option: str, text: str, read: Callable[[str, str], int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(read(option, word) for word in _words(option, text)))


def _length(option: str, word: str) -> int:
    number = word[:-1] if word[-1] in "kK" else word
    length = int(number) * (1024 if number != word else 1) if number.isdecimal() else 0
    if not 1 <= length <= MAX_LENGTH:
        raise _bad(option, word, f"must be a number of keys from 1 to {MAX_LENGTH}, such as 2048 or 2k")
    return length


def _head_dim(option: str, word: str) -> int:
    if not word.isdecimal() or not 1 <= int(word) <= MAX_HEAD_DIM:
        raise _bad(option, word, f"must be a whole number from 1 to {MAX_HEAD_DIM}, such as 128")
    return int(word)


def _at_least(option: str, value: int, least: int) -> int:
    if value < least:
        raise _bad(option, value, f"must be {least} or more")
    return value


def _device(text: str | None) -> str:
    if text is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if text not in ("cpu", "cuda"):
        raise _bad("--device", text, "must be cpu or cuda")
    if text == "cuda" and not torch.cuda.is_available():
        raise _bad("--device", text, "torch finds no usable CUDA device; pass --device cpu")
    return text


def _layers(path: Path) -> tuple[LlmLayer, ...]:
    if not path.is_file():
        raise _bad("--tensors", path, "must be a safetensors file that exists")
    try:
        layers = tuple(load_llm_layers(path))
    except Exception as error:  # whatever a file that is no safetensors file makes of its reader
        detail = f"{type(error).__name__}: {error}"
        raise _bad("--tensors", path, f"could not be read as NAME.q, NAME.k, NAME.v ({detail})") from error
    if not layers:
        raise _bad("--tensors", path, "holds no tensors; it must hold NAME.q, NAME.k, NAME.v")
    for layer in layers:
        _check_layer(path, layer)
    return tuple(sorted(layers, key=_natural))


def _natural(layer: LlmLayer) -> list[tuple[bool, int, str]]:
    """layer5 before layer11."""
    parts = re.split(r"(\d+)", layer.name)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def _check_layer(path: Path, layer: LlmLayer) -> None:
    q, k, v = layer.inputs
    shapes = f"layer {layer.name!r} has shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
    if any(x.dim() != 4 or x.numel() == 0 for x in (q, k, v)):
        raise _bad("--tensors", path, f"{shapes}: must be (batch, seqlen, heads, head_dim), none of them 0")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise _bad("--tensors", path, f"{shapes}: batch, keys, KV heads and head_dim must agree")
    if q.shape[2] % k.shape[2] or max(q.shape[3], v.shape[3]) > MAX_HEAD_DIM:
        rule = f"heads must be a multiple of KV heads, head_dim at most {MAX_HEAD_DIM}"
        raise _bad("--tensors", path, f"{shapes}: {rule}")


def _check_target(option: str, path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise _bad(option, path, "is a directory; name a file in it")
    folder = path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise _bad(option, path, f"{folder} must be a directory that exists and can be written; make it first")


def _require_extra() -> None:
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise typer.BadParameter(
            f"--html needs {' and '.join(missing)}, which the extra `report` brings: "
            "pip install 'flashhopper[report]'; or leave --html out"
        )
