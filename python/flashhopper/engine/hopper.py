"""The Hopper engine: from tensors to one call of the compiled module. Before it: ops.py; after it:
cpp/bindings/module.cpp.

The launch costs a few microseconds and the kernel may cost no more, so every line here is on the host-time budget: no
per-call import, no device synchronisation, positional arguments, one dictionary access for the workspace.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from ..checks import DenseShape

if TYPE_CHECKING:
    from .. import _C

module: Any = None  # flashhopper._C, or None where it does not load
load_error = ""

# A zeroed int32 tensor; its address; the address and length of a spare part of it, float32 rows. A call whose lse
# nobody wants writes it there, for allocating it would cost as much as all checks together.
Workspace = tuple[torch.Tensor, int, int, int]
SPARE_ROWS = 1 << 18  # 1 MiB: where rows are many, the allocation's cost is nothing

# One a (device index, stream). The kernel leaves it zero, so calls on one stream share it, and calls on different
# streams, which may overlap, do not.
_workspaces: dict[tuple[int, int], Workspace] = {}
_capabilities: dict[torch.device, tuple[int, int] | None] = {}


def _load() -> tuple[ModuleType | None, str]:
    try:
        compiled = importlib.import_module("flashhopper._C")
    except Exception as error:  # ImportError, or whatever a broken library raises: kept, told by explain() and doctor
        return None, f"{type(error).__name__}: {error}"
    return compiled, ""


module, load_error = _load()


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device, looked up once; None where no such device answers."""
    if device not in _capabilities:
        usable = torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
        _capabilities[device] = torch.cuda.get_device_capability(device) if usable else None
    return _capabilities[device]


def dtype_code(dtype: torch.dtype) -> int:
    """What the C ABI calls float16 and bfloat16."""
    return int(module.BF16 if dtype is torch.bfloat16 else module.FP16)


def copy_reason(x: torch.Tensor) -> str | None:
    """Why TMA cannot read this tensor (batch, seqlen, heads, head_dim) where it lies; None when it can."""
    if x.stride(3) != 1:
        return f"head_dim stride {x.stride(3)} is not 1"
    for dim, name in ((1, "row"), (2, "head"), (0, "batch")):
        if x.shape[dim] > 1 and x.stride(dim) % 8 != 0:
            return f"{name} stride {x.stride(dim) * x.element_size()} bytes is not a multiple of 16"
    if x.numel() > 0 and x.data_ptr() % 16 != 0:
        return "its address is not a multiple of 16 bytes"
    return None


def _readable(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """x or a contiguous copy of it that TMA can read, and its batch, row and head strides."""
    if copy_reason(x) is not None:
        x = x.clone(memory_format=torch.contiguous_format)
    _, rows, heads, head_dim = x.shape
    batch_stride, row_stride, head_stride, _ = x.stride()
    # The stride of a dimension of extent 1 is never used, but TMA validates it: pass a contiguous tensor's.
    if heads <= 1:
        head_stride = head_dim
    if rows <= 1:
        row_stride = heads * head_dim
    if x.shape[0] <= 1:
        batch_stride = rows * heads * head_dim
    return x, (batch_stride, row_stride, head_stride)


def _workspace(index: int, stream: int) -> Workspace:
    # Handles 1 and 2 name the legacy and the per-thread default stream: not one stream, or not one a process.
    if stream in (1, 2):
        return _new_workspace(index, 0)
    if torch.cuda.is_current_stream_capturing():
        # A graph may be replayed beside calls on any stream: it gets its own memory, from the graph's pool, zeroed in
        # each replay.
        return _new_workspace(index, 0)
    entry = _workspaces.get((index, stream))
    if entry is None:
        entry = _workspaces[(index, stream)] = _new_workspace(index, SPARE_ROWS)
    return entry


def _new_workspace(index: int, spare_rows: int) -> Workspace:
    words = -(-module.workspace_bytes() // 16) * 4
    tensor = torch.zeros(words + spare_rows, dtype=torch.int32, device=torch.device("cuda", index))
    return tensor, tensor.data_ptr(), tensor.data_ptr() + 4 * words, spare_rows


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sizes: DenseShape,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    sm_margin: int,
    needs_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the dense forward on the current stream of q's device.

    Args:
        q, k, v: float16 or bfloat16, (batch, seqlen, heads, head_dim), any strides.
        sizes: what checks.dense returned for them.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) of q's dtype, contiguous; lse float32 (batch, heads, seqlen_q), or
        None where it was not needed and not allocated.

    Raises:
        RuntimeError: a CUDA call failed; the message holds it and the plan.
    """
    index = q.get_device()
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            return forward(q, k, v, sizes, softmax_scale, window_left, window_right, sm_margin, needs_lse)
    batch, seqlen_q, heads, head_dim, seqlen_k, kv_heads, head_dim_v = sizes
    if head_dim == head_dim_v:  # half the cost of new_empty
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    else:
        out = q.new_empty((batch, seqlen_q, heads, head_dim_v))
    rows = batch * heads * seqlen_q
    if rows == 0:
        return out, q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    q_address, k_address, v_address = q.data_ptr(), k.data_ptr(), v.data_ptr()
    q_batch, q_row, q_head, q_last = q.stride()
    k_batch, k_row, k_head, k_last = k.stride()
    v_batch, v_row, v_head, v_last = v.stride()
    # One test for the common case; whatever it rejects is looked at tensor by tensor.
    if (
        (q_batch | q_row | q_head | k_batch | k_row | k_head | v_batch | v_row | v_head) & 7
        or (q_address | k_address | v_address) & 15
        or q_last != 1
        or k_last != 1
        or v_last != 1
    ):
        q, (q_batch, q_row, q_head) = _readable(q)
        k, (k_batch, k_row, k_head) = _readable(k)
        v, (v_batch, v_row, v_head) = _readable(v)
        q_address, k_address, v_address = q.data_ptr(), k.data_ptr(), v.data_ptr()
    stream = torch._C._cuda_getCurrentRawStream(index)
    _, workspace, lse_address, spare_rows = _workspace(index, stream)
    lse = None
    if needs_lse or rows > spare_rows:
        lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
        lse_address = lse.data_ptr()
    dtype = dtype_code(q.dtype)
    out_row = heads * head_dim_v
    # fmt: off
    try:
        module.forward(
            q_address, k_address, v_address, out.data_ptr(), lse_address, workspace,
            q_batch, q_row, q_head,
            k_batch, k_row, k_head,
            v_batch, v_row, v_head,
            seqlen_q * out_row, out_row, head_dim_v,
            batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v,
            window_left, window_right, softmax_scale, dtype, sm_margin, stream,
        )
    except RuntimeError as error:
        plan = forward_plan(sizes, q.dtype, window_left, window_right, sm_margin, q.device)
        raise RuntimeError(f"{error}; plan: {plan}") from error
    # fmt: on
    return out, lse


def forward_plan(
    sizes: DenseShape,
    dtype: torch.dtype,
    window_left: int,
    window_right: int,
    sm_margin: int,
    device: torch.device,
) -> _C.ForwardPlan:
    """What the compiled module would launch for these sizes."""
    batch, seqlen_q, heads, head_dim, seqlen_k, kv_heads, head_dim_v = sizes
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    plan: _C.ForwardPlan = module.forward_plan(
        batch,
        heads,
        kv_heads,
        seqlen_q,
        seqlen_k,
        head_dim,
        head_dim_v,
        window_left,
        window_right,
        dtype_code(dtype),
        sm_margin,
        num_sms,
    )
    return plan
