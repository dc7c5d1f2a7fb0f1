"""The C ABI of libflashhopper.so through ctypes, so that several builds can be loaded side by side (flashhopper.h)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FP16, BF16 = 0, 1
DTYPE_CODES = {torch.float16: FP16, torch.bfloat16: BF16}
UNSUPPORTED = 2  # flashhopper_status
PACK_WHERE_IT_PAYS = -1
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class UnsupportedError(RuntimeError):
    """The build holds no kernel for the call: a development build may have only some of them."""


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
        ("softcap", c_float),
        *[(name, c_void_p) for name in ("sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")],
        *[(name, c_int64) for name in ("total_q", "total_k")],
        ("packed_workspace", c_void_p),
        ("pack_gqa", c_int32),
    ]


class BackwardParams(Structure):
    """flashhopper_backward_params."""

    _fields_ = [
        *[(name, TensorView) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")],
        *[(name, c_void_p) for name in ("lse", "dlse", "sink", "dsink", "workspace")],
        *[(name, c_int64) for name in _SIZES],
        ("softmax_scale", c_float),
        ("softcap", c_float),
        ("dtype", c_int32),
        ("sm_margin", c_int32),
        ("deterministic", c_int32),
        ("stream", c_void_p),
        *[(name, c_void_p) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")],
        ("total_q", c_int64),
        ("total_k", c_int64),
    ]


_PLAN_INTS = (
    *("tile_m", "tile_n", "head_dim", "head_dim_v", "stages", "q_stages", "consumer_warpgroups", "threads"),
    *("producer_registers", "consumer_registers"),
)


class Plan(Structure):
    """flashhopper_plan."""

    _fields_ = [
        ("config", c_char * 64),
        *[(name, c_int32) for name in _PLAN_INTS],
        *[(name, c_int64) for name in ("smem_bytes", "grid", "tiles", "workspace_bytes")],
        ("flops", c_double),
        ("bytes", c_double),
        ("cluster", c_int32),
        ("packed_heads", c_int32),
    ]

    def as_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name, *_ in self._fields_}
        return {**values, "config": self.config.decode(errors="replace")}


def _view(tensor: torch.Tensor) -> TensorView:
    if tensor.stride(3) != 1 and tensor.size(3) > 1:
        raise ValueError(f"last dimension must be contiguous, got strides {tensor.stride()}")
    return TensorView(tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2))


def _sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[int, ...]:
    lengths = (q.size(0), q.size(2), k.size(2), q.size(1), k.size(1), q.size(3), v.size(3))
    return (*lengths, -1, 0 if causal else -1)


def _scale(q: torch.Tensor, softmax_scale: float | None) -> float:
    return float(q.size(3) ** -0.5 if softmax_scale is None else softmax_scale)


def _stream(q: torch.Tensor) -> int:
    return int(torch.cuda.current_stream(q.device).cuda_stream)


@dataclass
class BackwardCall:
    """A backward with everything bound; it keeps the tensors alive whose addresses its struct holds."""

    params: BackwardParams
    plan: dict[str, Any]
    gradients: Tensors
    workspace: torch.Tensor
    keep: tuple[torch.Tensor | None, ...]


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
        self._declare("forward", ForwardParams)
        # Builds from before the backward pass can still be compared forward.
        self.has_backward = hasattr(self._dll, "flashhopper_backward")
        if self.has_backward:
            self._declare("backward", BackwardParams)
        self._workspace: torch.Tensor | None = None

    def _declare(self, op: str, params: type[Structure]) -> None:
        launch, get_plan = (getattr(self._dll, f"flashhopper_{op}{suffix}") for suffix in ("", "_get_plan"))
        launch.argtypes, launch.restype = [POINTER(params)], c_int
        get_plan.argtypes, get_plan.restype = [POINTER(params), c_int, POINTER(Plan)], c_int

    @property
    def version(self) -> str:
        return str(self._dll.flashhopper_version().decode())

    def _check(self, call: str, status: int) -> None:
        if status != 0:
            message = (self._dll.flashhopper_last_error() or b"").decode(errors="replace")
            kind = UnsupportedError if status == UNSUPPORTED else RuntimeError
            raise kind(f"{call} returned {status}: {message or 'no message'}")

    def workspace(self, device: torch.device) -> torch.Tensor:
        """The forward's: zeroed once; every call leaves it zero. At least one byte, so that the pointer is never
        null."""
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
        params = ForwardParams(
            *(_view(x) for x in (q, k, v, out)),
            lse.data_ptr() if lse is not None else None,
            self.workspace(q.device).data_ptr(),
            *_sizes(q, k, v, causal),
            _scale(q, softmax_scale),
            DTYPE_CODES[q.dtype],
            sm_margin,
            _stream(q),
        )
        params.pack_gqa = PACK_WHERE_IT_PAYS
        return params

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

    def plan(self, params: ForwardParams | BackwardParams, num_sms: int) -> dict[str, Any]:
        result = Plan()
        name = "forward" if isinstance(params, ForwardParams) else "backward"
        call = getattr(self._dll, f"flashhopper_{name}_get_plan")
        self._check(f"flashhopper_{name}_get_plan", call(ctypes.byref(params), num_sms, ctypes.byref(result)))
        return result.as_dict()

    def prepare_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        gradients: Tensors | None = None,
        dlse: torch.Tensor | None = None,
        causal: bool = False,
        softmax_scale: float | None = None,
        sm_margin: int = 0,
        deterministic: bool = False,
    ) -> BackwardCall:
        """A call on the current stream, with its workspace. Gradients (allocated unless given) and workspace are
        filled with NaN: what nobody writes shows, and so does a workspace that is taken for zero."""
        if not self.has_backward:
            raise UnsupportedError(f"{self.path.name} has no flashhopper_backward")
        if gradients is None:
            gradients = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        params = BackwardParams(
            *(_view(x) for x in (q, k, v, out, dout, *gradients)),
            lse.data_ptr(),
            dlse.data_ptr() if dlse is not None else None,
            None,
            None,
            None,
            *_sizes(q, k, v, causal),
            _scale(q, softmax_scale),
            0.0,
            DTYPE_CODES[q.dtype],
            sm_margin,
            int(deterministic),
            _stream(q),
        )
        plan = self.plan(params, torch.cuda.get_device_properties(q.device).multi_processor_count)
        # torch's allocator aligns to 512 bytes, more than the 256 asked for. All bits set is NaN in every float type.
        nbytes = max(16, int(plan["workspace_bytes"]))
        workspace = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=q.device)
        params.workspace = workspace.data_ptr()
        for gradient in gradients:
            gradient.fill_(float("nan"))
        return BackwardCall(params, plan, gradients, workspace, (dout, q, k, v, out, lse, dlse))

    def launch_backward(self, call: BackwardCall) -> None:
        self._check("flashhopper_backward", self._dll.flashhopper_backward(ctypes.byref(call.params)))

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        **options: Any,
    ) -> Tensors:
        """dq, dk and dv of one call; options as of prepare_backward."""
        call = self.prepare_backward(dout, q, k, v, out, lse, **options)
        self.launch_backward(call)
        return call.gradients
