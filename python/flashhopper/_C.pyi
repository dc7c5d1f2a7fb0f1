"""Types of the compiled module: pybind11 over the C ABI of libflashhopper.so (flashhopper.h)."""

from typing import TypedDict

class ForwardPlan(TypedDict):
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
    flops: float
    bytes: float

class Environment(TypedDict):
    version: str
    cuda_runtime: int
    cuda_driver: int
    device_count: int
    tma_available: bool
    message: str

FP16: int
BF16: int

def version() -> str: ...
def environment() -> Environment: ...
def workspace_bytes() -> int: ...
def forward_configs() -> list[ForwardPlan]: ...
def forward_plan(
    batch: int,
    heads: int,
    kv_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    head_dim_v: int,
    window_left: int,
    window_right: int,
    dtype: int,
    sm_margin: int,
    num_sms: int,
) -> ForwardPlan: ...
def forward(
    q: int,
    k: int,
    v: int,
    out: int,
    lse: int,
    workspace: int,
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
    stream: int,
) -> None: ...
