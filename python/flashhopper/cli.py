"""The command line, `python -m flashhopper`. Before it: __main__.py; after it: doctor.py, report/command.py."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.table import Table

from . import doctor as doctors
from .report import command

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Exact attention for NVIDIA Hopper GPUs.")


@app.callback()
def root() -> None:
    """Exact attention for NVIDIA Hopper GPUs."""


@app.command()
def doctor(as_json: bool = typer.Option(False, "--json", help="Print the report as JSON.")) -> None:
    """Report on GPU, driver, library and one tile of attention; exit code 1 when something needs fixing."""
    report = doctors.examine()
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        table = Table(show_header=False, box=None, pad_edge=False)
        for finding in report.findings:
            text = f"{finding.value}\n{finding.advice}" if finding.advice else finding.value
            table.add_row(finding.status, finding.name, text, style=_STYLES[finding.status])
        # Text of errors may hold square brackets, which are no markup.
        Console(markup=False, highlight=False).print(table)
    raise typer.Exit(report.exit_code)


app.command()(command.report)


def main() -> None:
    """Entry point."""
    app()
