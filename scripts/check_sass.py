"""Checks a built libflashhopper.so without a GPU: spills, required instructions and their order, what it links and
exports.

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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Tensor core GEMM of 16 bits and of 8 (e4m3, int8), TMA load, TMA store, asynchronous copy to shared memory, addition
# to floats in memory, in bulk or four at a time: a kernel that lost one of them still computes, but is no longer this
# design.
COUNTED = {
    "HGMMA": "HGMMA",
    "GMMA8": "[QI]GMMA",
    "UTMALDG": "UTMALDG",
    "UTMASTG": "UTMASTG",
    "LDGSTS": "LDGSTS",
    "RED": r"UBLKRED\.G\.S\.ADD\.F32\b|REDG?\.E\.ADD\.F32x4\b",
}
REQUIRED = {
    "forward_kernel": ("HGMMA", "UTMALDG"),
    "forward8_kernel": ("GMMA8", "UTMALDG"),
    "backward_kernel": ("HGMMA", "UTMALDG", "UTMASTG", "RED"),
    "preprocess_kernel": (),
    "postprocess_kernel": (),
    "column_means_kernel": (),
    "quantize_rows_kernel": ("LDGSTS",),
    "quantize_values_kernel": ("LDGSTS",),
    "transpose_values_kernel": (),
    "list_blocks_kernel": (),
}
MAIN_KERNELS = {"forward": "forward_kernel", "forward8": "forward8_kernel", "backward": "backward_kernel"}
# Of the files that no table lists, the quantiser's of which hold several kernels each.
OTHER_KERNELS = {
    "quantize": "quantize_rows_kernel",
    "quantize_common": "transpose_values_kernel",
    "packed_list": "list_blocks_kernel",
}
LOCAL_MEMORY = r"(LDL|STL)\b"
PRODUCER_STACK = 16
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*?)\s*;", re.MULTILINE)
# The two waits of a step of the 16-bit forward's main loop: for the scores, with P V in flight; for P V.
SCORES_DONE, PV_DONE = "WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
EXPONENTIAL = "MUFU.EX2"
RECIPROCAL = "MUFU.RCP"  # in a step, the softcap's alone: one after each exponential of its own
Code = list[tuple[int, str]]  # address and instruction, without its predicate
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


def instance_logs(build: Path, direction: str) -> dict[str, str]:
    """Instance name -> its ptxas log, for every kernel of one direction that this build lists."""
    listing = (build / f"generated/flashhopper_{direction}_instances.inc").read_text()
    logs = {}
    for config, element in re.findall(r"\((\w+), (\w+)\)", listing):
        log = build / f"CMakeFiles/flashhopper_kernels.dir/instances/{config}_{element}.cu.o.ptxas"
        logs[f"{config}_{element}"] = log.read_text() if log.exists() else ""
    return logs


def other_logs(build: Path) -> dict[str, dict[str, str]]:
    """Kind of file -> instance name -> its ptxas log, for the quantiser of every element type that this build lists,
    and for the sources that are in every build.
    """
    listing = (build / "generated/flashhopper_quantize_instances.inc").read_text()
    objects = build / "CMakeFiles/flashhopper_kernels.dir"
    files = {f"quantize_{element}": "instances" for element in re.findall(r"MEANS\((\w+)\)", listing)}
    logs: dict[str, dict[str, str]] = {kind: {} for kind in OTHER_KERNELS}
    for name, folder in {**files, "quantize_common": "cpp/src", "packed_list": "cpp/src"}.items():
        log = objects / folder / f"{name}.cu.o.ptxas"
        kind = name if name in OTHER_KERNELS else "quantize"
        logs[kind][name] = log.read_text() if log.exists() else ""
    return logs


def disassemble(library: Path) -> str:
    cuobjdump = find_cuobjdump()
    return run(str(cuobjdump), "-sass", str(library), PATH=f"{cuobjdump.parent}{os.pathsep}{os.environ['PATH']}")


def parse_sass(text: str) -> dict[str, Code]:
    """Mangled kernel name -> its instructions."""
    kernels = {}
    for block in re.split(r"\n\s*Function : ", text)[1:]:
        name, _, code = block.partition("\n")
        kernels[name.strip()] = [(int(address, 16), text) for address, text in INSTRUCTION.findall(code)]
    return kernels


def count(code: Code, pattern: str) -> int:
    return sum(re.match(pattern, instruction) is not None for _, instruction in code)


def innermost_loop(code: Code, place: int) -> list[str] | None:
    """The instructions from the target of the first backward branch that encloses a place to that branch, turned so
    that they begin at the place; None where no branch encloses it.
    """
    for last in range(place + 1, len(code)):
        target = re.match(r"BRA (?:!?U?P\w+, )?0x([0-9a-f]+)", code[last][1])
        if target and int(target[1], 16) <= code[place][0]:
            loop = [instruction for address, instruction in code[: last + 1] if address >= int(target[1], 16)]
            turn = len(loop) - 1 - (last - place)
            return loop[turn:] + loop[:turn]
    return None


def order_problem(code: Code) -> str | None:
    """What is wrong with the main loop of a 16-bit forward kernel: P V must be waited for after the first exponential
    of the step and before half of them. cpp/forward/consumer16.hpp says why; ptxas, left alone, puts the wait
    elsewhere. The loop over tiles has such waits of its own around the steps: a loop with several is none of steps.
    """
    waits_for_scores = [place for place, (_, instruction) in enumerate(code) if instruction == SCORES_DONE]
    if not waits_for_scores:
        return "no main loop: nothing waits for scores with P V in flight"
    loops = [loop for place in waits_for_scores if (loop := innermost_loop(code, place)) is not None]
    steps = [loop for loop in loops if loop.count(SCORES_DONE) == 1]
    if not steps:
        return "no main loop: the waits for scores with P V in flight stand in no loop of their own"
    for step in steps:
        waits = [place for place, instruction in enumerate(step) if instruction == PV_DONE]
        if len(waits) != 1:
            return f"P V is waited for {len(waits)} times in a step of the main loop, not once"
        exponentials = [place for place, instruction in enumerate(step) if instruction.startswith(EXPONENTIAL)]
        del exponentials[: sum(instruction.startswith(RECIPROCAL) for instruction in step)]  # the softcap comes first
        before = sum(place < waits[0] for place in exponentials)
        if not 0 < before <= len(exponentials) / 2:
            return f"P V is waited for after {before} of the {len(exponentials)} exponentials of a step"
    return None


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


def spill_problem(kernel: str, code: Code, stack: int, spills: int) -> str | None:
    """Nothing spills, with one exception: the backward's producer has 24 registers and may keep PRODUCER_STACK bytes of
    addresses in local memory, read between its TMA instructions. Its code stands behind the consumers'.
    """
    places = [address for address, instruction in code if re.match(LOCAL_MEMORY, instruction)]
    if not (stack or spills or places):
        return None
    producer = [address for address, instruction in code if instruction.startswith("USETMAXREG.DEALLOC")]
    if kernel == "backward_kernel" and stack <= PRODUCER_STACK and producer and min(places, default=-1) > producer[0]:
        return None
    return f"{stack} bytes of stack, {spills} bytes of spills, {len(places)} uses of local memory"


def check_kernel(kernel: str, code: Code, stack: int, spills: int) -> list[str]:
    problems = []
    if (problem := spill_problem(kernel, code, stack, spills)) is not None:
        problems.append(problem)
    if kernel not in REQUIRED:
        problems.append("is unknown to this script")
    problems += [f"no {name} in its SASS" for name in REQUIRED.get(kernel, ()) if not count(code, COUNTED[name])]
    if kernel == "forward_kernel" and (problem := order_problem(code)) is not None:
        problems.append(problem)
    return problems


def kernel_name(mangled: str) -> str:
    """As in REQUIRED. One template makes the forward kernels of either width: the traits tell them apart."""
    found = re.search(r"\d([a-z_]+_kernel)[IE]", mangled)  # the name behind its length, before its arguments
    name = found[1] if found else mangled
    return "forward8_kernel" if name == "forward_kernel" and "Forward8Traits" in mangled else name


def check_instance(instance: str, main_kernel: str, log: str, kernels: dict[str, Code]) -> list[str]:
    problems = [f"ptxas says {line.strip()}" for line in log.splitlines() if re.search(r"\(C\d+\)", line)]
    seen = set()
    for mangled, stack, spills, registers in ptxas_entries(log):
        kernel = kernel_name(mangled)
        seen.add(kernel)
        code = kernels.get(mangled, [])
        counts = [count(code, pattern) for pattern in COUNTED.values()]
        print(f"{f'{instance} {kernel}':50}" + "".join(f"{n:>10}" for n in (registers, spills, *counts, len(code))))
        problems += [f"{kernel}: {problem}" for problem in check_kernel(kernel, code, stack, spills)]
    if main_kernel not in seen:
        problems.append(f"no {main_kernel} in its ptxas log")
    return [f"{instance}: {problem}" for problem in problems]


def check_kernels(build: Path, library: Path) -> list[str]:
    kernels = parse_sass(disassemble(library))
    print(f"{'instance and kernel':50}" + "".join(f"{n:>10}" for n in ("registers", "spills", *COUNTED, "SASS")))
    problems = []
    logs = {kernel: instance_logs(build, direction) for direction, kernel in MAIN_KERNELS.items()}
    logs |= {OTHER_KERNELS[kind]: found for kind, found in other_logs(build).items()}
    for main_kernel, instances in logs.items():
        for instance, log in instances.items():
            problems += check_instance(instance, main_kernel, log, kernels)
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
