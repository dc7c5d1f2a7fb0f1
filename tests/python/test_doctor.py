"""The doctor always prints, exits by what a user must fix, and says it in JSON too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_module import FakeModule
from typer.testing import CliRunner

import flashhopper as fh
from flashhopper import cli, doctor
from flashhopper.engine import hopper

PACKAGE = Path(fh.__file__).parent


def findings() -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine().findings}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    fake = FakeModule()
    monkeypatch.setattr(hopper, "module", fake)
    return fake


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    properties = SimpleNamespace(name="fake GPU", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(doctor, "_attention", lambda: iter(()))  # no tile to run here


@pytest.mark.usefixtures("no_gpu")
def test_a_healthy_machine_without_a_gpu(module: FakeModule) -> None:
    module.environment_ |= {"cuda_driver": 0, "device_count": 0, "tma_available": False, "message": "no driver"}
    report = doctor.examine()
    assert report.exit_code == 0
    found = findings()
    assert found["compiled module"].status == "ok"
    assert found["gpu"].status == "note"
    assert found["gpu"].advice == "the tiled engine serves"
    assert found["driver"].value == "none: no driver"
    assert found["forward kernels"].value == "64/64, 96/96, 128/128, 192/128, 192/192, 256/256"
    assert found["one tile"].status == "ok"
    assert "tiled engine, float32 on cpu: max error" in found["one tile"].value


@pytest.mark.usefixtures("no_gpu")
def test_a_module_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "module", None)
    monkeypatch.setattr(hopper, "load_error", "ImportError: libflashhopper.so [version 3]")
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    assert "ImportError" in result.output
    assert "[version 3]" in " ".join(result.output.split())
    as_json = json.loads(CliRunner().invoke(cli.app, ["doctor", "--json"]).output)
    assert as_json["exit_code"] == 1
    (line,) = (f for f in as_json["findings"] if f["name"] == "compiled module")
    assert line["status"] == "problem"
    assert "ImportError: libflashhopper.so [version 3]" in line["value"]


def test_versions_that_differ(module: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "version", lambda: "0.0.9")
    found = findings()["compiled module"]
    assert (found.status, found.value) == ("problem", "0.0.9")
    assert "reinstall" in found.advice


def test_a_healthy_hopper(module: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    found = findings()
    assert found["gpu 0"].value == "fake GPU, compute capability 9.0, 132 SMs"
    assert found["driver"].value == "supports CUDA 13.1"
    assert found["TMA entry point"].status == "ok"
    assert doctor.examine().exit_code == 0


def test_another_gpu_is_no_error(module: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (8, 9))
    module.environment_ |= {"cuda_driver": 12020, "tma_available": False, "message": "old driver"}
    found = findings()
    assert (found["gpu 0"].status, found["driver"].status, found["TMA entry point"].status) == ("note",) * 3
    assert doctor.examine().exit_code == 0


@pytest.mark.parametrize(
    ("change", "name", "text"),
    [
        ({"cuda_driver": 12080}, "driver", "supports CUDA 12.8"),
        ({"cuda_driver": 0, "message": "libcuda is missing"}, "driver", "none: libcuda is missing"),
        ({"tma_available": False, "message": "no such symbol"}, "TMA entry point", "missing: no such symbol"),
    ],
)
def test_what_a_hopper_owner_must_fix(
    module: FakeModule, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], name: str, text: str
) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    module.environment_ |= change
    found = findings()[name]
    assert (found.status, found.value) == ("problem", text)
    assert doctor.examine().exit_code == 1


def test_a_check_that_fails_is_a_finding(module: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict[str, object]:
        raise OSError("no such file")

    monkeypatch.setattr(module, "environment", broken)
    found = findings()["driver"]
    assert (found.status, found.value) == ("problem", "OSError: no such file")


@pytest.mark.usefixtures("no_gpu")
def test_a_wrong_tile_is_a_problem(module: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "flash_attn_func", lambda q, k, v, **_: torch.zeros_like(q))
    assert findings()["one tile"].status == "problem"


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "COLUMNS": "200"}
    command = [sys.executable, *((code,) if code == "-m" else ("-c", code)), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_module_entry_point_prints() -> None:
    result = run_python("-m", "flashhopper", "doctor", "--json")
    report = json.loads(result.stdout)
    assert result.returncode == report["exit_code"]
    assert {"flashhopper", "torch", "compiled module", "one tile"} <= {f["name"] for f in report["findings"]}


def test_it_prints_without_typer_and_with_a_broken_module() -> None:
    code = (
        "import sys, runpy\n"
        "sys.modules['typer'] = None\n"
        "sys.modules['flashhopper._C'] = None\n"
        "sys.argv = ['flashhopper', 'doctor']\n"
        "runpy.run_module('flashhopper', run_name='__main__')\n"
    )
    result = run_python(code)
    assert result.returncode == 1
    assert "typer is not installed" in result.stdout
    assert "did not load" in result.stdout
    assert "one tile" in result.stdout


def test_versions_agree() -> None:
    header = Path(__file__).parents[2] / "cpp" / "include" / "flashhopper" / "flashhopper.h"
    assert f'FLASHHOPPER_VERSION "{fh.__version__}"' in header.read_text()
