"""Checks a built libflashhopper.so without a GPU: spills, required instructions, what it links and exports.

    python scripts/check_sass.py build/dev

Reads what `ptxas -v` reported (kept by cmake/keep_ptxas_log.sh), the SASS (cuobjdump, from a CUDA toolkit or from the
wheels nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm) and the dynamic section. Exits 1 after naming every violation.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Tensor core GEMM, TMA load, TMA store: a kernel that lost one of them still computes, but is no longer this design.
REQUIRED = {"forward_kernel": ("HGMMA", "UTMALDG", "UTMASTG")}
LOCAL_MEMORY = ("LDL", "STL")
SYSTEM_LIBRARIES = re.compile(r"lib(stdc\+\+|gcc_s|c|m|dl|rt|pthread)\.so\.\d+|ld-linux-.*\.so\.\d+")
# The driver API (cuTensorMapEncodeTiled, ...) and torch (its C++ namespaces, mangled).
FOREIGN_SYMBOL = re.compile(r"\bcu[A-Z]\w+|torch|_ZN?K?(2at|3c10)")


def run(*command: str, **extra: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | extra).stdout


def find_cuobjdump() -> Path:
    """cuobjdump with nvdisasm, which it calls, beside it or on PATH."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(place, "cu13/bin") for place in (spec.submodule_search_locations or [])] if spec else []
    for place in [*map(Path, os.get_exec_path()), Path("/usr/local/cuda/bin"), *wheels]:
        if shutil.which("cuobjdump", path=str(place)):
            return place / "cuobjdump"
    sys.exit("no cuobjdump: install a CUDA toolkit, or pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")


def instance_logs(build: Path) -> dict[str, str]:
    """Instance name -> its ptxas log, for every kernel that this build lists."""
    listed = re.findall(r"\((\w+), (\w+)\)", (build / "generated/flashhopper_instances.inc").read_text())
    logs = {}
    for config, element in listed:
        log = build / f"CMakeFiles/flashhopper_kernels.dir/instances/{config}_{element}.cu.o.ptxas"
        logs[f"{config}_{element}"] = log.read_text() if log.exists() else ""
    return logs


def sass_opcodes(library: Path) -> dict[str, Counter[str]]:
    """Mangled kernel name -> how often each opcode occurs."""
    cuobjdump = find_cuobjdump()
    text = run(str(cuobjdump), "-sass", str(library), PATH=f"{cuobjdump.parent}{os.pathsep}{os.environ['PATH']}")
    kernels = {}
    for block in re.split(r"\n\s*Function : ", text)[1:]:
        name, _, code = block.partition("\n")
        opcodes = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", code, re.MULTILINE)
        kernels[name.strip()] = Counter(opcodes)
    return kernels


def ptxas_entries(log: str) -> list[tuple[str, int, int, int]]:
    """(mangled name, bytes of stack, bytes spilled, registers) of every kernel in a log."""
    entries = re.findall(
        r"Compiling entry function '(\w+)'.*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        log,
        re.DOTALL,
    )
    return [
        (name, int(stack), int(stores) + int(loads), int(registers))
        for name, stack, stores, loads, registers in entries
    ]


def check_kernels(build: Path, library: Path) -> list[str]:
    kernels = sass_opcodes(library)
    problems = []
    print(f"{'instance':36}{'registers':>10}{'spills':>8}{'HGMMA':>8}{'UTMALDG':>9}{'UTMASTG':>9}{'SASS':>8}")
    for instance, log in instance_logs(build).items():
        advisories = [line.strip() for line in log.splitlines() if re.search(r"\(C\d+\)", line)]
        problems += [f"{instance}: ptxas says {line}" for line in advisories]
        entries = ptxas_entries(log)
        if not entries:
            problems.append(f"{instance}: no kernel in its ptxas log")
        for name, stack, spills, registers in entries:
            found = kernels.get(name, Counter())
            counts = [found[opcode] for opcode in REQUIRED["forward_kernel"]]
            columns = zip((registers, spills, *counts, found.total()), (10, 8, 8, 9, 9, 8), strict=True)
            print(f"{instance:36}" + "".join(f"{value:>{width}}" for value, width in columns))
            if stack or spills:
                problems.append(f"{instance}: {stack} bytes of stack, {spills} bytes of spills")
            if any(found[opcode] for opcode in LOCAL_MEMORY):
                problems.append(f"{instance}: uses local memory ({', '.join(LOCAL_MEMORY)})")
            required = next((opcodes for part, opcodes in REQUIRED.items() if part in name), ())
            problems += [f"{instance}: no {opcode} in its SASS" for opcode in required if not found[opcode]]
    return problems


def check_linkage(library: Path) -> list[str]:
    problems = []
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-dW", str(library)))
    problems += [f"links {name}" for name in needed if not SYSTEM_LIBRARIES.fullmatch(name)]
    undefined = run("nm", "-D", "--undefined-only", str(library)).split()
    problems += [f"refers to {symbol}" for symbol in undefined if FOREIGN_SYMBOL.search(symbol)]
    exported = set(re.findall(r" [A-Z] (\w+)$", run("nm", "-D", "--defined-only", str(library)), re.MULTILINE))
    header = (ROOT / "cpp/include/flashhopper/flashhopper.h").read_text()
    declared = set(re.findall(r"^FLASHHOPPER_API [^;(]*\b(flashhopper_\w+)\(", header, re.MULTILINE))
    problems += [f"exports {symbol}, which flashhopper.h does not declare" for symbol in sorted(exported - declared)]
    problems += [f"does not export {symbol}" for symbol in sorted(declared - exported)]
    print(f"links {', '.join(needed)}; exports {len(exported)} functions")
    return problems


def main() -> int:
    build = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build/dev")
    library = build / "libflashhopper.so"
    problems = check_kernels(build, library) + check_linkage(library)
    for problem in problems:
        print(f"error: {problem}")
    print(f"{library}: {'ok' if not problems else f'{len(problems)} problems'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
