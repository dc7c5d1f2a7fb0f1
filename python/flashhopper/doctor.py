"""The environment report behind `python -m flashhopper doctor`. Before it: cli.py; after it: engine/hopper.py.

Needs nothing but torch and looks at everything behind a guard of its own, so that it always has something to print.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from . import backends
from .engine import hopper
from .engine.reference import reference_attention
from .interface import flash_attn_func
from .testing import error_metrics, make_inputs

# bfloat16 keeps 8 bits: half a unit of the last place on outputs of a few, with room for the sums.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
_GOOD, _NOTE, _PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    value: str
    status: str = _GOOD  # "ok", "note" (nothing to fix) or "problem" (the user must act)
    advice: str = ""


@dataclass(frozen=True)
class Report:
    """All findings; exit_code is 1 when one of them is a problem."""

    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0, or 1 when the user must act."""
        return int(any(finding.status == _PROBLEM for finding in self.findings))

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"exit_code": self.exit_code, "findings": [asdict(finding) for finding in self.findings]}

    def __str__(self) -> str:
        width = max(len(finding.name) for finding in self.findings)
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.status:<8}{finding.name:<{width + 2}}{finding.value}")
            if finding.advice:
                lines.append(" " * (width + 10) + finding.advice)
        return "\n".join(lines)


def examine() -> Report:
    """Look at the machine, the installation and one tile of attention."""
    findings: list[Finding] = []
    for look in (_versions, _module, _gpus, _driver, _attention):
        try:
            findings.extend(look())
        except Exception as error:  # a report that dies on what it should report helps nobody
            name = look.__name__.strip("_")
            findings.append(Finding(name, f"{type(error).__name__}: {error}", _PROBLEM, "this check itself failed"))
    return Report(tuple(findings))


def _versions() -> Iterator[Finding]:
    from . import __version__

    yield Finding("flashhopper", __version__)
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    yield Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")


def _module() -> Iterator[Finding]:
    from . import __version__

    if hopper.module is None:
        advice = "install flashhopper from a wheel or with `pip install .`; until then only the tiled engine runs"
        yield Finding("compiled module", f"did not load: {hopper.load_error}", _PROBLEM, advice)
        return
    version = hopper.module.version()
    same = version == __version__
    advice = "" if same else f"the Python files are {__version__}: reinstall so that both come from one build"
    yield Finding("compiled module", version, _GOOD if same else _PROBLEM, advice)
    yield Finding("forward kernels", _head_dims(hopper.module.forward_configs()))
    yield Finding("backward kernels", _head_dims(hopper.module.backward_configs()))


def _head_dims(rows: Iterable[Mapping[str, Any]]) -> str:
    """The head dimensions of config rows, each once."""
    sizes = sorted({(int(row["head_dim"]), int(row["head_dim_v"])) for row in rows})
    return ", ".join(f"{size}/{size_v}" for size, size_v in sizes) or "none in this build"


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None else "torch finds no usable CUDA device"
        yield Finding("gpu", why, _NOTE, "the tiled engine serves")
        return
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        properties = torch.cuda.get_device_properties(index)
        text = f"{properties.name}, compute capability {major}.{minor}, {properties.multi_processor_count} SMs"
        if (major, minor) == (9, 0):
            yield Finding(f"gpu {index}", text)
        else:
            yield Finding(f"gpu {index}", text, _NOTE, "the kernels need 9.0 (H100, H200): the tiled engine serves")


def _driver() -> Iterator[Finding]:
    if hopper.module is None:
        return
    environment = hopper.module.environment()
    runtime, driver = environment["cuda_runtime"], environment["cuda_driver"]
    yield Finding("built with CUDA", _cuda_version(runtime))
    has_hopper = _has_hopper()
    missing = _PROBLEM if has_hopper else _NOTE
    if driver == 0:
        yield Finding(
            "driver", f"none: {environment['message']}", missing, "" if has_hopper else "no GPU needs one here"
        )
        return
    # Within one major version an older driver runs a newer toolkit's binaries.
    fits = driver // 1000 >= runtime // 1000
    advice = "" if fits else f"the library needs a driver for CUDA {runtime // 1000}: update the driver"
    yield Finding("driver", f"supports CUDA {_cuda_version(driver)}", _GOOD if fits else missing, advice)
    if environment["tma_available"]:
        yield Finding("TMA entry point", "cuTensorMapEncodeTiled found")
    else:
        yield Finding(
            "TMA entry point", f"missing: {environment['message']}", missing, "update the driver (CUDA 12 or newer)"
        )


def _attention() -> Iterator[Finding]:
    on_gpu = _has_hopper() or torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    device = torch.device("cuda" if on_gpu else "cpu")
    q, k, v = make_inputs("normal", seqlen_q=128, heads=1, head_dim=128, dtype=dtype, device=device)
    reason, _ = backends.refusal(q, 128, 128, -1, 0, 0.0, False, False, 128**-0.5)
    engine = "hopper" if reason is None and backends.backend() != "tiled" else "tiled"
    if backends.backend() != "tiled" and device.type == "cuda" and hopper.module is None and _has_hopper():
        yield Finding("one tile", "not run: the kernels should serve this GPU and did not load", _PROBLEM)
        return
    with torch.no_grad():
        out = flash_attn_func(q, k, v, causal=True)
    assert isinstance(out, torch.Tensor)
    reference, _ = reference_attention(q, k, v, causal=True)
    error = error_metrics(out, reference).max_error
    good = error <= _TOLERANCE[dtype]
    name = str(dtype).removeprefix("torch.")
    text = f"{engine} engine, {name} on {device.type}: max error {error:.1e} against float64"
    yield Finding("one tile", text, _GOOD if good else _PROBLEM, "" if good else f"above {_TOLERANCE[dtype]:.0e}")


def _has_hopper() -> bool:
    if not torch.cuda.is_available():
        return False
    return any(torch.cuda.get_device_capability(i) == (9, 0) for i in range(torch.cuda.device_count()))


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def main(write: Callable[[str], object] = sys.stdout.write) -> int:
    """Print the report as plain text; the exit code."""
    report = examine()
    write(f"{report}\n")
    return report.exit_code
