"""scripts/check_sass.py on SASS written by hand: what it accepts, and that each of its checks can fail."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_sass.py"
NAMES = {
    "forward_kernel": "14forward_kernelINS_13ForwardTraitsILi2EN7cutlass10bfloat16_tEEEEEvNS_11ForwardArgsE",
    "forward8_kernel": "14forward_kernelINS_14Forward8TraitsILi2EN7cutlass12float_e4m3_tEEEEEvNT_4ArgsE",
    "backward_kernel": "15backward_kernelINS_14BackwardTraitsILi1EN7cutlass6half_tEEELb0EEEvNS_12BackwardArgsE",
    "preprocess_kernel": "17preprocess_kernelIN7cutlass6half_tEEEvNS_12BackwardArgsEii",
    "postprocess_kernel": "18postprocess_kernelIN7cutlass6half_tEEEvNS_12BackwardArgsEii",
    "quantize_rows_kernel": "20quantize_rows_kernelIN7cutlass10bfloat16_tELi64ELb0ELb1EEEvNS_8RowsArgsE",
    "transpose_values_kernel": "23transpose_values_kernelENS_10ValuesArgsEi",
    "list_blocks_kernel": "18list_blocks_kernelENS_8ListArgsE",
}
NAMES = {kernel: f"_ZN11flashhopper{name}" for kernel, name in NAMES.items()}
SCORES_DONE = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
PV_DONE = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
EX2 = "MUFU.EX2 R12, R12"
CAP = [EX2, "MUFU.RCP R12, R12"]
TMA_LOAD = "UTMALDG.4D [UR8], [UR14], desc[UR16]"
TMA = [TMA_LOAD, "UTMASTG.4D [UR8], [UR6]"]
HGMMA = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR40], RZ, !UPT"
QGMMA = "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR40], RZ, !UPT"
IGMMA = "IGMMA.64x128x32.S8.S8 R24, gdesc[UR40], R24"
RED = "UBLKRED.G.S.ADD.F32.RN [UR8], [UR4], UR5"
RED_OF_FOUR, RED_OF_ONE = (f"REDG.E.ADD.{kind}.FTZ.RN.STRONG.GPU desc[UR4][R16.64], R152" for kind in ("F32x4", "F32"))


def step(*, caps: int = 0, early: int = 1, late: int = 3, loops_to: int = 0x20, tile_loops_to: int = 0x10) -> list[str]:
    """A forward kernel: a first block, the main loop from 0x20 on, the last product, which is waited for with the next
    tile's scores in flight, and the loop over tiles from 0x10 on. caps: of scores, in front of the softmax.
    """
    loop = [HGMMA, SCORES_DONE, "@P1 BRA P2, 0x9000", *CAP * caps, *[EX2] * early, PV_DONE, *[EX2] * late]
    steps = [PV_DONE, *loop, f"@P1 BRA 0x{loops_to:x}"]
    return [TMA_LOAD, *steps, HGMMA, SCORES_DONE, EX2, f"@P2 BRA 0x{tile_loops_to:x}", PV_DONE]


def rolled() -> list[str]:
    """The same with the loop of steps entered in its midst: the late exponentials of a step stand above its wait."""
    loop = [*[EX2] * 3, HGMMA, SCORES_DONE, EX2, PV_DONE, "@P1 BRA 0x20"]
    return [TMA_LOAD, PV_DONE, *loop, HGMMA, SCORES_DONE, EX2, "@P2 BRA 0x10", PV_DONE]


def without_pv_waits(code: list[str]) -> list[str]:
    """Their places stay taken, so that branches still meet their targets."""
    return ["NOP" if instruction == PV_DONE else instruction for instruction in code]


GOOD = {
    "forward_kernel": step(),
    "forward8_kernel": [IGMMA, QGMMA, TMA_LOAD],
    "backward_kernel": [HGMMA, RED, *TMA],
    "preprocess_kernel": ["LDG.E.128.CONSTANT R4, desc[UR4][R2.64]"],
    "postprocess_kernel": ["STG.E.128 desc[UR4][R2.64], R4"],
    "quantize_rows_kernel": ["LDGSTS.E.BYPASS.128 [R3], desc[UR8][R6.64], P3"],
    "transpose_values_kernel": ["STG.E.128 desc[UR4][R2.64], R4"],
    "list_blocks_kernel": ["STG.E.128 desc[UR4][R2.64], R4"],
}


def sass(kernels: dict[str, list[str]]) -> str:
    """What cuobjdump prints: every instruction with its address, then its encoding on two lines."""
    text = "\n\tcode for sm_90a\n"
    for kernel, code in kernels.items():
        text += f'\n\t\tFunction : {NAMES[kernel]}\n\t.headerflags\t@"EF_CUDA_SM90"\n'
        for place, instruction in enumerate(code):
            margin = "" if instruction.startswith("@") else "    "
            text += f"        /*{16 * place:04x}*/      {margin} {instruction} ;    /* 0x00000a00ff017b82 */\n"
            text += f"{'':80}/* 0x000fe20000000800 */\n"
    return text


def ptxas_log(*kernels: str, stack: int = 0, spills: int = 0) -> str:
    return "".join(
        f"ptxas info    : Compiling entry function '{NAMES[kernel]}' for 'sm_90a'\n"
        f"ptxas info    : Function properties for {NAMES[kernel]}\n"
        f"    {stack} bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 16 barriers\n"
        for kernel in kernels
    )


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_sass", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A build directory with one instance a direction."""
    logs = tmp_path / "CMakeFiles/flashhopper_kernels.dir/instances"
    logs.mkdir(parents=True)
    (tmp_path / "generated").mkdir()
    for direction, kernels in (
        ("forward", ("forward_kernel",)),
        ("forward8", ("forward8_kernel",)),
        ("backward", ("preprocess_kernel", "backward_kernel", "postprocess_kernel")),
    ):
        listing = f"// Written by hand.\nFLASHHOPPER_INSTANCE({direction}_row, bf16)\n"
        (tmp_path / f"generated/flashhopper_{direction}_instances.inc").write_text(listing)
        (logs / f"{direction}_row_bf16.cu.o.ptxas").write_text(ptxas_log(*kernels))
    (tmp_path / "generated/flashhopper_quantize_instances.inc").write_text("FLASHHOPPER_MEANS(bf16)\n")
    (logs / "quantize_bf16.cu.o.ptxas").write_text(ptxas_log("quantize_rows_kernel"))
    common = logs.parent / "cpp/src/quantize_common.cu.o.ptxas"
    common.parent.mkdir(parents=True)
    common.write_text(ptxas_log("transpose_values_kernel"))
    (common.parent / "packed_list.cu.o.ptxas").write_text(ptxas_log("list_blocks_kernel"))
    return tmp_path


def problems(script: ModuleType, build: Path, monkeypatch: pytest.MonkeyPatch, **change: list[str]) -> list[str]:
    monkeypatch.setattr(script, "disassemble", lambda _: sass({**GOOD, **change}))
    found: list[str] = script.check_kernels(build, build / "libflashhopper.so")
    return found


def test_a_good_build(script: ModuleType, build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(script, build, monkeypatch) == []


def test_a_build_without_kernels_of_a_direction(
    script: ModuleType, build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (build / "generated/flashhopper_backward_instances.inc").write_text("// Written by hand.\n")
    assert problems(script, build, monkeypatch) == []


@pytest.mark.parametrize("kernel", ["forward_kernel", "forward8_kernel", "backward_kernel"])
@pytest.mark.parametrize("opcode", ["HGMMA", "QGMMA", "UTMALDG", "UTMASTG", "UBLKRED"])
def test_a_lost_instruction(
    script: ModuleType, build: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, opcode: str
) -> None:
    gone = ("QGMMA", "IGMMA") if opcode == "QGMMA" else opcode
    code = [instruction for instruction in GOOD[kernel] if not instruction.startswith(gone)]
    found = problems(script, build, monkeypatch, **{kernel: code})
    if len(code) == len(GOOD[kernel]):
        assert found == []
    else:
        assert any(f": {kernel}: no " in problem and "in its SASS" in problem for problem in found)


@pytest.mark.parametrize("gemm", [QGMMA, IGMMA])
def test_one_kind_of_8bit_gemm_suffices(
    script: ModuleType, build: Path, monkeypatch: pytest.MonkeyPatch, gemm: str
) -> None:
    assert problems(script, build, monkeypatch, forward8_kernel=[gemm, TMA_LOAD]) == []


def test_the_8bit_forward_is_told_by_its_traits(
    script: ModuleType, build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (problem,) = problems(script, build, monkeypatch, forward8_kernel=[HGMMA, TMA_LOAD])
    assert problem == "forward8_row_bf16: forward8_kernel: no GMMA8 in its SASS"
    log = build / "CMakeFiles/flashhopper_kernels.dir/instances/forward8_row_bf16.cu.o.ptxas"
    log.write_text(ptxas_log("forward8_kernel", spills=4))
    (problem,) = problems(script, build, monkeypatch)
    assert problem.startswith("forward8_row_bf16: forward8_kernel: 0 bytes of stack, 8 bytes of spills")
    log.write_text(ptxas_log("forward_kernel"))
    (problem,) = problems(script, build, monkeypatch)
    assert problem == "forward8_row_bf16: no forward8_kernel in its ptxas log"


def test_additions_to_memory(script: ModuleType, build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(script, build, monkeypatch, backward_kernel=[HGMMA, RED_OF_FOUR, *TMA]) == []
    (problem,) = problems(script, build, monkeypatch, backward_kernel=[HGMMA, RED_OF_ONE, *TMA])
    assert problem == "backward_row_bf16: backward_kernel: no RED in its SASS"


def test_the_quantiser(script: ModuleType, build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = problems(script, build, monkeypatch, quantize_rows_kernel=["LDG.E.128 R4, desc[UR4][R2.64]"])
    assert problem == "quantize_bf16: quantize_rows_kernel: no LDGSTS in its SASS"
    common = build / "CMakeFiles/flashhopper_kernels.dir/cpp/src/quantize_common.cu.o.ptxas"
    common.write_text(ptxas_log("transpose_values_kernel", spills=8))
    (problem,) = problems(script, build, monkeypatch)
    assert problem.startswith("quantize_common: transpose_values_kernel: 0 bytes of stack, 16 bytes of spills")
    common.unlink()
    (problem,) = problems(script, build, monkeypatch)
    assert problem == "quantize_common: no transpose_values_kernel in its ptxas log"


def test_local_memory(script: ModuleType, build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = [*GOOD["preprocess_kernel"], "STL.64 [R1+0x8], R4"]
    (problem,) = problems(script, build, monkeypatch, preprocess_kernel=code)
    local = "0 bytes of stack, 0 bytes of spills, 1 uses of local memory"
    assert problem == f"backward_row_bf16: preprocess_kernel: {local}"


def test_local_memory_of_the_producer(script: ModuleType, build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deallocation, store = "USETMAXREG.DEALLOC.CTAPOOL 0x18", "STL [R1], R2"
    good = GOOD["backward_kernel"]
    assert problems(script, build, monkeypatch, backward_kernel=[*good, deallocation, store]) == []
    for code in ([*good, store], [*good, store, deallocation], [store, *good, deallocation, store]):
        (problem,) = problems(script, build, monkeypatch, backward_kernel=code)
        assert "uses of local memory" in problem


def test_logs(script: ModuleType, build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = build / "CMakeFiles/flashhopper_kernels.dir/instances/forward_row_bf16.cu.o.ptxas"
    log.write_text(ptxas_log("forward_kernel", stack=16, spills=8))
    (problem,) = problems(script, build, monkeypatch)
    assert problem == "forward_row_bf16: forward_kernel: 16 bytes of stack, 16 bytes of spills, 0 uses of local memory"
    log.write_text(ptxas_log("forward_kernel") + "ptxas info    : (C7510) Potential Performance Loss: serialized\n")
    (problem,) = problems(script, build, monkeypatch)
    assert "ptxas says" in problem
    for text in (ptxas_log("preprocess_kernel"), ""):
        log.write_text(text)
        (problem,) = problems(script, build, monkeypatch)
        assert problem == "forward_row_bf16: no forward_kernel in its ptxas log"
    log.write_text(ptxas_log("forward_kernel").replace("14forward_kernel", "14fwdward_kernel"))
    assert any("unknown" in problem for problem in problems(script, build, monkeypatch))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (step(early=0, late=4), "after 0 of the 4 exponentials"),
        (step(early=3, late=2), "after 3 of the 5 exponentials"),
        (step(early=4, late=0), "after 4 of the 4 exponentials"),
        (step(caps=4, early=0, late=4), "after 0 of the 4 exponentials"),
        (step(caps=4, early=3, late=1), "after 3 of the 4 exponentials"),
        (step(early=0, late=0), "after 0 of the 0 exponentials"),
        (step(loops_to=0x7000), "in no loop of their own"),  # the loop over tiles holds both waits
        (step(loops_to=0x7000, tile_loops_to=0x7000), "in no loop of their own"),
        (without_pv_waits(step()), "waited for 0 times"),
        ([PV_DONE if place == 7 else x for place, x in enumerate(step())], "waited for 2 times"),
        ([x for x in step() if x != SCORES_DONE], "no main loop"),
    ],
)
def test_the_wait_for_pv_in_the_wrong_place(
    script: ModuleType, build: Path, monkeypatch: pytest.MonkeyPatch, code: list[str], message: str
) -> None:
    (problem,) = problems(script, build, monkeypatch, forward_kernel=code)
    assert problem.startswith("forward_row_bf16: forward_kernel: ")
    assert message in problem


@pytest.mark.parametrize(("early", "late"), [(1, 1), (2, 2), (11, 55)])
def test_the_wait_for_pv_in_the_right_place(
    script: ModuleType, build: Path, monkeypatch: pytest.MonkeyPatch, early: int, late: int
) -> None:
    assert problems(script, build, monkeypatch, forward_kernel=step(early=early, late=late)) == []
    assert problems(script, build, monkeypatch, forward_kernel=step(caps=64, early=early, late=late)) == []


def test_a_loop_entered_in_its_midst(script: ModuleType, build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(script, build, monkeypatch, forward_kernel=rolled()) == []
