"""Seeded input families and error metrics that tests, benchmarks and reports share. Before it: the caller; after it:
nothing.

The families are those of the accuracy study: what breaks an attention kernel is rarely N(0, 1). Same arguments, device
type and torch release give the same tensors.
"""

from __future__ import annotations

import json
import os
from typing import NamedTuple

import torch

FAMILIES: tuple[str, ...] = ("normal", "outlier", "kbias", "vmean", "peaky")

_SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Inputs(NamedTuple):
    """One attention problem's tensors, (batch, seqlen, heads, head_dim) each."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class ErrorMetrics(NamedTuple):
    """Distance of an output from its float64 reference."""

    rmse: float
    relative_rmse: float  # rmse / rms(reference)
    max_error: float
    cosine: float


class LlmLayer(NamedTuple):
    """Activations of one layer of a real model, after rotary embedding and q/k norm."""

    name: str
    inputs: Inputs
    softmax_scale: float
    window_size: tuple[int, int]  # (left, right); (-1, 0) is plain causal


def make_inputs(
    family: str,
    *,
    batch: int = 1,
    seqlen_q: int = 2048,
    seqlen_k: int | None = None,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Inputs:
    """Draw q, k, v of a named family.

    Args:
        family: one of FAMILIES. `normal`: N(0, 1). `outlier`: N(0, 1) + N(0, 100) on one element in a thousand (the
            FlashAttention-3 paper's). `kbias`: K with a per-channel offset 3 N(0, 1), four channels 12 higher.
            `vmean`: V = 1 + 0.1 N(0, 1). `peaky`: Q doubled, every 997th key aligned with the first query of its head
            group.
        seqlen_k, kv_heads, head_dim_v: default to seqlen_q, heads, head_dim.
        dtype: of the result; values are drawn in float32 (float64 for float64).

    Returns:
        q (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, kv_heads, head_dim), v (batch, seqlen_k, kv_heads,
        head_dim_v).
    """
    if family not in FAMILIES:
        raise ValueError(
            f"family is {family!r}: must be one of {', '.join(FAMILIES)}; "
            "real activations come from load_llm_layers(path)"
        )
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    kv_heads = heads if kv_heads is None else kv_heads
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    compute = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=compute)

    def draw(*shape: int) -> torch.Tensor:
        x = normal(*shape)
        if family != "outlier":
            return x
        hit = torch.rand(shape, generator=generator, device=device, dtype=compute) < 1e-3
        return x.add_(normal(*shape).mul_(10.0).mul_(hit))

    q = draw(batch, seqlen_q, heads, head_dim)
    k = draw(batch, seqlen_k, kv_heads, head_dim)
    v = draw(batch, seqlen_k, kv_heads, head_dim_v)
    if family == "kbias":
        offset = 3.0 * normal(1, 1, kv_heads, head_dim)
        offset[..., :4] += 12.0
        k += offset
    elif family == "vmean":
        v.mul_(0.1).add_(1.0)
    elif family == "peaky":
        if seqlen_q > 0 and kv_heads > 0:
            k[:, ::997] = q[:, :1, :: heads // kv_heads]
        q.mul_(2.0)
    return Inputs(q.to(dtype), k.to(dtype), v.to(dtype))


def load_safetensors(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read a safetensors file into CPU tensors and its metadata, with nothing but the standard library."""
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
        data = bytearray(file.read())
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        dtype = _SAFETENSORS_DTYPES.get(entry["dtype"])
        if dtype is None:
            known = ", ".join(_SAFETENSORS_DTYPES)
            raise ValueError(f"{os.fspath(path)}: tensor {name} has dtype {entry['dtype']}, must be one of {known}")
        begin, end = entry["data_offsets"]
        count = (end - begin) // dtype.itemsize
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=begin) if count else torch.empty(0, dtype=dtype)
        tensors[name] = flat.reshape(entry["shape"])
    return tensors, metadata


def load_llm_layers(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    softmax_scale: float | None = None,
    windows: dict[str, int] | None = None,
) -> list[LlmLayer]:
    """The `llm` family: layers stored as `NAME.q`, `NAME.k`, `NAME.v` of shape (batch, seqlen, heads, head_dim) in a
    safetensors file.

    Args:
        dtype: of the result; default as stored.
        softmax_scale: default the file's metadata `softmax_scale`, else 1 / sqrt(head_dim).
        windows: layer name -> number of keys a sliding-window layer sees (itself included); default the file's
            metadata key `windows` (JSON), else every layer is plain causal.
    """
    tensors, metadata = load_safetensors(path)
    if windows is None:
        windows = json.loads(metadata.get("windows", "{}"))
    layers = []
    for name in sorted({key.rpartition(".")[0] for key in tensors}):
        missing = [part for part in "qkv" if f"{name}.{part}" not in tensors]
        if missing:
            raise ValueError(
                f"{os.fspath(path)}: layer {name!r} lacks {', '.join(f'{name}.{part}' for part in missing)}"
            )
        q, k, v = (tensors[f"{name}.{part}"].to(device=device, dtype=dtype) for part in "qkv")
        scale = (
            softmax_scale if softmax_scale is not None else float(metadata.get("softmax_scale", q.shape[-1] ** -0.5))
        )
        window = windows.get(name)
        layers.append(LlmLayer(name, Inputs(q, k, v), scale, (-1 if window is None else window - 1, 0)))
    return layers


def error_metrics(out: torch.Tensor, ref: torch.Tensor) -> ErrorMetrics:
    """Compare `out` with a reference of the same shape, in float64; NaN in `out` gives NaN metrics."""
    if out.shape != ref.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, ref has {tuple(ref.shape)}: must be equal")
    if out.numel() == 0:
        return ErrorMetrics(0.0, 0.0, 0.0, 1.0)
    a, b = out.detach().double().flatten(), ref.detach().to(out.device).double().flatten()
    difference = a - b
    rmse = difference.square().mean().sqrt()
    rms = b.square().mean().sqrt()
    norms = a.norm() * b.norm()
    both_zero = bool((a.norm() == 0) & (b.norm() == 0))
    cosine = 1.0 if both_zero else float(torch.dot(a, b) / norms) if bool(norms != 0) else 0.0
    relative = float(rmse / rms) if bool(rms > 0) else (0.0 if bool(rmse == 0) else float("inf"))
    return ErrorMetrics(float(rmse), relative, float(difference.abs().max()), cosine)
