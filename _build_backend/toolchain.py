"""Where the CUDA compiler and the CUTLASS headers are, and which wheels bring them when a machine has none.

The one place that knows: the PEP 517 backend asks `requirements()` before a build, cmake/toolchain.cmake runs this file
as a script during one (`toolchain.py nvcc`, `toolchain.py cutlass`), scripts/setup.sh for the development environment.
Standard library only, because it runs before anything is installed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_NVCC = (12, 8)
# nvidia-cuda-nvcc alone pulls parts of mismatched releases, the metapackage keeps them together; CUTLASS needs cccl.
CUDA_WHEELS = "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.*"
CUTLASS_WHEEL = "nvidia-cutlass==4.2.0.0"


def package_directories(name: str) -> list[Path]:
    """Directories of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    return [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []


def find_toolkit_nvcc() -> Path | None:
    """nvcc of a CUDA toolkit on this machine: CUDACXX, PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda."""
    given = os.environ.get("CUDACXX")
    if given and not shutil.which(given):
        raise RuntimeError(f"CUDACXX={given} is no executable")
    candidates = [shutil.which(given) if given else None, shutil.which("nvcc")]
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates += [shutil.which(str(Path(home, "bin", "nvcc"))) for home in homes if home]
    return next((Path(nvcc) for nvcc in candidates if nvcc), None)


def find_nvcc() -> Path | None:
    """nvcc of a toolkit, else of the CUDA wheels beside this Python."""
    wheels = (place / "cu13" / "bin" / "nvcc" for place in package_directories("nvidia"))
    return find_toolkit_nvcc() or next((nvcc for nvcc in wheels if nvcc.is_file()), None)


def find_cutlass() -> Path | None:
    """The directory above CUTLASS's include/: CUTLASS_DIR, third_party/cutlass, else the nvidia-cutlass wheel."""
    given = os.environ.get("CUTLASS_DIR")
    candidates = [Path(given)] if given else [ROOT / "third_party" / "cutlass"]
    if not given:
        candidates += [place / "source" for place in package_directories("cutlass_library")]
    return next((place for place in candidates if (place / "include/cute/tensor.hpp").is_file()), None)


def check_nvcc(nvcc: Path) -> None:
    """Raises RuntimeError when nvcc does not run or is too old for these kernels."""
    try:
        text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"{nvcc} --version failed: {error}") from error
    found = re.search(r"release (\d+)\.(\d+)", text)
    if found and tuple(map(int, found.groups())) < OLDEST_NVCC:
        raise RuntimeError(
            f"{nvcc} is CUDA {found.group(1)}.{found.group(2)}, flashhopper needs {OLDEST_NVCC[0]}.{OLDEST_NVCC[1]} or "
            f"newer: set CUDACXX to a newer nvcc, or hide this one and install {CUDA_WHEELS!r} from PyPI"
        )


def requirements() -> list[str]:
    """Wheels that a build needs here. None when it packages a library that is built already."""
    if os.environ.get("FLASHHOPPER_LIBRARY"):
        return []
    nvcc = find_toolkit_nvcc()
    if nvcc:
        check_nvcc(nvcc)
    if os.environ.get("CUTLASS_DIR") and not find_cutlass():
        raise RuntimeError(f"CUTLASS_DIR={os.environ['CUTLASS_DIR']} holds no include/cute/tensor.hpp")
    # A wheel installed already is required again: a build in isolation does not see this environment.
    has_headers = os.environ.get("CUTLASS_DIR") or (ROOT / "third_party/cutlass/include/cute/tensor.hpp").is_file()
    return ([] if nvcc else [CUDA_WHEELS]) + ([] if has_headers else [CUTLASS_WHEEL])


def main(what: str) -> str:
    if what == "requirements":
        return "\n".join(requirements())
    if what == "nvcc":
        nvcc = find_nvcc()
        if nvcc is None:
            raise RuntimeError(f"no nvcc: install a CUDA toolkit, set CUDACXX, or pip install {CUDA_WHEELS!r}")
        check_nvcc(nvcc)
        return str(nvcc)
    if what == "cutlass":
        headers = find_cutlass()
        if headers is None:
            raise RuntimeError(f"no CUTLASS headers: set CUTLASS_DIR, or pip install {CUTLASS_WHEEL}")
        return str(headers)
    raise RuntimeError(f"usage: {Path(__file__).name} requirements | nvcc | cutlass, got {what!r}")


if __name__ == "__main__":
    try:
        print(main(" ".join(sys.argv[1:])))
    except RuntimeError as error:
        sys.exit(f"flashhopper: {error}")
