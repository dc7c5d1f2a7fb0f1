"""Attends over the activations of a real model with every engine that this machine has, and prints accuracy and speed.

    python examples/demo.py [--data FILE.safetensors] [--device cpu|cuda]

Q, K and V come from three layers of Gemma 3 270M on real text (tests/data). Accuracy is against float64 on the same
bf16 inputs, beside torch's scaled_dot_product_attention; speed is the median call on these activations and on a longer
random sequence of the same shape.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import flashhopper
from flashhopper.testing import Inputs, LlmLayer, error_metrics, load_llm_layers, make_inputs

DATA = Path(__file__).resolve().parent.parent / "tests/data/gemma3_270m_qkv_slice.safetensors"
SECONDS_PER_TIMING = 1.0
Attend = Callable[[LlmLayer], torch.Tensor]


def with_backend(backend: str) -> Attend:
    def attend(layer: LlmLayer) -> torch.Tensor:
        with flashhopper.set_backend(backend):
            return flashhopper.flash_attn_func(
                *layer.inputs, softmax_scale=layer.softmax_scale, causal=True, window_size=layer.window_size
            )

    return attend


def torch_sdpa(layer: LlmLayer) -> torch.Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in layer.inputs)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)


def engines(device: torch.device) -> dict[str, Attend]:
    """What can run on this device, torch's own attention last: it is what the others are compared with."""
    found = {}
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        found["hopper"] = with_backend("hopper")
    found["tiled"] = with_backend("tiled")
    found["torch SDPA"] = torch_sdpa
    return found


def median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median time of a call, device time included, over at least 5 calls and about SECONDS_PER_TIMING."""

    def once() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()
    repeats = max(5, min(200, int(SECONDS_PER_TIMING / max(once(), 1e-9))))
    return statistics.median(once() for _ in range(repeats))


def causal_flops(inputs: Inputs) -> float:
    """Two GEMMs over the scores that a causal mask keeps, for equal numbers of queries and keys."""
    batch, seqlen, heads, head_dim = inputs.q.shape
    return 2 * batch * heads * (seqlen * (seqlen + 1) / 2) * (head_dim + inputs.v.shape[-1])


def accuracy_table(layers: list[LlmLayer], attends: dict[str, Attend]) -> Table:
    table = Table(title="Error against float64 on the same inputs (hopper, tiled: flashhopper's engines)")
    for column in ("layer", "engine", "rmse", "relative rmse", "max error"):
        table.add_column(column, justify="left" if column in ("layer", "engine") else "right")
    for layer in layers:
        reference, _ = flashhopper.reference_attention(
            *layer.inputs, softmax_scale=layer.softmax_scale, causal=True, window_size=layer.window_size
        )
        for name, attend in attends.items():
            error = error_metrics(attend(layer), reference)
            table.add_row(layer.name, name, f"{error.rmse:.2e}", f"{error.relative_rmse:.2e}", f"{error.max_error:.2e}")
        table.add_section()
    return table


def speed_table(workloads: list[LlmLayer], attends: dict[str, Attend], device: torch.device) -> Table:
    table = Table(title="Speed, causal forward")
    for column in ("input", "engine", "ms", "GFLOP/s", "against SDPA"):
        table.add_column(column, justify="left" if column in ("input", "engine") else "right")
    for layer in workloads:
        seconds = {name: median_seconds(lambda a=a, w=layer: a(w), device) for name, a in attends.items()}
        for name, value in seconds.items():
            speed = causal_flops(layer.inputs) / value / 1e9
            ratio = seconds["torch SDPA"] / value
            table.add_row(layer.name, name, f"{value * 1e3:.3f}", f"{speed:,.1f}", f"{ratio:.2f}x")
        table.add_section()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="layers stored as NAME.q, NAME.k, NAME.v")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    layers = sorted(load_llm_layers(args.data, device=device), key=lambda layer: (len(layer.name), layer.name))
    attends = engines(device)

    console = Console()
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    q, k, _ = layers[0].inputs
    console.print(f"flashhopper {flashhopper.__version__}, torch {torch.__version__}, {where}")
    console.print(f"{args.data.name}: {len(layers)} layers, q {tuple(q.shape)}, k and v {tuple(k.shape)}, {q.dtype}\n")
    with torch.inference_mode():
        console.print(accuracy_table(layers, attends))
        longer = make_inputs(
            "normal",
            seqlen_q=16384 if device.type == "cuda" else 2048,
            heads=q.shape[2],
            kv_heads=k.shape[2],
            head_dim=q.shape[3],
            device=device,
        )
        random = LlmLayer(f"random, {longer.q.shape[1]} tokens", longer, layers[0].softmax_scale, (-1, 0))
        real = layers[0]._replace(name=f"{layers[0].name}, {q.shape[1]} tokens")
        console.print(speed_table([real, random], attends, device))


if __name__ == "__main__":
    main()
