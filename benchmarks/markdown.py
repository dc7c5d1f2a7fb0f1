"""Markdown tables of the generated pages. Standard library only. Before it: tables.py and the other tables_*.py."""

from __future__ import annotations

from collections.abc import Iterable


def grid(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
