"""The record's `perplexity` part: examples/gemma_perplexity.py on a GPU, and the table of it. Standard library only.
Before it: parts.py, tables.py; after it: the example, in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.digest import ROOT
from benchmarks.markdown import grid

PROGRAM = ROOT / "examples" / "gemma_perplexity.py"
TOKENS, CONTEXT, SECONDS = 16384, 2048, 540
BASE = "eager"


def measure(gguf: Path | None, ids: Path | None) -> dict[str, Any]:
    """What the example writes as JSON. gguf: the assembled weights; ids: token ids, as --save-ids writes them."""
    if gguf is None or ids is None:
        raise RuntimeError("needs --gguf and --ids, see examples/gemma_perplexity.py")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(PROGRAM), "--gguf", str(gguf), "--ids", str(ids), "--json", str(out)]
        command += ["--tokens", str(TOKENS), "--context", str(CONTEXT), "--device", "cuda"]
        subprocess.run(command, check=True, timeout=SECONDS)
        result: dict[str, Any] = json.loads(out.read_text())
    return result


def _engine(result: dict[str, Any], name: str) -> str:
    """What served a row, from explain(): one word where full and sliding layers agree."""
    served = [text.split(":")[0] for key, text in result["engines"].items() if key.startswith(f"{name}, ")]
    return " and ".join(dict.fromkeys(served)) or "torch"


def table(record: dict[str, Any]) -> str:
    """Empty where nothing is measured."""
    result = record.get("perplexity")
    if not result:
        return ""
    base = result["rows"][BASE]["perplexity"]
    body = [
        [name, f"{row['perplexity']:.4f}", f"{100 * (row['perplexity'] / base - 1):+.3f} %", _engine(result, name)]
        for name, row in result["rows"].items()
    ]
    title = (
        f"Perplexity of {result['model']}, on {result['tokens']:,} tokens of this repository's pages in pieces of"
        f" {result['context']}, {result['dtype']}:\n\n"
    )
    return title + grid(["attention", "perplexity", "against eager", "engine"], body)
