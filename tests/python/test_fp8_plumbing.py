"""What the 8-bit kernels take, and what the compiled module is called with, where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from fake_module import FakeModule, install

import flashhopper as fh
from flashhopper.engine import hopper, hopper_fp8
from flashhopper.fp8 import operators
from flashhopper.fp8 import quantize as torch_quantizer

E4M3 = torch.float8_e4m3fn
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

DIMS = (40, 64)


def inputs(dim_v: int = 64) -> list[torch.Tensor]:
    return [torch.randn(shape).bfloat16() for shape in ((2, 9, 4, 40), (2, 140, 2, 40), (2, 140, 2, dim_v))]


def raw() -> list[torch.Tensor]:
    return [x.to(E4M3) for x in inputs()]


def test_the_hopper_backend_says_why_not() -> None:
    q, k, v = (x[0] for x in inputs())
    rest = (torch.tensor([0, 9]).int(), torch.tensor([0, 140]).int(), 9, 140)
    with fh.set_backend("hopper"):
        for call in (
            lambda: fh.flash_attn_func(*inputs(), fp8=fh.Fp8Recipe()),
            lambda: fh.flash_attn_fp8_func(*raw(), scales=1.0),
        ):
            with pytest.raises(RuntimeError, match='"hopper" cannot serve this 8-bit call: q is on cpu'):
                call()
        with pytest.raises(RuntimeError, match="packed sequences are not in the Hopper kernels yet"):
            fh.flash_attn_varlen_func(q, k, v, *rest, fp8=fh.Fp8Recipe())
        assert "the call would raise RuntimeError, q is on cpu" in fh.explain(*inputs(), fp8=fh.Fp8Recipe()).why
        assert fh.quantize_fp8(*inputs()).q.dtype == torch.int8  # by torch operations


def test_what_the_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, bf16, recipe = GPU, torch.bfloat16, fh.Fp8Recipe()
    whole = (0.1,)
    monkeypatch.setattr(hopper, "_capabilities", {gpu: (9, 0), torch.device("cuda", 1): (8, 9)})
    monkeypatch.setattr(hopper, "module", None)
    assert hopper_fp8.forward_refusal(gpu, DIMS, recipe, *whole)[1]
    with pytest.raises(RuntimeError, match=r"did not load: .*; run `python -m flashhopper doctor`"):
        operators.resolve(gpu, DIMS, recipe, 0.1, "auto")
    monkeypatch.setattr(hopper, "module", object())  # a library from before there were 8-bit kernels
    assert hopper_fp8.forward_refusal(gpu, DIMS, recipe, *whole) == ("the compiled library has no 8-bit kernel", False)
    assert hopper_fp8.quantize_refusal(gpu, bf16, DIMS, recipe) == "the compiled library has no 8-bit kernel"
    assert "8.9" in str(hopper_fp8.forward_refusal(torch.device("cuda", 1), DIMS, recipe, *whole))
    monkeypatch.setattr(hopper, "module", FakeModule())
    monkeypatch.setattr(FakeModule, "forward8", None, raising=False)
    assert operators.resolve(gpu, DIMS, recipe, 0.1, "auto")
    assert hopper_fp8.quantize_refusal(gpu, bf16, DIMS, recipe) is None
    for change, call, message in (
        ({"two_level": False}, whole, "two_level is False"),
        ({"k_block": 1}, whole, "k_block is 1, v_block is 128, the kernel takes 0 (one scale a head) and 128"),
        ({}, (0.0,), "softmax_scale is 0.0"),
    ):
        assert message in str(hopper_fp8.forward_refusal(gpu, DIMS, fh.Fp8Recipe(**change), *call)[0])
    for change, dtype, message in (
        ({"q_block": 64}, bf16, "q_block is 64, the quantiser kernel takes 1 and 128"),
        ({"k_block": 0}, bf16, "k_block is 0, the quantiser kernel takes 128"),
        ({"v_block": 256}, bf16, "v_block is 256, the quantiser kernel takes 128"),
        ({}, torch.float32, "q has dtype torch.float32"),
    ):
        assert message in str(hopper_fp8.quantize_refusal(gpu, dtype, DIMS, fh.Fp8Recipe(**change)))
    odd = (40, 60)
    assert hopper_fp8.quantize_refusal(gpu, bf16, odd, recipe) == "head_dim_v is 60, the kernels take multiples of 8"
    assert "head_dim_v is 60" in str(hopper_fp8.forward_refusal(gpu, odd, recipe, *whole)[0])


class Fp8Module(FakeModule):
    """A compiled module with 8-bit kernels: records what it is called with."""

    E4M3, INT8 = 2, 3

    def __init__(self) -> None:
        super().__init__()
        self.quantized: list[tuple[object, ...]] = []
        self.attended: list[tuple[object, ...]] = []

    def quantize(self, *arguments: object) -> None:
        self.quantized.append(arguments)

    def forward8(self, *arguments: object) -> None:
        self.attended.append(arguments)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Fp8Module:
    """CPU tensors pass for those of a Hopper GPU."""
    fake = Fp8Module()
    fake.device = install(monkeypatch).device
    fake.stream = 55
    monkeypatch.setattr(hopper, "module", fake)
    refuse = hopper_fp8._device_refusal
    monkeypatch.setattr(hopper_fp8, "_device_refusal", lambda device, function: refuse(GPU, function))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: fake.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: fake.stream, raising=False)
    return fake


@pytest.mark.parametrize("name", ["accurate", "e4m3", "paper"])
def test_the_quantisers_arguments(module: Fp8Module, name: str) -> None:
    recipe = getattr(fh.Fp8Recipe, name)()
    q, k, v = inputs(dim_v=24)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    qkv = fh.quantize_fp8(q, k, v, recipe)
    ((views, outputs, signs, sizes, columns, dtype, code, flags, q_block, stream),) = module.quantized
    assert views == [(x.data_ptr(), *x.stride()[:3]) for x in (q, k, v)]
    data = (qkv.q, qkv.k, qkv.v, qkv.q_scale, qkv.k_scale, qkv.v_scale, qkv.lse_shift, qkv.k_mean, qkv.v_mean)
    assert outputs == tuple(0 if x is None else x.data_ptr() for x in data)
    assert (signs != 0) == recipe.rotate
    assert (sizes, columns) == ((2, 4, 2, 9, 140, 40, 24, -1, -1), (64, 64))
    assert (dtype, code) == (module.BF16, module.INT8 if name == "accurate" else module.E4M3)
    assert flags == 1 * recipe.rotate + 2 * recipe.smooth_k + 4 * recipe.center_v
    assert (q_block, stream) == (recipe.q_block, 55)
    # The same tensors, shape by shape, as the torch quantiser makes.
    expected = torch_quantizer.quantize(q, k, v, recipe)
    for a, b in zip(vars(qkv).values(), vars(expected).values(), strict=True):
        if isinstance(b, torch.Tensor):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        else:
            assert a == b


def test_the_attentions_arguments(module: Fp8Module) -> None:
    recipe = fh.Fp8Recipe()
    qkv = torch_quantizer.quantize(*inputs(), recipe)
    out, lse = hopper_fp8.forward(qkv, 0.25, -1, 0, 3)
    ((tensors, view, lse_address, workspace, sizes, columns, blocks, code, dtype, scale, margin, stream),) = (
        module.attended
    )
    data = (qkv.q, qkv.k, qkv.v, qkv.q_scale, qkv.k_scale, qkv.v_scale, qkv.lse_shift, qkv.v_mean)
    assert tensors == tuple(x.data_ptr() for x in data if x is not None)
    assert view == (out.data_ptr(), 9 * 4 * 64, 4 * 64, 64)
    assert lse_address == lse.data_ptr()
    assert workspace == 1001
    assert (sizes, columns, blocks) == ((2, 4, 2, 9, 140, 40, 64, -1, 0), (64, 64), (1, 128, 128))
    assert (code, dtype, scale, margin, stream) == (module.INT8, module.BF16, 0.25, 3, 55)
    assert (out.shape, out.dtype, lse.shape) == ((2, 9, 4, 64), torch.bfloat16, (2, 4, 9))


def test_one_call_runs_both_kernels(module: Fp8Module) -> None:
    fh.flash_attn_func(*inputs(), causal=True, fp8=fh.Fp8Recipe())
    assert (len(module.quantized), len(module.attended)) == (1, 1)
    assert module.attended[0][0][0] == module.quantized[0][1][0]  # type: ignore[index]
    fh.flash_attn_func(*inputs(), fp8=fh.Fp8Recipe(k_block=0))  # the torch quantiser, the kernel's attention
    assert (len(module.quantized), len(module.attended)) == (1, 2)
    fh.flash_attn_func(*inputs(), window_size=(3, 0), fp8=fh.Fp8Recipe())
    assert (len(module.quantized), len(module.attended)) == (2, 3)
    fh.flash_attn_fp8_func(*raw(), scales=1.0)
    assert len(module.attended) == 4
    with fh.set_backend("tiled"):
        fh.flash_attn_func(*inputs(), fp8=fh.Fp8Recipe())
    assert (len(module.quantized), len(module.attended)) == (2, 4)
    plan = fh.explain(*inputs(), fp8=fh.Fp8Recipe())
    assert (plan.backend, plan.quantizer) == ("hopper", "the Hopper quantiser")
    q, k, v = inputs()
    assert fh.flash_attn_func(q[:, :0], k, v, fp8=fh.Fp8Recipe()).shape == (2, 0, 4, 64)
