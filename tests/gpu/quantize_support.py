"""What the quantiser's tests share: problems, runs, and what plain torch operations make of them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from gpu_support import judged

from flashhopper.engine.hopper_quantize import Numbers, Quantized, quantize
from flashhopper.fp8.formats import computed_head_dims, sampled_rows

E4M3 = torch.float8_e4m3fn
HADAMARD = {64: 64, 96: 32, 128: 128, 192: 64, 256: 256}
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A problem and the numbers of a recipe."""

    batch: int = 2
    seqlen_q: int = 200
    seqlen_k: int = 333
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    head_dim_v: int = 128
    dtype: torch.dtype = torch.bfloat16
    qk_format: str = "e4m3"
    rotate: bool = False
    smooth_k: bool = False
    center_v: bool = False
    q_block: int = 128
    rotate_block: int = 0
    power_scales: bool = False

    def __str__(self) -> str:
        flags = "".join(name[0] for name in ("rotate", "smooth_k", "center_v", "power_scales") if getattr(self, name))
        sizes = f"b{self.batch} {self.seqlen_q}x{self.seqlen_k} h{self.heads}:{self.kv_heads}"
        dims = f"d{self.head_dim}/{self.head_dim_v} {str(self.dtype)[6:]}"
        return f"{sizes} {dims} {self.qk_format} {flags} q{self.q_block} h{self.rotate_block}"


def draw(case: Case, seed: int = 0) -> Tensors:
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=generator, device="cuda")
        offset = torch.randn((1, 1, *shape[2:]), generator=generator, device="cuda")  # channels with a mean
        return (x + 2 * offset).to(case.dtype)

    q = normal(case.batch, case.seqlen_q, case.heads, case.head_dim)
    k = normal(case.batch, case.seqlen_k, case.kv_heads, case.head_dim)
    k[:, 140:141] *= 20  # a block with an outlier
    return q, k, normal(case.batch, case.seqlen_k, case.kv_heads, case.head_dim_v)


@functools.cache  # a graph cannot copy them from the host
def signs_of(case: Case) -> torch.Tensor | None:
    columns, _ = computed_head_dims(case.head_dim, case.head_dim)
    drawn = torch.randint(0, 2, (columns,), generator=torch.Generator().manual_seed(7))
    return (2 * drawn - 1).float().cuda() if case.rotate else None


def run(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Quantized:
    blocks = case.q_block, case.rotate_block
    means = case.smooth_k, case.center_v
    return quantize(q, k, v, Numbers(case.qk_format, signs_of(case), *means, *blocks, case.power_scales))


def wide(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x.float(), (0, computed_head_dims(x.shape[-1], x.shape[-1])[0] - x.shape[-1]))


def hadamard(x: torch.Tensor, block: int) -> torch.Tensor:
    """x H on aligned blocks of columns, partners of stride 1 first, then 2, 4, ..."""
    shape, stride = x.shape, 1
    while stride < block:
        low, high = x.reshape(*shape[:-1], shape[-1] // (2 * stride), 2, stride).unbind(-2)
        x = torch.stack((low + high, low - high), dim=-2).reshape(shape)
        stride *= 2
    return x


def has_outliers(amax: torch.Tensor, rows: int) -> torch.Tensor:
    """Of the largest magnitudes of rows (batch, rows rounded up to 128, heads): whether the largest of a block of 128
    is above 1.75 times the largest of any 16 rows of it; (batch, blocks, heads).
    """
    groups = amax.unflatten(1, (-1, 8, 16)).amax(3)
    exists = torch.arange(groups.shape[1] * 8, device=amax.device).view(1, -1, 8, 1) * 16 < rows
    return ((groups.amax(2, keepdim=True) > 1.75 * groups) & exists).any(2)


def codes(x: torch.Tensor, block: int, qk_format: str, power_scales: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 (batch, rows, heads, columns) to 8-bit bytes and scales."""
    most = torch.tensor(127.0 if qk_format == "int8" else 448.0, device=x.device)
    rows = x.shape[1]
    amax = x.abs().amax(-1)
    blocks = -(-rows // block)
    padded = torch.nn.functional.pad(amax, (0, 0, 0, blocks * block - rows))
    amax = padded.view(x.shape[0], blocks, block, x.shape[2]).amax(2)
    scale = amax.clamp(min=1e-12) / most
    if power_scales:
        mantissa, exponent = torch.frexp(scale)
        power = torch.ldexp(torch.where(mantissa == 0.5, 0.5, 1.0), exponent)
        scale = torch.where(has_outliers(padded, rows), scale, power)
    y = x * (1.0 / scale).repeat_interleave(block, 1)[:, :rows, :, None]
    if qk_format == "int8":
        data = y.round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
    else:
        data = y.clamp(-448, 448).to(E4M3).view(torch.uint8)
    return data, scale.transpose(1, 2)


def check_rotated(
    case: Case, name: str, x: torch.Tensor, terms: torch.Tensor, q_block: int, found: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """x: float64 (batch, rows, heads, columns), the exact rotated rows; terms: of each the sum of the magnitudes that
    it is a sum of, which bounds the rounding of float32. found: codes and scales.
    """
    data, scale = found
    most, rows, slack = (127.0 if case.qk_format == "int8" else 448.0), x.shape[1], terms * 2.0**-21
    blocks = -(-rows // q_block)

    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x.amax(-1), (0, 0, 0, blocks * q_block - rows))

    def scales(magnitudes: torch.Tensor) -> torch.Tensor:
        amax = padded(magnitudes).view(x.shape[0], blocks, q_block, x.shape[2]).amax(2)
        result = amax.clamp(min=1e-12) / most
        if name == "k" and case.power_scales:
            result = torch.where(has_outliers(padded(x.abs()), rows), result, torch.exp2(result.log2().ceil()))
        return result.transpose(1, 2)

    assert (scale >= scales((x.abs() - slack).clamp(min=0.0)) * (1 - 2.0**-22)).all(), f"{name}_scale: too small"
    assert (scale <= scales(x.abs() + slack) * (1 + 2.0**-22)).all(), f"{name}_scale: too large"
    of_rows = scale.double().transpose(1, 2).repeat_interleave(q_block, 1)[:, :rows, :, None]
    exact, slack = x / of_rows, slack / of_rows + 2.0**-21 * x.abs() / of_rows
    if case.qk_format == "int8":
        codes = data.view(torch.int8).double()
        low, high = ((exact + sign * slack).round().clamp(-most, most) for sign in (-1, 1))
    else:
        codes = data.view(E4M3).double()
        low, high = ((exact + sign * slack).float().clamp(-most, most).to(E4M3).double() for sign in (-1, 1))
    wrong = ((codes < low) | (codes > high) | codes.isnan()).sum().item()
    assert wrong == 0, f"{name}: {wrong} of {codes.numel()} are not the nearest"


def k_major(v8: torch.Tensor) -> torch.Tensor:
    """Bytes (batch, seqlen_k, kv_heads, columns) -> (batch, kv_heads, columns, keys), one key at a time as the format
    says.
    """
    batch, seqlen_k, heads, columns = v8.shape
    keys = -(-seqlen_k // 128) * 128
    padded = torch.zeros((batch, keys, heads, columns), dtype=torch.uint8, device=v8.device)
    padded[:, :seqlen_k] = v8
    order = [
        16 * g + (2 * c + e if e < 2 else 6 + 2 * c + e) for g in range(keys // 16) for c in range(4) for e in range(4)
    ]
    assert sorted(order) == list(range(keys))
    return padded[:, order].permute(0, 2, 3, 1)


def same(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    found, expected = (
        x.contiguous().view(torch.uint8 if x.element_size() == 1 else torch.int32) for x in (found, expected)
    )
    assert found.shape == expected.shape
    wrong = (found != expected).sum().item()
    assert wrong == 0, f"{name}: {wrong} of {found.numel()} differ"


def check_means(case: Case, found: Quantized, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, wanted, mean, x in (
        ("k_mean", case.smooth_k, found.k_mean, k),
        ("v_mean", case.center_v, found.v_mean, v),
    ):
        assert (mean is not None) == wanted
        if mean is None:
            continue
        rows = wide(x).double()[:, sampled_rows(case.seqlen_k, x.device)]
        exact = rows.sum(1) / max(rows.shape[1], 1)
        allowed = 1e-6 * rows.abs().sum(1) / max(rows.shape[1], 1) + 1e-30
        assert ((mean.double() - exact).abs() <= allowed).all(), name
    assert (found.lse_shift is not None) == case.smooth_k
    if found.lse_shift is not None and found.k_mean is not None:
        of_heads = found.k_mean.double().repeat_interleave(case.heads // case.kv_heads, 1)
        products = wide(q).double() * of_heads[:, None]
        error = (found.lse_shift.double() - products.sum(-1).transpose(1, 2)).abs()
        assert (error <= 1e-6 * products.abs().sum(-1).transpose(1, 2) + 1e-30).all(), "lse_shift"


def check(case: Case, found: Quantized, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    judged.count += 1
    check_means(case, found, q, k, v)
    wide_q, wide_k, wide_v = wide(q), wide(k), wide(v)
    signs, block = signs_of(case), case.rotate_block or HADAMARD[wide_q.shape[-1]]
    mean = None if found.k_mean is None else found.k_mean[:, None]
    if found.v_mean is not None:
        wide_v = wide_v - found.v_mean[:, None]
    for name, x, q_block in (("q", wide_q, case.q_block), ("k", wide_k, 128)):
        data, scale = getattr(found, name), getattr(found, f"{name}_scale")
        is_smooth = name == "k" and mean is not None
        if signs is not None:
            exact, norm = (x.double() - mean if is_smooth else x.double()) * signs, 1.0 / math.sqrt(block)
            terms = x.double().abs() + (mean.double().abs() if is_smooth else 0.0)
            sums = terms.unflatten(-1, (-1, block)).sum(-1).repeat_interleave(block, -1)
            check_rotated(case, name, hadamard(exact, block) * norm, sums * norm, q_block, (data, scale))
            continue
        expected, expected_scale = codes(
            x - mean if is_smooth else x, q_block, case.qk_format, name == "k" and case.power_scales
        )
        same(f"{name}_scale", scale, expected_scale)
        same(name, data, expected)
    data, scale = codes(wide_v, 128, "e4m3")
    same("v_scale", found.v_scale, scale)
    same("v", found.v, k_major(data))
