"""The feature block of the generated pages: windows, grouped heads, packed sequences, softcap and sink. Standard
library only. Before it: tables.py, parts.py; after it: markdown.py.

Empty where nothing is measured, so that a page need not say so.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.markdown import grid

Record = dict[str, Any]
Rows = list[dict[str, Any]]
OURS, DENSE, UNPACKED = "flashhopper", "flashhopper_dense", "flashhopper_unpacked"
PEERS = {"fa3": "FA3", "fa4": "FA4", "cudnn": "cuDNN"}
VARIANTS = {"flashhopper_softcap": "softcap", "flashhopper_sink": "a sink"}
FEATURES = ("window", "gqa", "varlen")
PASSES = {"fwd": "forward", "bwd": "backward"}


def _rows(record: Record, *passes: str) -> Rows:
    ops = [f"{one}_{feature}" for one in passes for feature in FEATURES]
    return sorted((row for row in record["bench"] if row["op"] in ops), key=lambda row: ops.index(row["op"]))


def _ratio(row: dict[str, Any], *names: str) -> float | None:
    """Ours over the best of the contenders named."""
    ours, others = row["value"].get(OURS), [row["value"][name] for name in names if name in row["value"]]
    return ours / max(others) if ours and others else None


def _ratios(rows: Rows, *names: str) -> list[float]:
    return [ratio for ratio in (_ratio(row, *names) for row in rows) if ratio is not None]


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _is_ragged(row: dict[str, Any]) -> bool:
    return len(set(row.get("lengths", ()))) > 1


def _name(row: dict[str, Any]) -> str:
    """What the row is about, and its sequences."""
    kind = row["op"].partition("_")[2]
    size = f"{row['batch']} x {row['seqlen_q']}"
    if kind == "varlen":
        return f"packed, {row['batch']} ragged, {sum(row['lengths'])} tokens" if _is_ragged(row) else f"packed, {size}"
    if kind == "window":
        return f"window {row['window'][0] + 1}, {size}"
    keys = f" on {row['seqlen_k']}" if row["seqlen_q"] != row["seqlen_k"] else ""
    return f"{row['heads']}:{row['kv_heads']} heads, {size}{keys}"


def speeds(record: Record) -> str:
    rows = _rows(record, "fwd", "bwd")
    if not rows:
        return ""
    peers = [name for name in PEERS if any(name in row["value"] for row in rows)]
    body = []
    for row in rows:
        numbers = [_text(row["value"].get(name), ".0f") for name in (OURS, *peers)]
        ratios = [_text(_ratio(row, *PEERS), ".2f"), _text(_ratio(row, DENSE), ".2f")]
        mask = "causal" if row["causal"] else "full"
        body.append([PASSES[row["op"][:3]], _name(row), str(row["head_dim"]), mask, *numbers, *ratios])
    header = ["pass", "problem", "head_dim", "mask", "flashhopper", *(PEERS[name] for name in peers)]
    header += ["of the best peer", "of the dense path"]
    title = (
        "Windows, grouped heads and packed sequences, bf16, TFLOP/s of the scores that the mask keeps (heads x "
        "head_dim = 2048 where no heads are named; FA3's package has neither windows nor a backward, torch gives cuDNN "
        "the grouped heads, its own frontend the rest):\n\n"
    )
    lines = [title + grid(header, body)]
    for row in record["bench"]:
        costs = {name: _ratio(row, name) for name in VARIANTS} if row["op"] == "fwd_options" else {}
        known = [f"{VARIANTS[name]} {cost:.2f}" for name, cost in costs.items() if cost is not None]
        if known:
            where = f"head_dim {row['head_dim']}, causal, {row['seqlen_q']}"
            lines.append(f"Time of the forward with an option, over that without ({where}): {', '.join(known)}.")
    return "\n\n".join(lines)


def summary(record: Record) -> list[str]:
    """A line for each pass against the best peer, one for packed batches against the dense path and FA3."""
    lines = []
    for one, title in PASSES.items():
        ratios = _ratios(_rows(record, one), *PEERS)
        if ratios:
            lines.append(
                f"Windows, grouped heads and packed sequences, {title}: {min(ratios):.2f} to {max(ratios):.2f} times "
                f"the speed of the best peer in {len(ratios)} rows, median {statistics.median(ratios):.2f}, at 0.95 or "
                f"more in {sum(ratio >= 0.95 for ratio in ratios)}."
            )
    shared = _ratios(_rows(record, "fwd"), UNPACKED)
    if shared:
        lines.append(
            f"Short queries of grouped heads that share tiles: {min(shared):.2f} to {max(shared):.2f} times the speed "
            f"of tiles of one head ({len(shared)} rows)."
        )
    packed = [row for row in _rows(record, "fwd") if row["op"] == "fwd_varlen"]
    dense = _ratios(packed, DENSE)
    ragged = _ratios([row for row in packed if _is_ragged(row)], "fa3")
    texts = []
    if dense:
        texts.append(
            f"{min(dense):.2f} to {max(dense):.2f} times the speed of the same batch unpacked ({len(dense)} rows)"
        )
    if ragged:
        texts.append(f"{min(ragged):.2f} times FA3's in ragged ones")
    return [*lines, f"Packed forward: {', '.join(texts)}."] if texts else lines
