"""The Hopper engine: from tensors to one call of the compiled module. Before it: ops.py; after it:
cpp/bindings/module.cpp.

The launch costs a few microseconds and the kernel may cost no more, so every line of PreparedForward.run is on the
host-time budget: no per-call import, no device synchronisation, positional arguments, one dictionary access for the
workspace. What does not depend on addresses is decided once and remembered.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
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

# What of a call decides everything but addresses and stream; ops.call_key makes it.
CallKey = tuple[object, ...]
MOST_REMEMBERED = 1024
# Holds numbers alone, no tensor. Threads may share it: each access is one dictionary operation, and a prepared forward
# never changes.
remembered: dict[CallKey, PreparedForward] = {}


def _load() -> tuple[ModuleType | None, str]:
    try:
        compiled = importlib.import_module("flashhopper._C")
    except Exception as error:  # ImportError, or whatever a broken library raises: kept, told by explain() and doctor
        return None, f"{type(error).__name__}: {error}"
    return compiled, ""


module, load_error = _load()


def layouts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
    """Shapes, strides, dtypes and devices, hashable; None for a tensor that has no strides."""
    try:
        sizes = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride())
    except RuntimeError:
        return None
    return sizes, q.dtype, k.dtype, v.dtype, q.get_device(), k.get_device(), v.get_device()


def _layout_reader() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]:
    exchange_api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # torch >= 2.10
    if exchange_api is None or not hasattr(module, "layout_reader"):
        return layouts
    return module.layout_reader(exchange_api) or layouts


read_layouts = _layout_reader()  # layouts(), at a third of its cost where torch and the compiled module offer it


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device, looked up once; None where no such device answers."""
    if device not in _capabilities:
        usable = torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
        _capabilities[device] = torch.cuda.get_device_capability(device) if usable else None
    return _capabilities[device]


def dtype_code(dtype: torch.dtype) -> int:
    """What the C ABI calls float16 and bfloat16."""
    return int(module.BF16 if dtype is torch.bfloat16 else module.FP16)


def pack_code(pack_gqa: bool | None) -> int:
    """What the C ABI calls None (where it pays), False and True."""
    return -1 if pack_gqa is None else int(pack_gqa)


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


def readable(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """x or a contiguous copy of it that TMA can read, and its batch, row and head strides."""
    batch_stride, row_stride, head_stride, last_stride = x.stride()
    # One test for the common case; whatever it rejects is looked at.
    if last_stride == 1 and not (batch_stride | row_stride | head_stride) & 7 and not x.data_ptr() & 15:
        return x, (batch_stride, row_stride, head_stride)
    if copy_reason(x) is not None:
        x = x.clone(memory_format=torch.contiguous_format)
        batch_stride, row_stride, head_stride, _ = x.stride()
    batch, rows, heads, head_dim = x.shape
    # The stride of a dimension of extent 1 is never used, but TMA validates it: pass a contiguous tensor's.
    if heads <= 1:
        head_stride = head_dim
    if rows <= 1:
        row_stride = heads * head_dim
    if batch <= 1:
        batch_stride = rows * heads * head_dim
    return x, (batch_stride, row_stride, head_stride)


def borrow_workspace(index: int, stream: int) -> Workspace:
    # Handles 1 and 2 name the legacy and the per-thread default stream: not one stream, or not one a process.
    # A graph may be replayed beside calls on any stream: it gets its own memory, from the graph's pool, zeroed in each
    # replay. 0 is the legacy default stream too, as torch names it; CUDA captures no graph on it, so it is not asked.
    if stream != 0 and (stream in (1, 2) or torch.cuda.is_current_stream_capturing()):
        return _new_workspace(index, 0)
    entry = _workspaces.get((index, stream))
    if entry is None:
        entry = _workspaces[(index, stream)] = _new_workspace(index, SPARE_ROWS)
    return entry


def _new_workspace(index: int, spare_rows: int) -> Workspace:
    words = -(-module.workspace_bytes() // 16) * 4
    tensor = torch.zeros(words + spare_rows, dtype=torch.int32, device=torch.device("cuda", index))
    return tensor, tensor.data_ptr(), tensor.data_ptr() + 4 * words, spare_rows


class PreparedForward:
    """A dense forward with all decided that sizes, strides, dtype, device and numbers decide; it holds no tensor.

    Args:
        q, strides: of readable tensors; strides are (batch, row, head) of q, k and v.
        numbers: softmax_scale, window_left, window_right, sm_margin, pack_gqa.
    """

    __slots__ = ("_call", "_index", "_is_like_q", "_lse_shape", "_numbers", "_out_shape", "_rows", "_sizes")

    def __init__(
        self,
        q: torch.Tensor,
        strides: tuple[int, ...],
        sizes: DenseShape,
        numbers: tuple[float, int, int, int, bool | None],
    ) -> None:
        batch, seqlen_q, heads, head_dim, seqlen_k, kv_heads, head_dim_v = sizes
        softmax_scale, window_left, window_right, sm_margin, pack_gqa = numbers
        self._sizes, self._numbers = sizes, numbers
        self._index = q.get_device()
        self._out_shape = (batch, seqlen_q, heads, head_dim_v)
        self._lse_shape = (batch, heads, seqlen_q)
        self._rows = batch * heads * seqlen_q
        out_row = heads * head_dim_v
        out_strides = (seqlen_q * out_row, out_row, head_dim_v)
        self._is_like_q = head_dim == head_dim_v and q.stride() == (*out_strides, 1)
        self._call: _C.ForwardCall = module.prepare_forward(
            *strides,
            *out_strides,
            *(batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v),
            *(window_left, window_right, softmax_scale, dtype_code(q.dtype), sm_margin, pack_code(pack_gqa)),
        )

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, needs_lse: bool, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launch on the current stream of q's device; out, where given, is contiguous. Results as of forward()."""
        q_address, k_address, v_address = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (q_address | k_address | v_address) & 15:
            return forward(q, k, v, self._sizes, *self._numbers, needs_lse, out=out)
        index = self._index
        if index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self.run(q, k, v, needs_lse, out)
        if out is None:  # empty_like is half the cost of new_empty
            out = torch.empty_like(q) if self._is_like_q else q.new_empty(self._out_shape)
        stream = torch._C._cuda_getCurrentRawStream(index)
        _, workspace, lse_address, spare_rows = borrow_workspace(index, stream)
        lse = None
        if needs_lse or self._rows > spare_rows:
            lse = q.new_empty(self._lse_shape, dtype=torch.float32)
            lse_address = lse.data_ptr()
        try:
            self._call(q_address, k_address, v_address, out.data_ptr(), lse_address, workspace, stream)
        except RuntimeError as error:
            plan = forward_plan(self._sizes, q.dtype, *self._numbers[1:], q.device)
            raise RuntimeError(f"{error}; plan: {plan}") from error
        return out, lse


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sizes: DenseShape,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    sm_margin: int,
    pack_gqa: bool | None,
    needs_lse: bool = True,
    key: CallKey | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the dense forward on the current stream of q's device.

    Args:
        q, k, v: float16 or bfloat16, (batch, seqlen, heads, head_dim), any strides.
        sizes: what checks.dense returned for them.
        key: under which to remember the preparation, if the call succeeds and needs no copies.
        out: contiguous memory for the result; an empty problem leaves it alone.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) of q's dtype, contiguous; lse float32 (batch, heads, seqlen_q), or
        None where it was not needed and not allocated.

    Raises:
        RuntimeError: a CUDA call failed; the message holds it and the plan.
    """
    batch, seqlen_q, heads, _, _, _, head_dim_v = sizes
    if is_empty(sizes):
        lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
        return q.new_empty((batch, seqlen_q, heads, head_dim_v)), lse
    readable_q, q_strides = readable(q)
    readable_k, k_strides = readable(k)
    readable_v, v_strides = readable(v)
    numbers = (softmax_scale, window_left, window_right, sm_margin, pack_gqa)
    prepared = PreparedForward(readable_q, (*q_strides, *k_strides, *v_strides), sizes, numbers)
    result = prepared.run(readable_q, readable_k, readable_v, needs_lse, out)
    if key is not None and readable_q is q and readable_k is k and readable_v is v:
        if len(remembered) >= MOST_REMEMBERED:
            remembered.clear()  # whatever is in use comes back at its next call
        remembered[key] = prepared
    return result


def is_empty(sizes: DenseShape) -> bool:
    """Whether a forward has no output element."""
    batch, seqlen_q, heads, *_ = sizes
    return batch * seqlen_q * heads == 0


def problem(sizes: DenseShape, window_left: int, window_right: int) -> _C.Sizes:
    """Sizes and window in the order of the compiled module."""
    batch, seqlen_q, heads, head_dim, seqlen_k, kv_heads, head_dim_v = sizes
    return batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v, window_left, window_right


def forward_plan(
    sizes: DenseShape,
    dtype: torch.dtype,
    window_left: int,
    window_right: int,
    sm_margin: int,
    pack_gqa: bool | None,
    device: torch.device,
    totals: tuple[int, int] = (0, 0),
) -> _C.Plan:
    """What the compiled module would launch for these sizes; totals: rows of q and k of a packed batch."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    plan: _C.Plan = module.forward_plan(
        problem(sizes, window_left, window_right), dtype_code(dtype), sm_margin, num_sms, totals, pack_code(pack_gqa)
    )
    return plan
