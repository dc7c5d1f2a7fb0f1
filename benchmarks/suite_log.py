"""pytest plugin of the record: one JSON line for each thing that happens to a test, written as it happens, so that a
run that is cut short still says what passed and what it was at. Loaded by gpu_tests.py with `-p`; before it: pytest (or
pytest-xdist, whose workers stay silent: the reports come to the controller); after it: gpu_tests.read_log.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, TextIO

import pytest

MESSAGE_CHARACTERS = 300


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite-log", type=Path, metavar="FILE", help="write what happens to each test, JSON lines")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--suite-log")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SuiteLog(path.open("w", encoding="utf-8")), "suite-log-writer")


class SuiteLog:
    """Writes lines of one of the kinds `collected`, `started`, `finished`."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._parts: dict[str, list[pytest.TestReport]] = {}  # reports of the tests that run

    def _write(self, kind: str, **values: Any) -> None:
        print(json.dumps({"kind": kind, "at": round(time.monotonic(), 3), **values}), file=self._file, flush=True)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:  # pytest-xdist's controller has none
            self._write("collected", count=len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._write("collected", count=len(ids))  # each worker collects the same

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._parts[nodeid] = []
        self._write("started", id=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._parts.setdefault(report.nodeid, []).append(report)
        if report.when not in ("setup", "call"):  # teardown, or "???" for a worker that died
            self._finish(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        for nodeid in [name for name, reports in self._parts.items() if reports]:
            self._finish(nodeid)
        self._file.close()

    def _finish(self, nodeid: str) -> None:
        reports = self._parts.pop(nodeid)
        failed = [report for report in reports if report.failed]
        skipped = any(report.skipped for report in reports)
        problems = [value for name, value in reports[-1].user_properties if name == "problems"]
        self._write(
            "finished",
            id=nodeid,
            outcome="failed" if failed else "skipped" if skipped else "passed",
            seconds=round(sum(report.duration for report in reports), 3),
            problems=sum(problems),
            message=_message(failed[0]) if failed else "",
        )


def _message(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return " ".join(text.split())[:MESSAGE_CHARACTERS]
