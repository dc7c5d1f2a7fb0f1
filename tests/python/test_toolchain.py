"""Which nvcc and which CUTLASS headers a build takes, and what it asks PyPI for, on machines with and without them. The
machines are directories: nothing is compiled, installed or fetched."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOUND_BY = ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "CUTLASS_DIR", "FLASHHOPPER_LIBRARY")


@pytest.fixture
def toolchain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module on a machine that has nothing: no variable, an empty PATH, no wheel, no toolkit at its usual place."""
    spec = importlib.util.spec_from_file_location("toolchain", ROOT / "_build_backend" / "toolchain.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in FOUND_BY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "no programs"))
    monkeypatch.setattr(module, "package_directories", lambda name: [])
    monkeypatch.setattr(module, "ROOT", tmp_path)
    # /usr/local/cuda may exist where the tests run.
    find = module.shutil.which
    monkeypatch.setattr(module.shutil, "which", lambda name: None if "/usr/local/" in name else find(name))
    return module


def make_nvcc(path: Path, release: str = "13.0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\nprint('Cuda compilation tools, release {release}, V{release}.1')\n")
    path.chmod(0o755)
    return path


def make_headers(root: Path) -> Path:
    header = root / "include/cute/tensor.hpp"
    header.parent.mkdir(parents=True)
    header.touch()
    return root


def test_a_bare_machine_takes_both_from_pypi(toolchain: ModuleType) -> None:
    assert toolchain.requirements() == [toolchain.CUDA_WHEELS, toolchain.CUTLASS_WHEEL]
    with pytest.raises(RuntimeError, match="no nvcc: install a CUDA toolkit, set CUDACXX, or pip install"):
        toolchain.main("nvcc")
    with pytest.raises(RuntimeError, match="no CUTLASS headers: set CUTLASS_DIR, or pip install"):
        toolchain.main("cutlass")


def test_wheels_are_found_once_installed(
    toolchain: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    nvcc = make_nvcc(site / "nvidia/cu13/bin/nvcc")
    headers = make_headers(site / "cutlass_library/source")
    monkeypatch.setattr(toolchain, "package_directories", lambda name: [site / name])
    assert toolchain.main("nvcc") == str(nvcc)
    assert toolchain.main("cutlass") == str(headers)
    # A build in isolation does not see them: they stay required.
    assert toolchain.requirements() == [toolchain.CUDA_WHEELS, toolchain.CUTLASS_WHEEL]


@pytest.mark.parametrize("how", ["CUDACXX", "PATH", "CUDA_HOME", "CUDA_PATH"])
def test_a_toolkit_needs_the_headers_alone(
    toolchain: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    nvcc = make_nvcc(tmp_path / "cuda/bin/nvcc", "12.8")
    value = {"CUDACXX": nvcc, "PATH": nvcc.parent}.get(how, nvcc.parent.parent)
    monkeypatch.setenv(how, str(value))
    assert toolchain.requirements() == [toolchain.CUTLASS_WHEEL]
    assert toolchain.main("nvcc") == str(nvcc)


@pytest.mark.parametrize("place", ["CUTLASS_DIR", "third_party"])
def test_toolkit_and_headers_need_no_network(
    toolchain: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    monkeypatch.setenv("CUDACXX", str(make_nvcc(tmp_path / "cuda/bin/nvcc")))
    headers = make_headers(tmp_path / ("elsewhere" if place == "CUTLASS_DIR" else "third_party/cutlass"))
    if place == "CUTLASS_DIR":
        monkeypatch.setenv("CUTLASS_DIR", str(headers))
    assert toolchain.requirements() == []
    assert toolchain.main("cutlass") == str(headers)


def test_the_named_compiler_goes_before_others(
    toolchain: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    named, on_path, at_home = (make_nvcc(tmp_path / name / "bin/nvcc") for name in ("named", "on_path", "at_home"))
    monkeypatch.setenv("CUDA_HOME", str(at_home.parent.parent))
    assert toolchain.main("nvcc") == str(at_home)
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert toolchain.main("nvcc") == str(on_path)
    monkeypatch.setenv("CUDACXX", str(named))
    assert toolchain.main("nvcc") == str(named)


def test_wrong_places_are_named(toolchain: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDACXX", "/nowhere/nvcc")
    with pytest.raises(RuntimeError, match="CUDACXX=/nowhere/nvcc is no executable"):
        toolchain.requirements()
    monkeypatch.setenv("CUDACXX", str(make_nvcc(tmp_path / "old/bin/nvcc", "12.4")))
    with pytest.raises(RuntimeError, match=r"is CUDA 12\.4, flashhopper needs 12\.8 or newer: set CUDACXX"):
        toolchain.requirements()
    monkeypatch.setenv("CUDACXX", str(make_nvcc(tmp_path / "new/bin/nvcc", "12.10")))
    monkeypatch.setenv("CUTLASS_DIR", "/nowhere")
    with pytest.raises(RuntimeError, match=r"CUTLASS_DIR=/nowhere holds no include/cute/tensor\.hpp"):
        toolchain.requirements()


def test_a_built_library_needs_nothing(toolchain: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHHOPPER_LIBRARY", "libflashhopper.so")
    assert toolchain.requirements() == []
