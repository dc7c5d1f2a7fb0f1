"""A stand-in for the compiled module and for the CUDA calls around it, so that the plumbing is tested where there is
no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashhopper import backends
from flashhopper.engine import hopper

# The parameters of _C.prepare_forward and of what it returns, in order (python/flashhopper/_C.pyi).
PREPARE_PARAMETERS = (
    *("q_batch_stride", "q_row_stride", "q_head_stride"),
    *("k_batch_stride", "k_row_stride", "k_head_stride"),
    *("v_batch_stride", "v_row_stride", "v_head_stride"),
    *("out_batch_stride", "out_row_stride", "out_head_stride"),
    *("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"),
    *("window_left", "window_right", "softmax_scale", "dtype", "sm_margin", "pack_gqa"),
)
CALL_PARAMETERS = ("q", "k", "v", "out", "lse", "workspace", "stream")
# The parameters of _C.backward, the tensors of its first and the sizes of its fifth.
BACKWARD_PARAMETERS = (
    *("tensors", "addresses", "sizes", "totals", "softmax_scale", "softcap", "dtype", "sm_margin", "deterministic"),
    "stream",
)
BACKWARD_ADDRESSES = (
    *("lse", "dlse", "sink", "dsink", "workspace", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"),
)
# The parameters of _C.forward, the tensors of its first and the addresses of its second.
FORWARD_PARAMETERS = (
    *("tensors", "addresses", "sizes", "totals", "softmax_scale", "softcap", "dtype", "sm_margin", "pack_gqa"),
    "stream",
)
FORWARD_TENSORS = ("q", "k", "v", "out")
FORWARD_ADDRESSES = (
    *("lse", "workspace", "sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "packed_workspace"),
)
# The parameters of _C.quantize and of _C.transpose_values.
QUANTIZE_PARAMETERS = (
    *("tensors", "outputs", "signs", "sizes", "columns", "dtype", "format", "flags", "blocks"),
    *("offsets", "totals", "stream"),
)
TRANSPOSE_PARAMETERS = ("v", "v8", "batch", "kv_heads", "seqlen_k", "head_dim_v", "stream")
BACKWARD_TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
SIZES = (
    *("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"),
    *("window_left", "window_right"),
)

Rows = tuple[tuple[int, int], ...]


class FakeModule:
    """Records the calls; head sizes as in the real table."""

    FP16, BF16, E4M3, INT8 = 0, 1, 2, 3
    rows: Rows = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
    backward_rows: Rows = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256))

    def __init__(self) -> None:
        self.calls: list[dict[str, float]] = []
        self.forward_calls: list[dict[str, Any]] = []
        self.backward_calls: list[dict[str, Any]] = []
        self.backward_plans: list[tuple[object, ...]] = []
        self.quantize_calls: list[dict[str, Any]] = []
        self.transpose_calls: list[dict[str, Any]] = []
        self.prepared = 0
        self.error: Exception | None = None
        self.workspaces = 0
        self.stream = 77
        self.device = 0
        self.capturing = False
        self.environment_ = {
            "version": "0.1.0",
            "cuda_runtime": 13000,
            "cuda_driver": 13010,
            "device_count": 1,
            "tma_available": True,
            "message": "",
        }

    def version(self) -> str:
        return "0.1.0"

    def environment(self) -> dict[str, object]:
        return self.environment_

    def workspace_bytes(self) -> int:
        return 130

    def packed_workspace_bytes(self, batch: int, total_q: int) -> int:
        return 16 + 32 * (batch + total_q)

    def forward_configs(self) -> list[dict[str, object]]:
        return [self._row("fwd", d, dv) for d, dv in self.rows]

    def backward_configs(self) -> list[dict[str, object]]:
        return [self._row("bwd", d, dv) for d, dv in self.backward_rows]

    def _row(self, kind: str, head_dim: int, head_dim_v: int) -> dict[str, object]:
        numbers = {"tile_m": 128, "tile_n": 160, "stages": 2, "q_stages": 1, "consumer_warpgroups": 2, "threads": 384}
        registers = {"producer_registers": 24, "consumer_registers": 240, "smem_bytes": 200000}
        work = {"grid": 132, "tiles": 64, "workspace_bytes": 4321, "flops": 1.0, "bytes": 2.0}
        shared = {"cluster": 2, "packed_heads": 1}
        config = f"{kind}_hd{head_dim}_m128_n160"
        return {
            "config": config,
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
            **numbers,
            **registers,
            **work,
            **shared,
        }

    def forward_plan(
        self,
        sizes: Sequence[int],
        dtype: int,
        sm_margin: int,
        num_sms: int,
        totals: tuple[int, int] = (0, 0),
        pack_gqa: int = -1,
    ) -> dict[str, object]:
        """Heads share tiles where that is asked for, all of a group."""
        packed = () if totals == (0, 0) else (totals,)
        self.plan_arguments = (sizes, dtype, sm_margin, num_sms, *packed)
        packed_heads = sizes[1] // sizes[2] if pack_gqa == 1 else 1
        return self._plan("fwd", "forward", self.rows, sizes) | {"packed_heads": packed_heads}

    def backward_plan(
        self,
        sizes: Sequence[int],
        dtype: int,
        sm_margin: int,
        deterministic: bool,
        num_sms: int,
        totals: tuple[int, int] = (0, 0),
    ) -> dict[str, object]:
        packed = () if totals == (0, 0) else (totals,)
        self.backward_plans.append((sizes, dtype, sm_margin, deterministic, num_sms, *packed))
        return self._plan("bwd", "backward", self.backward_rows, sizes)

    def _plan(self, kind: str, direction: str, rows: Rows, sizes: Sequence[int]) -> dict[str, object]:
        assert len(sizes) == len(SIZES)
        head_dim, head_dim_v = sizes[5:7]
        fitting = [row for row in rows if row[0] >= head_dim and row[1] >= head_dim_v]
        if not fitting:
            built = ", ".join(f"{row}/{row_v}" for row, row_v in rows) or "none in this dtype"
            raise RuntimeError(
                f"no {direction} kernel was built for bf16 with head_dim {head_dim} and head_dim_v {head_dim_v} "
                f"(built, up to: {built})"
            )
        return self._row(kind, *min(fitting))

    def forward8_plan(
        self, sizes: Sequence[int], format: int, dtype: int, sm_margin: int, num_sms: int
    ) -> dict[str, object]:
        self.plan_arguments = (sizes, format, dtype, sm_margin, num_sms)
        return self._plan("fwd8", "8-bit forward", self.rows, sizes)

    def backward(self, *arguments: Any) -> None:
        call = self._unpack(BACKWARD_PARAMETERS, BACKWARD_TENSORS, arguments)
        call |= dict(zip(BACKWARD_ADDRESSES, call.pop("addresses"), strict=True))
        self.backward_calls.append(call)

    def forward(self, *arguments: Any) -> None:
        call = self._unpack(FORWARD_PARAMETERS, FORWARD_TENSORS, arguments)
        call |= dict(zip(FORWARD_ADDRESSES, call.pop("addresses"), strict=True))
        self.forward_calls.append(call)

    def _unpack(self, parameters: Sequence[str], tensors: Sequence[str], arguments: Sequence[Any]) -> dict[str, Any]:
        assert len(arguments) == len(parameters)
        call = dict(zip(parameters, arguments, strict=True))
        call |= dict(zip(SIZES, call.pop("sizes"), strict=True))
        for name, (address, *strides) in zip(tensors, call.pop("tensors"), strict=True):
            call[name] = address
            call[f"{name}_strides"] = tuple(strides)
        if self.error is not None:
            raise self.error
        return call

    def quantize(self, *arguments: Any) -> None:
        self.quantize_calls.append(dict(zip(QUANTIZE_PARAMETERS, arguments, strict=True)))

    def transpose_values(self, *arguments: Any) -> None:
        self.transpose_calls.append(dict(zip(TRANSPOSE_PARAMETERS, arguments, strict=True)))

    def prepare_forward(self, *arguments: float) -> Callable[..., None]:
        assert len(arguments) == len(PREPARE_PARAMETERS)
        self.prepared += 1
        prepared = dict(zip(PREPARE_PARAMETERS, arguments, strict=True))

        def call(*addresses: int) -> None:
            assert len(addresses) == len(CALL_PARAMETERS)
            if self.error is not None:
                raise self.error
            self.calls.append(prepared | dict(zip(CALL_PARAMETERS, addresses, strict=True)))

        return call


def install(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    """Pretend that CPU tensors are on a Hopper GPU of index -1 (what get_device() says of them)."""
    fake = FakeModule()
    fake.device = -1
    refuse = backends._static_refusal

    def static_refusal(
        device: torch.device, dtype: torch.dtype, head_dim: int, head_dim_v: int, is_backward: bool
    ) -> tuple[str | None, bool]:
        return refuse(torch.device("cuda", 0), dtype, head_dim, head_dim_v, is_backward)

    def new_workspace(index: int, spare_rows: int) -> hopper.Workspace:
        fake.workspaces += 1
        address = 1000 + fake.workspaces
        return torch.zeros(33, dtype=torch.int32), address, 5000 + address, spare_rows

    monkeypatch.setattr(hopper, "module", fake)
    monkeypatch.setattr(hopper, "load_error", "")
    monkeypatch.setattr(hopper, "_capabilities", {torch.device("cuda", 0): (9, 0)})
    monkeypatch.setattr(hopper, "_workspaces", {})
    monkeypatch.setattr(hopper, "_new_workspace", new_workspace)
    monkeypatch.setattr(backends, "_static_refusal", static_refusal)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: fake.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: fake.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132, name="fake H200")
    )
    backends.forget()
    return fake
