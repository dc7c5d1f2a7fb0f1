"""Types of the compiled module: pybind11 over the C ABI of libflashhopper.so (flashhopper.h)."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypedDict

import torch

class Plan(TypedDict):
    config: str
    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    stages: int
    q_stages: int
    consumer_warpgroups: int
    threads: int
    producer_registers: int
    consumer_registers: int
    smem_bytes: int
    grid: int
    tiles: int
    workspace_bytes: int
    cluster: int
    flops: float
    bytes: float
    packed_heads: int

class ForwardCall(Protocol):
    """A builtin function: the addresses of one call, in bytes, and its cudaStream_t."""

    def __call__(self, q: int, k: int, v: int, out: int, lse: int, workspace: int, stream: int, /) -> None: ...

class Environment(TypedDict):
    version: str
    cuda_runtime: int
    cuda_driver: int
    device_count: int
    tma_available: bool
    message: str

# batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v, window_left, window_right
Sizes = tuple[int, int, int, int, int, int, int, int, int]

FP16: int
BF16: int
E4M3: int
INT8: int

def version() -> str: ...
def environment() -> Environment: ...
def workspace_bytes() -> int: ...
def forward_configs() -> list[Plan]: ...
def backward_configs() -> list[Plan]: ...
def packed_workspace_bytes(batch: int, total_q: int) -> int: ...
def forward_plan(
    sizes: Sizes,
    dtype: int,
    sm_margin: int,
    num_sms: int,
    totals: tuple[int, int] = (0, 0),  # rows of q and k of a packed batch
    pack_gqa: int = -1,
) -> Plan: ...
def forward(
    tensors: Sequence[tuple[int, int, int, int]],  # q, k, v, out: address; batch, row, head stride
    # lse, workspace, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, packed_workspace; 0: the call has none
    addresses: Sequence[int],
    sizes: Sizes,  # of a packed batch the longest sequences
    totals: tuple[int, int],  # rows of q and k of a packed batch, else 0
    softmax_scale: float,
    softcap: float,
    dtype: int,
    sm_margin: int,
    pack_gqa: int,  # -1 where it pays, 0 never, 1 always
    stream: int,
    /,
) -> None: ...
def backward_plan(
    sizes: Sizes,
    dtype: int,
    sm_margin: int,
    deterministic: bool,
    num_sms: int,
    totals: tuple[int, int] = (0, 0),  # rows of q and k of a packed batch
) -> Plan: ...
def backward(
    tensors: Sequence[tuple[int, int, int, int]],  # q, k, v, out, dout, dq, dk, dv: address; batch, row, head stride
    # lse, dlse, sink, dsink, workspace, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k; 0: the call has none
    addresses: Sequence[int],
    sizes: Sizes,  # of a packed batch the longest sequences
    totals: tuple[int, int],  # rows of q and k of a packed batch, else 0
    softmax_scale: float,
    softcap: float,
    dtype: int,
    sm_margin: int,
    deterministic: bool,
    stream: int,
    /,
) -> None: ...
def forward8_configs() -> list[Plan]: ...
def forward8_plan(sizes: Sizes, format: int, dtype: int, sm_margin: int, num_sms: int) -> Plan: ...
def forward8(
    addresses: Sequence[int],  # q, k, v, q_scale, k_scale, v_scale, lse_shift, v_mean; 0: the recipe has none
    out: tuple[int, int, int, int],  # address; batch, row, head stride
    lse: int,
    workspace: int,
    sizes: Sizes,
    columns: tuple[int, int],  # of q and k as stored, of v as stored
    keys: int,  # of v as stored
    blocks: tuple[int, int, int],  # rows of one scale of q, k, v; 0: one scale for a head
    format: int,  # E4M3 or INT8
    dtype: int,  # of out: FP16 or BF16
    softmax_scale: float,
    sm_margin: int,
    # addresses of cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, packed_workspace; 0: the call has none
    offsets: tuple[int, int, int, int, int],
    totals: tuple[int, int],  # rows of q and k of a packed batch, else 0
    stream: int,
    /,
) -> None: ...
def quantize(
    tensors: Sequence[tuple[int, int, int, int]],  # q, k, v: address; batch, row, head stride
    outputs: Sequence[int],  # q8, k8, v8, q_scale, k_scale, v_scale, lse_shift, k_mean, v_mean; 0: not wanted
    signs: int,  # of float32 (columns,); 0: no rotation
    sizes: Sizes,  # the window is not read
    columns: tuple[int, int],  # computed head dimensions
    dtype: int,
    format: int,
    flags: int,  # 1 rotate, 2 smooth_k, 4 center_v, 8 power_scales
    blocks: tuple[int, int],  # rows of one scale of q; columns of one Hadamard matrix, 0: as many as there are
    offsets: tuple[int, int, int, int, int],  # as forward8's; the last is not read
    totals: tuple[int, int],  # rows of q and k of a packed batch, else 0
    stream: int,
    /,
) -> None: ...
def transpose_values(
    v: tuple[int, int, int, int],  # address; batch, row, head stride in bytes
    v8: int,
    batch: int,
    kv_heads: int,
    seqlen_k: int,
    head_dim_v: int,
    stream: int,
    /,
) -> None: ...
def prepare_forward(
    # strides in elements: batch, row, head of each tensor
    q_batch_stride: int,
    q_row_stride: int,
    q_head_stride: int,
    k_batch_stride: int,
    k_row_stride: int,
    k_head_stride: int,
    v_batch_stride: int,
    v_row_stride: int,
    v_head_stride: int,
    out_batch_stride: int,
    out_row_stride: int,
    out_head_stride: int,
    batch: int,
    heads: int,
    kv_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    head_dim_v: int,
    window_left: int,
    window_right: int,
    softmax_scale: float,
    dtype: int,
    sm_margin: int,
    pack_gqa: int,
    /,
) -> ForwardCall: ...
def layout_reader(exchange_api: object, /) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bytes | None] | None:
    """From torch.Tensor.__dlpack_c_exchange_api__; None where it is of another version."""
