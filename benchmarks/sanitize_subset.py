"""A few tiny problems through the C ABI, for compute-sanitizer: each kernel, both masks, ragged edges, GQA, a view.

Inputs come from the CPU, so that the instrumented process launches little but the kernels under test.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.abi import Library
from benchmarks.peers import TORCH_DTYPES

# dtype, head_dim, head_dim_v, causal, batch, heads, kv_heads, seqlen_q, seqlen_k
CASES = (
    ("bf16", 64, 64, True, 1, 2, 1, 130, 200),
    ("bf16", 64, 64, False, 2, 1, 1, 65, 300),
    ("fp16", 128, 128, True, 1, 2, 1, 200, 77),
    ("bf16", 128, 128, False, 1, 2, 2, 129, 360),
    ("bf16", 96, 96, True, 1, 1, 1, 150, 150),
    ("bf16", 192, 128, True, 1, 1, 1, 130, 130),
    ("fp16", 200, 200, False, 1, 1, 1, 70, 190),
    ("bf16", 256, 256, True, 1, 1, 1, 140, 180),
)


def library_path() -> Path:
    """The library beside the installed package, or the one named on the command line."""
    if len(sys.argv) > 1:
        return Path(sys.argv[1])
    spec = find_spec("flashhopper")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for found in Path(folder).rglob("libflashhopper*.so*"):
            return found
    raise SystemExit("no libflashhopper.so: install the package or name the library")


def main() -> int:
    library = Library(library_path())
    generator = torch.Generator().manual_seed(0)
    wrong = 0
    for dtype, head_dim, head_dim_v, causal, batch, heads, kv_heads, seqlen_q, seqlen_k in CASES:
        kind = TORCH_DTYPES[dtype]
        qkv = [
            torch.randn(batch, seqlen, count, width, generator=generator).to(kind)
            for seqlen, count, width in (
                (seqlen_q, heads, head_dim),
                (seqlen_k, kv_heads, head_dim),
                (seqlen_k, kv_heads, head_dim_v),
            )
        ]
        q, k, v = (x.cuda() for x in qkv)
        out = torch.full((batch, seqlen_q, heads, head_dim_v), float("nan"), dtype=kind).cuda()
        lse = torch.full((batch, heads, seqlen_q), float("nan")).cuda()
        library.launch(library.params(q, k, v, out, lse, causal=causal))
        torch.cuda.synchronize()
        # Judged on the CPU: a comparison there launches nothing.
        group = heads // kv_heads
        kt, vt = (x.double().repeat_interleave(group, 2).transpose(1, 2) for x in qkv[1:])
        scores = qkv[0].double().transpose(1, 2) @ kt.transpose(2, 3) * head_dim**-0.5
        if causal:
            hidden = torch.arange(seqlen_k)[None] > torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
            scores = scores.masked_fill(hidden, -torch.inf)
        expected = (scores.softmax(-1).nan_to_num(0.0) @ vt).transpose(1, 2)
        error = (out.cpu().double() - expected).abs().max().item()
        good = error < 2e-2
        wrong += not good
        print(
            f"{dtype} d{head_dim}/{head_dim_v} causal={causal} Sq{seqlen_q} Sk{seqlen_k}: error {error:.1e}", flush=True
        )
    print(f"subset done, {wrong} wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
