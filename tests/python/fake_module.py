"""A stand-in for the compiled module and for the CUDA calls around it, so that the plumbing is tested where there is
no GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flashhopper import backends
from flashhopper.engine import hopper

# The parameters of _C.forward, in order (python/flashhopper/_C.pyi).
FORWARD_PARAMETERS = (
    *("q", "k", "v", "out", "lse", "workspace"),
    *("q_batch_stride", "q_row_stride", "q_head_stride"),
    *("k_batch_stride", "k_row_stride", "k_head_stride"),
    *("v_batch_stride", "v_row_stride", "v_head_stride"),
    *("out_batch_stride", "out_row_stride", "out_head_stride"),
    *("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"),
    *("window_left", "window_right", "softmax_scale", "dtype", "sm_margin", "stream"),
)


class FakeModule:
    """Records the calls; head sizes as in the real table."""

    FP16, BF16 = 0, 1
    rows = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))

    def __init__(self) -> None:
        self.calls: list[dict[str, float]] = []
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

    def forward_configs(self) -> list[dict[str, object]]:
        return [self._row(d, dv) for d, dv in self.rows]

    def _row(self, head_dim: int, head_dim_v: int) -> dict[str, object]:
        numbers = {"tile_m": 128, "tile_n": 160, "stages": 2, "q_stages": 1, "consumer_warpgroups": 2, "threads": 384}
        registers = {"producer_registers": 24, "consumer_registers": 240, "smem_bytes": 200000}
        work = {"grid": 132, "tiles": 64, "flops": 1.0, "bytes": 2.0}
        config = f"fwd_hd{head_dim}_m128_n160"
        return {"config": config, "head_dim": head_dim, "head_dim_v": head_dim_v, **numbers, **registers, **work}

    def forward_plan(self, *arguments: int) -> dict[str, object]:
        assert len(arguments) == 12
        self.plan_arguments = arguments
        head_dim, head_dim_v = arguments[5:7]
        fitting = [row for row in self.rows if row[0] >= head_dim and row[1] >= head_dim_v]
        if not fitting:
            built = ", ".join(f"{row}/{row_v}" for row, row_v in self.rows)
            raise RuntimeError(
                f"no kernel was built for bf16 with head_dim {head_dim} and head_dim_v {head_dim_v} "
                f"(built, up to: {built})"
            )
        return self._row(*min(fitting))

    def forward(self, *arguments: float) -> None:
        assert len(arguments) == len(FORWARD_PARAMETERS)
        if self.error is not None:
            raise self.error
        self.calls.append(dict(zip(FORWARD_PARAMETERS, arguments, strict=True)))


def install(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    """Pretend that CPU tensors are on a Hopper GPU of index -1 (what get_device() says of them)."""
    fake = FakeModule()
    fake.device = -1
    refuse = backends._static_refusal

    def static_refusal(
        device: torch.device, dtype: torch.dtype, head_dim: int, head_dim_v: int
    ) -> tuple[str | None, bool]:
        return refuse(torch.device("cuda", 0), dtype, head_dim, head_dim_v)

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
