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
            lambda: fh.flash_attn_varlen_func(q, k, v, *rest, fp8=fh.Fp8Recipe()),
        ):
            with pytest.raises(RuntimeError, match='"hopper" cannot serve this 8-bit call: q is on cpu'):
                call()
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
        # Packed sequences are quantised by the kernel or not at all.
        assert message in str(hopper_fp8.packed_refusal(gpu, dtype, DIMS, fh.Fp8Recipe(**change), 0.1)[0])
    assert hopper_fp8.packed_refusal(gpu, bf16, DIMS, recipe, 0.1) == (None, False)
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
    ((views, outputs, signs, sizes, columns, dtype, code, flags, blocks, offsets, totals, stream),) = module.quantized
    assert views == [(x.data_ptr(), *x.stride()[:3]) for x in (q, k, v)]
    data = (qkv.q, qkv.k, qkv.v, qkv.q_scale, qkv.k_scale, qkv.v_scale, qkv.lse_shift, qkv.k_mean, qkv.v_mean)
    assert outputs == tuple(0 if x is None else x.data_ptr() for x in data)
    assert (signs != 0) == recipe.rotate
    assert (sizes, columns) == ((2, 4, 2, 9, 140, 40, 24, -1, -1), (64, 64))
    assert (dtype, code) == (module.BF16, module.INT8 if name == "accurate" else module.E4M3)
    assert flags == 1 * recipe.rotate + 2 * recipe.smooth_k + 4 * recipe.center_v + 8 * recipe.power_scales
    assert blocks == (recipe.q_block, recipe.rotate_block)
    assert (offsets, totals, stream) == ((0,) * 5, (0, 0), 55)
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
    ((tensors, view, lse_address, workspace, sizes, columns, keys, blocks, *numbers),) = module.attended
    data = (qkv.q, qkv.k, qkv.v, qkv.q_scale, qkv.k_scale, qkv.v_scale, qkv.lse_shift, qkv.v_mean)
    assert tensors == tuple(x.data_ptr() for x in data if x is not None)
    assert view == (out.data_ptr(), 9 * 4 * 64, 4 * 64, 64)
    assert lse_address == lse.data_ptr()
    assert workspace == 1001
    assert (sizes, columns, keys, blocks) == ((2, 4, 2, 9, 140, 40, 64, -1, 0), (64, 64), 256, (1, 128, 128))
    assert numbers == [module.INT8, module.BF16, 0.25, 3, (0,) * 5, (0, 0), 55]
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


def packed() -> tuple[list[torch.Tensor], tuple[object, ...]]:
    tensors = [torch.randn(n, h, 40).bfloat16() for n, h in ((9, 4), (150, 2), (150, 2))]
    return tensors, (torch.tensor([0, 4, 4, 9]).int(), torch.tensor([0, 0, 140, 150]).int(), 5, 140)


@pytest.mark.parametrize("q_block", [1, 128])
def test_packed_sequences_run_both_kernels(module: Fp8Module, q_block: int) -> None:
    (q, k, v), (cu_q, cu_k, *longest) = packed()
    used = torch.tensor([0, 100, 10]).int()
    recipe = fh.Fp8Recipe(q_block=q_block)
    out, lse = fh.flash_attn_varlen_func(
        *(q, k, v, cu_q, cu_k, *longest, 0.25), causal=True, fp8=recipe, seqused_k=used, sm_margin=3, return_lse=True
    )
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((9, 4, 40), torch.bfloat16, (4, 9), torch.float32)
    ((views, outputs, signs, *quantised_as),) = module.quantized
    assert [(a, *rest) for a, _, *rest in views] == [(x.data_ptr(), *x.stride()[:2]) for x in (q, k, v)]
    assert signs != 0
    offsets = (cu_q.data_ptr(), cu_k.data_ptr(), 0, used.data_ptr())
    sizes = (3, 4, 2, 5, 140, 40, 40)
    assert quantised_as[0] == (*sizes, -1, -1)
    assert quantised_as[-4:] == [(q_block, 0), (*offsets, 0), (9, 150), 55]
    ((tensors, view, lse_address, _, problem, columns, keys, blocks, *numbers, where, totals, stream),) = (
        module.attended
    )
    assert tensors == (*outputs[:7], outputs[8])
    assert view == (out.data_ptr(), 9 * 160, 160, 40)
    assert (lse_address, problem, columns) == (lse.data_ptr(), (*sizes, -1, 0), (64, 64))
    assert (keys, blocks) == (128 * (150 // 128 + 3 + 1), (q_block, 128, 128))
    assert numbers == [module.INT8, module.BF16, 0.25, 3]
    assert (where[:4], totals, stream) == (offsets, (9, 150), 55)
    assert where[4] != 0


def test_what_packed_sequences_do_where_the_kernels_do_not_serve(module: Fp8Module) -> None:
    (q, k, v), rest = packed()
    per_head = fh.Fp8Recipe(k_block=0)
    with fh.set_backend("tiled"):
        expected = fh.flash_attn_varlen_func(q, k, v, *rest, fp8=per_head)
    assert torch.equal(fh.flash_attn_varlen_func(q, k, v, *rest, fp8=per_head), expected)
    assert not module.attended
    message = '"hopper" cannot serve this 8-bit call: k_block is 0, the quantiser kernel takes 128'
    with fh.set_backend("hopper"), pytest.raises(RuntimeError, match=message):
        fh.flash_attn_varlen_func(q, k, v, *rest, fp8=per_head)
    nothing = fh.flash_attn_varlen_func(q[:0], k, v, rest[0] * 0, *rest[1:], fp8=fh.Fp8Recipe())
    assert nothing.shape == (0, 4, 40)
    assert not module.attended


def test_lengths_of_packed_sequences_stay_on_the_device(module: Fp8Module, monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, v), rest = packed()
    fh.flash_attn_varlen_func(q, k, v, *rest, fp8=fh.Fp8Recipe())  # signs are made once

    def read(*_: object) -> None:
        raise AssertionError("a length was read on the host")

    for name in ("tolist", "item", "__int__", "__bool__", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, read)
    fh.flash_attn_varlen_func(q, k, v, *rest, fp8=fh.Fp8Recipe())
    assert len(module.attended) == 2


def test_the_gradient_of_packed_sequences_is_straight_through(module: Fp8Module) -> None:
    (q, k, v), rest = packed()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = fh.flash_attn_varlen_func(*leaves, *rest, causal=True, fp8=fh.Fp8Recipe())
    out.sum().backward()
    (call,) = module.backward_calls
    assert [call[name] for name in ("q", "k", "v", "out")] == [x.data_ptr() for x in (*leaves, out)]
    assert call["lse"] == module.attended[0][2]


PACKING = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def test_explain_of_packed_sequences(module: Fp8Module) -> None:
    tensors, rest = packed()
    options = dict(zip(PACKING, rest, strict=True))
    plan = fh.explain(*tensors, **options, causal=True, fp8=fh.Fp8Recipe(), sm_margin=2)  # type: ignore[arg-type]
    assert module.plan_arguments == ((3, 4, 2, 5, 140, 40, 40, -1, 0), module.INT8, module.BF16, 2, 132)
    assert (plan.backend, plan.config, plan.quantizer) == ("hopper", "fwd8_hd64_m128_n160", "the Hopper quantiser")
    assert (plan.tiles, plan.grid, plan.is_bound) == (4 * (9 // 128 + 3 + 1), 16, True)
    assert plan.workspace_bytes == module.workspace_bytes() + module.packed_workspace_bytes(3, 9)
    assert plan.scheduler.startswith("thread blocks take tiles from a counter, by a list made on the device")
    assert plan.gradients.startswith("straight-through; hopper, bwd_hd64")
    per_head = fh.Fp8Recipe(k_block=0)
    plan = fh.explain(*tensors, **options, fp8=per_head)  # type: ignore[arg-type]
    why = "k_block is 0, the quantiser kernel takes 128"
    assert (plan.backend, plan.why, plan.quantizer, plan.is_bound) == ("tiled", why, f"torch ops: {why}", False)
    assert plan.config.startswith("8-bit attention emulated in torch ops, 2 KV head(s) of the sequence")
    with fh.set_backend("hopper"):
        plan = fh.explain(*tensors, **options, fp8=per_head)  # type: ignore[arg-type]
    assert (plan.backend, plan.config, plan.scheduler) == ("hopper", "none", "none")
    assert plan.why == f"the call would raise RuntimeError, {why}"
    assert not module.attended


def test_explain_of_a_dense_call(module: Fp8Module) -> None:
    plan = fh.explain(*inputs(), causal=True, fp8=fh.Fp8Recipe.e4m3())
    assert module.plan_arguments == ((2, 4, 2, 9, 140, 40, 64, -1, 0), module.E4M3, module.BF16, 0, 132)
    assert (plan.config, plan.grid, plan.tiles, plan.is_bound) == ("fwd8_hd64_m128_n160", 132, 64, False)
    assert plan.scheduler.startswith("clusters of 2 thread blocks take tiles from a counter; as many KV heads")
    turned = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in inputs()]
    assert fh.explain(*turned, fp8=fh.Fp8Recipe()).copies[0].startswith("q (head_dim stride 4 is not 1)")
    assert fh.explain(inputs()[0][:, :0], *inputs()[1:], fp8=fh.Fp8Recipe()).notes == (
        "the problem is empty: nothing is launched",
    )
