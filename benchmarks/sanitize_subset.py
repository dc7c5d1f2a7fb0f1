"""A few tiny problems through the C ABI, for compute-sanitizer: each kernel, both masks, ragged edges, GQA, forward and
backward, with and without a fixed order of additions; and through the compiled module packed sequences with a window,
softcap and sink, and 8-bit attention in both formats.

Inputs come from the CPU, so that the instrumented process launches little but the kernels under test.
"""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

import flashhopper
from benchmarks.abi import Library, Tensors
from benchmarks.peers import TORCH_DTYPES
from flashhopper.engine import hopper_fp8
from flashhopper.fp8 import Fp8QKV, emulate


class Case(NamedTuple):
    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int


FORWARD = (
    Case("bf16", 64, 64, True, 1, 2, 1, 130, 200),
    Case("bf16", 64, 64, False, 2, 1, 1, 65, 300),
    Case("fp16", 128, 128, True, 1, 2, 1, 200, 77),
    Case("bf16", 128, 128, False, 1, 2, 2, 129, 360),
    Case("bf16", 96, 96, True, 1, 1, 1, 150, 150),
    Case("bf16", 192, 128, True, 1, 1, 1, 130, 130),
    Case("fp16", 200, 200, False, 1, 1, 1, 70, 190),
    Case("bf16", 256, 256, True, 1, 1, 1, 140, 180),
    Case("bf16", 128, 128, True, 2, 14, 2, 20, 200),  # seven heads share a tile and leave rows of it unused
    Case("fp16", 64, 64, False, 1, 16, 2, 1, 300),
)
# (case, deterministic)
BACKWARD = (
    (Case("bf16", 64, 64, True, 1, 2, 1, 130, 200), False),
    (Case("fp16", 64, 64, False, 2, 2, 2, 65, 150), True),
    (Case("bf16", 96, 96, True, 1, 1, 1, 150, 150), False),
    (Case("bf16", 128, 128, True, 1, 4, 2, 200, 77), True),
    (Case("fp16", 128, 128, False, 1, 2, 1, 129, 190), False),
    (Case("bf16", 192, 128, True, 1, 1, 1, 130, 130), False),
    (Case("fp16", 192, 192, False, 1, 2, 1, 70, 190), True),
    (Case("bf16", 200, 200, True, 1, 1, 1, 100, 65), False),
    (Case("bf16", 256, 256, True, 1, 2, 2, 140, 180), True),
)
# (case, recipe): the kernel quantises and attends
EIGHT_BIT = (
    (Case("bf16", 128, 128, True, 1, 4, 2, 130, 200), flashhopper.Fp8Recipe.e4m3()),
    (Case("fp16", 64, 64, False, 2, 2, 1, 65, 300), flashhopper.Fp8Recipe.accurate()),
)
# Lengths of packed queries and keys: empty ones, part of a tile, several tiles; NaN behind each.
PACKED = ((0, 130, 1, 200, 0), (70, 0, 90, 300, 5))
BOUND, BOUND_8BIT = 2e-2, 4e-2  # max errors; 8 bits against the emulation, whose probabilities round at times otherwise


def library_path() -> Path:
    """The library beside the installed package, or the one named on the command line."""
    if len(sys.argv) > 1:
        return Path(sys.argv[1])
    spec = find_spec("flashhopper")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for found in Path(folder).rglob("libflashhopper*.so*"):
            return found
    raise SystemExit("no libflashhopper.so: install the package or name the library")


def _inputs(case: Case, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """q, k, v and dout on the CPU."""
    shapes = (
        (case.batch, case.seqlen_q, case.heads, case.head_dim),
        (case.batch, case.seqlen_k, case.kv_heads, case.head_dim),
        (case.batch, case.seqlen_k, case.kv_heads, case.head_dim_v),
        (case.batch, case.seqlen_q, case.heads, case.head_dim_v),
    )
    q, k, v, dout = (torch.randn(shape, generator=generator).to(TORCH_DTYPES[case.dtype]) for shape in shapes)
    return (q, k, v), dout


def _attend(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in float64, differentiable. Judged on the CPU: a comparison there launches nothing."""
    group = case.heads // case.kv_heads
    kt, vt = (x.double().repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    scores = q.double().transpose(1, 2) @ kt.transpose(2, 3) * case.head_dim**-0.5
    dead = torch.zeros(case.seqlen_q, 1, dtype=torch.bool)
    if case.causal:
        last_key = torch.arange(case.seqlen_q)[:, None] + case.seqlen_k - case.seqlen_q
        dead = last_key < 0  # finite scores and no weight: NaN would reach the gradients
        scores = scores.masked_fill((torch.arange(case.seqlen_k)[None] > last_key) & ~dead, -torch.inf)
    out = (scores.softmax(-1).masked_fill(dead, 0.0) @ vt).transpose(1, 2)
    return out, scores.logsumexp(-1).masked_fill(dead[:, 0], -torch.inf)


def _run_forward(library: Library, case: Case, generator: torch.Generator) -> float:
    inputs, _ = _inputs(case, generator)
    q, k, v = (x.cuda() for x in inputs)
    expected, expected_lse = _attend(case, *inputs)
    out = torch.full(expected.shape, float("nan"), dtype=q.dtype).cuda()
    lse = torch.full(expected_lse.shape, float("nan")).cuda()
    library.launch(library.params(q, k, v, out, lse, causal=case.causal))
    torch.cuda.synchronize()
    return (out.cpu().double() - expected).abs().max().item()


def _worst(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> float:
    """The largest error of gradients, against the largest element of each where that exceeds 1."""
    errors = [
        (mine.cpu().double() - right).abs().max().item() / max(1.0, right.abs().max().item())
        for mine, right in zip(found, expected, strict=True)
    ]
    return max(float("inf") if error != error else error for error in errors)  # NaN would not be the largest


def _run_backward(library: Library, case: Case, deterministic: bool, generator: torch.Generator) -> float:
    inputs, dout = _inputs(case, generator)
    leaves = [x.double().requires_grad_() for x in inputs]
    out, lse = _attend(case, *leaves)
    expected = torch.autograd.grad(out, leaves, dout.double())
    results = (out.detach().to(dout.dtype).contiguous().cuda(), lse.detach().float().contiguous().cuda())
    gradients = library.backward(
        dout.cuda(), *(x.cuda() for x in inputs), *results, causal=case.causal, deterministic=deterministic
    )
    torch.cuda.synchronize()
    return _worst(gradients, expected)


def _run_packed(dtype: str, head_dim: int, generator: torch.Generator) -> tuple[float, float]:
    """Errors of out and of the gradients; of each sequence, all rows but the last exist."""
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in PACKED)
    used_q, used_k = ((cu.diff() - 1).clamp_min(0).int() for cu in (cu_q, cu_k))
    shapes = ((int(cu_q[-1]), 4, head_dim), *[(int(cu_k[-1]), 2, head_dim)] * 2)
    q, k, v = (torch.randn(shape, generator=generator).to(TORCH_DTYPES[dtype]) for shape in shapes)
    dout, sink = torch.randn(shapes[0], generator=generator).to(q.dtype), torch.randn(4, generator=generator)
    leaves = [x.double().requires_grad_() for x in (q, k, v, sink)]
    options: dict[str, Any] = {"window_size": (100, 0), "softcap": 20.0}
    expected, _ = flashhopper.reference_attention(
        *leaves[:3],
        sink=leaves[3],
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        seqused_q=used_q,
        seqused_k=used_k,
        **options,
    )
    gradients = torch.autograd.grad(expected, leaves, dout.double())
    for x, cu in ((q, cu_q), (dout, cu_q), (k, cu_k), (v, cu_k)):
        x[cu[1:][cu.diff() > 0].long() - 1] = float("nan")
    longest = (max(PACKED[0]), max(PACKED[1]))
    used = {"seqused_q": used_q.cuda(), "seqused_k": used_k.cuda()}
    mine = [x.cuda().requires_grad_() for x in (q, k, v, sink)]
    with flashhopper.set_backend("hopper"):
        out = flashhopper.flash_attn_varlen_func(
            *mine[:3], cu_q.cuda(), cu_k.cuda(), *longest, sink=mine[3], **used, **options
        )
    assert isinstance(out, torch.Tensor)
    found = torch.autograd.grad(out, mine, dout.cuda())
    torch.cuda.synchronize()
    return (out.detach().cpu().double() - expected.detach()).abs().max().item(), _worst(found, gradients)


def _on_cpu(qkv: Fp8QKV) -> Fp8QKV:
    tensors: dict[str, Any] = {f.name: getattr(qkv, f.name) for f in fields(qkv)}
    moved: dict[str, Any] = {name: x.cpu() for name, x in tensors.items() if isinstance(x, torch.Tensor)}
    return replace(qkv, **moved)


def _run_8bit(case: Case, recipe: flashhopper.Fp8Recipe, generator: torch.Generator) -> tuple[float, float]:
    """Relative rmse of the values that the quantiser's data stand for, the worst of q, k, v; error of attention on them
    against the emulation."""
    inputs, _ = _inputs(case, generator)
    q, k, v = (x.cuda() for x in inputs)
    qkv = hopper_fp8.quantize(q, k, v, recipe)
    out, _ = hopper_fp8.forward(qkv, case.head_dim**-0.5, -1, 0 if case.causal else -1, 0)
    torch.cuda.synchronize()
    host = _on_cpu(qkv)
    expected, _ = emulate.attention(host, causal=case.causal)
    lost = [
        ((mine - x.double()).square().mean() / x.double().square().mean()).sqrt().item()
        for mine, x in zip(host.to_reference(), inputs, strict=True)
    ]
    return max(lost), (out.cpu().double() - expected.double()).abs().max().item()


def main() -> int:
    library = Library(library_path())
    generator = torch.Generator().manual_seed(0)
    results = [("forward", case, _run_forward(library, case, generator), BOUND) for case in FORWARD]
    for case, deterministic in BACKWARD:
        name = "deterministic backward" if deterministic else "backward"
        results.append((name, case, _run_backward(library, case, deterministic, generator), BOUND))
    if len(sys.argv) > 1:
        print("packed and 8-bit attention not run: they go through the installed module", flush=True)
    else:
        for dtype, head_dim in (("bf16", 64), ("fp16", 128), ("bf16", 256)):
            case = Case(dtype, head_dim, head_dim, True, len(PACKED[0]), 4, 2, sum(PACKED[0]), sum(PACKED[1]))
            error, gradient_error = _run_packed(dtype, head_dim, generator)
            results.append(("packed forward", case, error, BOUND))
            results.append(("packed backward", case, gradient_error, BOUND))
        for case, recipe in EIGHT_BIT:
            lost, error = _run_8bit(case, recipe, generator)
            results.append((f"quantise {recipe.qk_format}", case, lost, BOUND_8BIT))
            results.append((f"forward {recipe.qk_format}", case, error, BOUND_8BIT))
    wrong = 0
    for name, case, error, bound in results:
        wrong += not error < bound
        print(
            f"{name} {case.dtype} d{case.head_dim}/{case.head_dim_v} causal={case.causal}"
            f" H{case.heads}:{case.kv_heads} Sq{case.seqlen_q} Sk{case.seqlen_k}: error {error:.1e}",
            flush=True,
        )
    print(f"subset done, {wrong} wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
