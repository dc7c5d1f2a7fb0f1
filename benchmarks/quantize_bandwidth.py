"""Bytes per second of the quantiser beside a device copy, in one run:  python -m benchmarks.quantize_bandwidth

Bytes are those that must move: 16-bit tensors read once (K and V once more for each mean), 8-bit tensors, scales, means
and lse shifts written. The copy reads and writes as many bytes as q, k and v hold.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import timing
from flashhopper.engine import hopper_quantize

RECIPES: dict[str, dict[str, object]] = {
    "plain": {},
    "paper": {"rotate": True},
    "e4m3": {"smooth_k": True},
    "e4m3 centred": {"smooth_k": True, "center_v": True},
    "accurate": {"qk_format": "int8", "smooth_k": True, "center_v": True, "rotate": True, "q_block": 1},
}
TOKENS, WIDTH = 32768, 2048  # batch * seqlen, heads * head_dim


@dataclass
class Row:
    """One line of the result; rates in TB/s."""

    head_dim: int
    recipe: str
    megabytes: float
    microseconds: float
    rate: float
    copy_rate: float

    @property
    def share(self) -> float:
        return self.rate / self.copy_rate


def bytes_moved(inputs: list[torch.Tensor], outputs: hopper_quantize.Quantized) -> int:
    read = sum(x.nbytes for x in inputs)
    read += inputs[1].nbytes * (outputs.k_mean is not None) + inputs[2].nbytes * (outputs.v_mean is not None)
    return read + sum(x.nbytes for x in outputs if x is not None)


def measure(head_dim: int, seqlen: int, rounds: int) -> list[Row]:
    heads = WIDTH // head_dim
    shape = (TOKENS // seqlen, seqlen, heads, head_dim)
    inputs = [torch.randn(shape, device="cuda").bfloat16() for _ in range(3)]
    signs = torch.ones(hopper_quantize.computed_head_dim(head_dim), device="cuda")
    source = torch.stack(inputs)
    target = torch.empty_like(source)

    def call(options: dict[str, object]) -> Callable[[], hopper_quantize.Quantized]:
        rest = {name: value for name, value in options.items() if name != "rotate"}
        chosen = signs if options.get("rotate") else None
        return lambda: hopper_quantize.quantize(*inputs, signs=chosen, **rest)  # type: ignore[arg-type]

    calls = {name: call(options) for name, options in RECIPES.items()}
    sizes = {name: bytes_moved(inputs, one()) for name, one in calls.items()}
    contenders = [timing.Contender("copy", lambda: target.copy_(source))]
    contenders += [timing.Contender(name, one) for name, one in calls.items()]
    timing.measure(contenders, rounds)
    for one in contenders:
        if one.error is not None:
            raise RuntimeError(f"{one.name}: {one.error}")
    copy_rate = 2 * source.nbytes / contenders[0].median_ms / 1e9
    return [
        Row(
            head_dim,
            one.name,
            sizes[one.name] / 1e6,
            one.median_ms * 1e3,
            sizes[one.name] / one.median_ms / 1e9,
            copy_rate,
        )
        for one in contenders[1:]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 96, 128, 192, 256])
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    print(f"{'head_dim':>8} {'recipe':14} {'MB':>8} {'us':>8} {'TB/s':>6} {'copy':>6} {'share':>6}")
    for head_dim in arguments.head_dims:
        for row in measure(head_dim, arguments.seqlen, arguments.rounds):
            rows.append(row)
            print(
                f"{row.head_dim:8} {row.recipe:14} {row.megabytes:8.1f} {row.microseconds:8.1f} {row.rate:6.2f} "
                f"{row.copy_rate:6.2f} {row.share:6.2f}",
                flush=True,
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
