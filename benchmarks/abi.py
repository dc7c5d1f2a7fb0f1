"""The C ABI of libflashhopper.so through ctypes, so that several builds can be loaded side by side (flashhopper.h)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

FP16, BF16 = 0, 1
DTYPE_CODES = {torch.float16: FP16, torch.bfloat16: BF16}


class TensorView(Structure):
    """flashhopper_tensor."""

    _fields_ = [("data", c_void_p), ("batch_stride", c_int64), ("row_stride", c_int64), ("head_stride", c_int64)]


_SIZES = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "window_left", "window_right")


class ForwardParams(Structure):
    """flashhopper_forward_params."""

    _fields_ = [
        *[(name, TensorView) for name in ("q", "k", "v", "out")],
        ("lse", c_void_p),
        ("workspace", c_void_p),
        *[(name, c_int64) for name in _SIZES],
        ("softmax_scale", c_float),
        ("dtype", c_int32),
        ("sm_margin", c_int32),
        ("stream", c_void_p),
    ]


_PLAN_INTS = (
    *("tile_m", "tile_n", "head_dim", "head_dim_v", "stages", "q_stages", "consumer_warpgroups", "threads"),
    *("producer_registers", "consumer_registers"),
)


class ForwardPlan(Structure):
    """flashhopper_forward_plan."""

    _fields_ = [
        ("config", c_char * 64),
        *[(name, c_int32) for name in _PLAN_INTS],
        *[(name, c_int64) for name in ("smem_bytes", "grid", "tiles")],
        ("flops", c_double),
        ("bytes", c_double),
    ]

    def as_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name, *_ in self._fields_}
        return {**values, "config": self.config.decode()}


def _view(tensor: torch.Tensor) -> TensorView:
    if tensor.stride(3) != 1 and tensor.size(3) > 1:
        raise ValueError(f"last dimension must be contiguous, got strides {tensor.stride()}")
    return TensorView(tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2))


class Library:
    """One loaded build. Calls raise RuntimeError with the library's own message where it returns an error."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).resolve()
        if not self.path.is_file():
            raise FileNotFoundError(f"{path}: no such library")
        # RTLD_LOCAL (ctypes' default) keeps the symbols of several builds apart.
        self._dll = ctypes.CDLL(str(self.path))
        self._dll.flashhopper_version.restype = c_char_p
        self._dll.flashhopper_last_error.restype = c_char_p
        self._dll.flashhopper_workspace_bytes.restype = c_int64
        self._dll.flashhopper_forward.argtypes = [POINTER(ForwardParams)]
        self._dll.flashhopper_forward.restype = c_int
        self._dll.flashhopper_forward_get_plan.argtypes = [POINTER(ForwardParams), c_int, POINTER(ForwardPlan)]
        self._dll.flashhopper_forward_get_plan.restype = c_int
        self._workspace: torch.Tensor | None = None

    @property
    def version(self) -> str:
        return str(self._dll.flashhopper_version().decode())

    def _check(self, call: str, status: int) -> None:
        if status != 0:
            message = (self._dll.flashhopper_last_error() or b"").decode(errors="replace")
            raise RuntimeError(f"{call} returned {status}: {message or 'no message'}")

    def workspace(self, device: torch.device) -> torch.Tensor:
        """Zeroed once; every call leaves it zero. At least one byte, so that the pointer is never null."""
        if self._workspace is None or self._workspace.device != device:
            nbytes = max(16, int(self._dll.flashhopper_workspace_bytes()))
            self._workspace = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return self._workspace

    def params(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        *,
        causal: bool = False,
        softmax_scale: float | None = None,
        sm_margin: int = 0,
    ) -> ForwardParams:
        """The struct of one call on the current stream; the tensors must outlive it."""
        scale = q.size(3) ** -0.5 if softmax_scale is None else softmax_scale
        return ForwardParams(
            _view(q),
            _view(k),
            _view(v),
            _view(out),
            lse.data_ptr() if lse is not None else None,
            self.workspace(q.device).data_ptr(),
            q.size(0),
            q.size(2),
            k.size(2),
            q.size(1),
            k.size(1),
            q.size(3),
            v.size(3),
            -1,
            0 if causal else -1,
            scale,
            DTYPE_CODES[q.dtype],
            sm_margin,
            torch.cuda.current_stream(q.device).cuda_stream,
        )

    def launch(self, params: ForwardParams) -> None:
        self._check("flashhopper_forward", self._dll.flashhopper_forward(ctypes.byref(params)))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = False,
        softmax_scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse of one call, both filled with NaN first so that an element nobody wrote shows."""
        out = q.new_full((*q.shape[:3], v.size(3)), float("nan"))
        lse = torch.full((q.size(0), q.size(2), q.size(1)), float("nan"), dtype=torch.float32, device=q.device)
        self.launch(self.params(q, k, v, out, lse, causal=causal, softmax_scale=softmax_scale))
        return out, lse

    def plan(self, params: ForwardParams, num_sms: int) -> dict[str, Any]:
        result = ForwardPlan()
        status = self._dll.flashhopper_forward_get_plan(ctypes.byref(params), num_sms, ctypes.byref(result))
        self._check("flashhopper_forward_get_plan", status)
        return result.as_dict()
