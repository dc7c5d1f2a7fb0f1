"""Which engine serves a call, and why. Before it: interface.py, ops.py; after it: engine/hopper.py (is the compiled
module there?).

The process-wide choice is one string. What a device, a dtype and a head size allow is looked up once and remembered,
so that a call pays for a dictionary access.
"""

from __future__ import annotations

from types import TracebackType

import torch

from .engine import hopper, hopper_backward

BACKENDS = ("auto", "hopper", "tiled")
MAX_HEAD_DIM = 256
LEAST_SCALE, MOST_SCALE = 1e-30, 1e30  # as in cpp/src/problem.cpp: products in float32 stay finite and normal
LEAST_CAP, MOST_CAP = 1e-3, 1e3  # as in cpp/src/problem.cpp: the cap's error stays small
# Likewise of gradients above head_dim 128, as in cpp/src/backward_dispatch.cpp: their slope of the cap comes from
# probabilities of 16 bits.
LEAST_CAP_OF_WIDE_GRADIENTS, MOST_NARROW = 1.0, 128

_requested = "auto"
# (device index, dtype, head_dim, head_dim_v, is_backward) -> whether the kernels serve them, masks aside. No process
# has CUDA and another kind of accelerator, so the index (-1 on a CPU) names the device.
_remembered: dict[tuple[int, torch.dtype, int, int, bool], bool] = {}


class set_backend:  # noqa: N801 - reads as the function that it is
    """Choose the engine of every later call in this process: "auto", "hopper" or "tiled".

    `set_backend("tiled")` holds until the next call; `with set_backend("tiled"):` gives the earlier choice back at the
    end. "auto" takes the Hopper kernels where they can serve a call and the tiled engine elsewhere; explain() says
    which and why. "hopper" raises RuntimeError where the kernels cannot serve a call.

    Raises:
        ValueError: unknown name.
    """

    def __init__(self, name: str) -> None:
        global _requested
        if name not in BACKENDS:
            raise ValueError(f"backend is {name!r}: must be one of {', '.join(map(repr, BACKENDS))}")
        self._previous = _requested
        _requested = name

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _requested
        _requested = self._previous


def backend() -> str:
    """The process-wide choice: "auto", "hopper" or "tiled"."""
    return _requested


def forget() -> None:
    """Drop what was looked up about devices and the compiled module (a test that replaces either needs this)."""
    _remembered.clear()
    hopper.remembered.clear()
    hopper_backward.forget()


def resolve(
    requested: str,
    q: torch.Tensor,
    head_dim: int,
    head_dim_v: int,
    window_left: int,
    window_right: int,
    softcap: float,
    has_sink: bool,
    is_packed: bool,
    softmax_scale: float,
    is_backward: bool = False,
) -> bool:
    """Whether the Hopper kernels serve this call, or its gradients (else the tiled engine does).

    Raises:
        RuntimeError: "hopper" was asked for and cannot serve the call; or "auto" would take it, were its library
            loadable.
    """
    if requested == "tiled":
        return False
    has_softcap = softcap == 0.0 or _least_cap(head_dim, head_dim_v, is_backward) <= softcap <= MOST_CAP
    if has_softcap and LEAST_SCALE <= softmax_scale <= MOST_SCALE and _is_served(q, head_dim, head_dim_v, is_backward):
        return True
    reason, must_raise = refusal(
        q, head_dim, head_dim_v, window_left, window_right, softcap, has_sink, is_packed, softmax_scale, is_backward
    )
    if requested == "hopper":
        raise RuntimeError(f'backend "hopper" cannot serve this call: {reason}')
    if must_raise:
        raise RuntimeError(f'{reason}; run `python -m flashhopper doctor`, or ask for set_backend("tiled") by name')
    return False


def _least_cap(head_dim: int, head_dim_v: int, is_backward: bool) -> float:
    return LEAST_CAP_OF_WIDE_GRADIENTS if is_backward and max(head_dim, head_dim_v) > MOST_NARROW else LEAST_CAP


def _is_served(q: torch.Tensor, head_dim: int, head_dim_v: int, is_backward: bool) -> bool:
    key = (q.get_device(), q.dtype, head_dim, head_dim_v, is_backward)
    known = _remembered.get(key)
    if known is None:
        known = _remembered[key] = _static_refusal(q.device, q.dtype, head_dim, head_dim_v, is_backward)[0] is None
    return known


def refusal(
    q: torch.Tensor,
    head_dim: int,
    head_dim_v: int,
    window_left: int,
    window_right: int,
    softcap: float,
    has_sink: bool,
    is_packed: bool,
    softmax_scale: float,
    is_backward: bool = False,
) -> tuple[str | None, bool]:
    """Why the Hopper kernels cannot serve a call or its gradients (None: they can), and whether a broken installation
    is the only reason.
    """
    reason, is_broken = _static_refusal(q.device, q.dtype, head_dim, head_dim_v, is_backward)
    feature = None
    least_cap = _least_cap(head_dim, head_dim_v, is_backward)
    if softcap != 0.0 and not least_cap <= softcap <= MOST_CAP:
        feature = f"softcap is {softcap}, the kernels take 0.0 (none) and {least_cap} to {MOST_CAP}"
    elif not LEAST_SCALE <= softmax_scale <= MOST_SCALE:
        feature = f"softmax_scale is {softmax_scale}, the kernels take {LEAST_SCALE} to {MOST_SCALE}"
    if feature is not None and (reason is None or is_broken):
        return feature, False
    return reason, is_broken


def _static_refusal(
    device: torch.device, dtype: torch.dtype, head_dim: int, head_dim_v: int, is_backward: bool
) -> tuple[str | None, bool]:
    if device.type != "cuda":
        return f"q is on {device}, not on a CUDA device", False
    capability = hopper.capability(device)
    if capability is None:
        return f"no CUDA device answers for {device}", False
    if capability != (9, 0):
        return (
            f"{device} has compute capability {capability[0]}.{capability[1]}, the kernels need 9.0 (H100, H200)",
            False,
        )
    if dtype not in (torch.float16, torch.bfloat16):
        return f"q has dtype {dtype}, the kernels take float16 and bfloat16", False
    for name, size in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if size % 8 != 0 or not 0 < size <= MAX_HEAD_DIM:
            return f"{name} is {size}, the kernels take multiples of 8 up to {MAX_HEAD_DIM}", False
    if hopper.module is None:
        return f"the compiled module flashhopper._C did not load: {hopper.load_error}", True
    try:  # the library knows which kernels it has; the plan of any problem of this kind tells
        problem = (1, 1, 1, 1, 1, head_dim, head_dim_v, -1, -1)
        if is_backward:
            hopper.module.backward_plan(problem, hopper.dtype_code(dtype), 0, False, 132)
        else:
            hopper.module.forward_plan(problem, hopper.dtype_code(dtype), 0, 132)
    except RuntimeError as error:
        return str(error), False
    return None, False
