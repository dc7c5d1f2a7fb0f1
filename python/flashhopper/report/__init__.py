"""The accuracy report: what 8 bits lose against float64, beside 16-bit attention. Before it: cli.py; reading path:
command.py -> collect.py -> contenders.py, rows.py; verdict.py, plots.py and render.py make a page of the rows.

Measuring needs torch alone; the page needs matplotlib and jinja2, the optional extra `report`.
"""

from .rows import SCHEMA_VERSION, Report

__all__ = ["SCHEMA_VERSION", "Report"]
