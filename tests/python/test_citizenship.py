"""PyTorch citizenship: opcheck, fakes, compile, flop counting, autocast, transforms, derivatives of other kinds."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, oracle
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flashhopper as fh

# What torch itself does and then warns about: compilation instantiates an autograd.Function, forward mode scripts its
# rules.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]


def dense(requires_grad: bool = False, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = ((2, 9, 4, 8), (2, 11, 2, 8), (2, 11, 2, 12))
    return [torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for shape in shapes]


def packed(requires_grad: bool = False) -> tuple[list[torch.Tensor], tuple[object, ...]]:
    tensors = [torch.randn(n, h, 8, requires_grad=requires_grad) for n, h in ((9, 4), (11, 2), (11, 2))]
    cu_q, cu_k = torch.tensor([0, 4, 4, 9]).int(), torch.tensor([0, 0, 5, 11]).int()
    return tensors, (cu_q, cu_k, 5, 6)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
def test_opcheck_dense(requires_grad: bool, with_sink: bool) -> None:
    q, k, v = dense(requires_grad)
    sink = torch.randn(4, requires_grad=requires_grad) if with_sink else None
    numbers = (0.25, 3, 0, 0.0)
    torch.library.opcheck(torch.ops.flashhopper.forward.default, (q, k, v, sink, *numbers, 0, False, "auto"))
    with torch.no_grad():
        out, lse = torch.ops.flashhopper.forward(q, k, v, sink, *numbers, 0, False, "auto")
    arguments = (torch.randn_like(out), torch.randn_like(lse), *(x.detach() for x in (q, k, v)), out, lse)
    sink = None if sink is None else sink.detach()
    torch.library.opcheck(torch.ops.flashhopper.backward.default, (*arguments, sink, *numbers, 0, False, "auto"))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_packed(requires_grad: bool) -> None:
    (q, k, v), (cu_q, cu_k, max_q, max_k) = packed(requires_grad)
    packing = (cu_q, cu_k, None, torch.tensor([0, 3, 6]).int(), max_q, max_k)
    numbers = (None, 0.25, -1, 0, 2.0)
    # Offsets drawn by the test harness would be no offsets, so the dynamic-shape test, which does that, is left out.
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = torch.ops.flashhopper.varlen_forward.default
    torch.library.opcheck(operator, (q, k, v, *packing, *numbers, 0, False, "auto"), test_utils=utils)
    with torch.no_grad():
        out, lse = operator(q, k, v, *packing, *numbers, 0, False, "auto")
    arguments = (torch.randn_like(out), None, *(x.detach() for x in (q, k, v)), out, lse)
    operator = torch.ops.flashhopper.varlen_backward.default
    torch.library.opcheck(operator, (*arguments, *packing, *numbers, 0, False, "auto"), test_utils=utils)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fakes_tell_the_truth(dtype: torch.dtype) -> None:
    q, k, v = dense(dtype=dtype)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # the result is contiguous all the same
    real = fh.flash_attn_func(q, k, v, return_lse=True)
    gradients = torch.ops.flashhopper.backward(real[0], None, q, k, v, *real, None, 0.1, -1, -1, 0.0, 0, False, "auto")
    mode = FakeTensorMode()
    fake_q, fake_k, fake_v, fake_out, fake_lse = (mode.from_tensor(x) for x in (q, k, v, *real))
    with mode:
        fake = fh.flash_attn_func(fake_q, fake_k, fake_v, return_lse=True)
        fake_gradients = torch.ops.flashhopper.backward(
            fake_out, None, fake_q, fake_k, fake_v, fake_out, fake_lse, None, 0.1, -1, -1, 0.0, 0, False, "auto"
        )
    for a, b in zip((*real, *gradients), (*fake, *fake_gradients), strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def test_fakes_on_the_cpu_may_stand_for_shards_on_a_gpu() -> None:
    """DTensor propagates sharding with fakes on the CPU, whatever the mesh; the call itself judges the device."""
    q, k, v = (torch.randn(2, 5, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    numbers = (0.125, -1, 0)
    code = fh.Fp8Recipe().code
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        flat = [x.flatten(0, 1) for x in fakes]
        offsets = torch.tensor([0, 5, 10], dtype=torch.int32)
        packing = (offsets, offsets, None, None, 5, 5)
        dense = torch.ops.flashhopper.forward(*fakes, None, *numbers, 0.0, 0, False, "hopper")
        eight = torch.ops.flashhopper.fp8_forward(*fakes, code, *numbers, 0, False, "hopper")
        packed = torch.ops.flashhopper.varlen_forward(*flat, *packing, None, *numbers, 0.0, 0, False, "hopper")
        packed8 = torch.ops.flashhopper.fp8_varlen_forward(*flat, code, *packing, *numbers, 0, False, "hopper")
    for out, lse in (dense, eight):
        assert (out.shape, lse.shape) == ((2, 5, 4, 64), (2, 4, 5))
    for out, lse in (packed, packed8):
        assert (out.shape, lse.shape) == ((10, 4, 64), (4, 10))
    with pytest.raises(RuntimeError, match="q is on cpu, not on a CUDA device"):
        torch.ops.flashhopper.forward(q, k, v, None, *numbers, 0.0, 0, False, "hopper")


def test_meta_tensors() -> None:
    q, k, v = (x.to("meta") for x in dense())
    out = fh.flash_attn_func(q, k, v, causal=True)
    assert isinstance(out, torch.Tensor)
    assert (out.shape, out.device.type) == ((2, 9, 4, 12), "meta")


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_dense(dynamic: bool) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = fh.flash_attn_func(q, k, v, causal=True, window_size=(6, -1), return_lse=True)
        return out.sum(-1).transpose(1, 2) + lse

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for shift in (0, 5):
        q, k, v = (
            torch.randn(2, n + shift, h, d, requires_grad=True) for n, h, d in ((9, 4, 8), (11, 2, 8), (11, 2, 12))
        )
        result, expected = compiled(q, k, v), attend(q, k, v)
        assert_close(result, expected, 1e-6)
        found = torch.autograd.grad(result.square().sum(), (q, k, v))
        for a, b in zip(found, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True):
            assert_close(a, b, 1e-5)
        with torch.no_grad():
            assert_close(compiled(q, k, v), expected, 1e-6)


def test_compile_packed_and_fused() -> None:
    (q, k, v), rest = packed(requires_grad=True)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return fh.flash_attn_varlen_func(q, k, v, *rest, causal=True)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    result, expected = compiled(q, k, v), attend(q, k, v)
    assert_close(result, expected, 1e-6)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (result, expected)), strict=True):
        assert_close(a, b, 1e-5)
    qkv = torch.randn(1, 6, 8, 4, requires_grad=True)
    fused = torch.compile(lambda x: fh.flash_attn_qkvpacked_func(x, num_heads_q=4), backend="aot_eager", fullgraph=True)
    result, expected = fused(qkv), fh.flash_attn_qkvpacked_func(qkv, num_heads_q=4)
    assert_close(result, expected, 1e-6)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), qkv) for x in (result, expected)), strict=True):
        assert_close(a, b, 1e-5)


def test_compiled_graphs_follow_set_backend() -> None:
    q, k, v = dense()
    compiled = torch.compile(lambda *x: fh.flash_attn_func(*x), backend="aot_eager", fullgraph=True)
    compiled(q, k, v)
    with fh.set_backend("hopper"), pytest.raises(Exception, match='backend "hopper" cannot serve this call'):
        compiled(q, k, v)
    compiled(q, k, v)


@pytest.mark.parametrize(("window", "kept"), [((-1, -1), 99), ((-1, 0), 63), ((2, 0), 27), ((2, 1), 35)])
def test_flop_counter(window: tuple[int, int], kept: int) -> None:
    q, k, v = (x.requires_grad_() for x in dense())
    diagonal = torch.arange(9)[:, None] + 2
    keys = torch.arange(11)[None]
    left, right = (99 if side < 0 else side for side in window)
    assert kept == int(((keys >= diagonal - left) & (keys <= diagonal + right)).sum())
    with FlopCounterMode(display=False) as counter:
        out = fh.flash_attn_func(q, k, v, window_size=window)
        assert isinstance(out, torch.Tensor)
        assert counter.get_total_flops() == 2 * 4 * kept * 2 * (8 + 12)
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 4 * kept * 2 * (8 + 12) + 2 * 4 * kept * 2 * (3 * 8 + 2 * 12)
    assert fh.explain(q, k, v, window_size=window).flops == 2 * 4 * kept * 2 * (8 + 12)


def test_flop_counter_packed() -> None:
    (q, k, v), rest = packed(requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = fh.flash_attn_varlen_func(q, k, v, *rest)
        kept = 4 * 0 + 0 * 5 + 5 * 6
        assert counter.get_total_flops() == kept * 4 * 2 * 16
        out.sum().backward()
    assert counter.get_total_flops() == kept * 4 * 2 * 16 + kept * 4 * 2 * 40


def test_autocast() -> None:
    q, k, v = dense(requires_grad=True)
    sink = torch.nn.Parameter(torch.randn(4))
    with torch.autocast("cpu", torch.bfloat16):
        out = fh.flash_attn_func(q, k.half(), v, sink=sink)
        (fused_q, *_), rest = packed()
        packed_out = fh.flash_attn_varlen_func(fused_q, *(x.half() for x in packed()[0][1:]), *rest)
        exact = fh.flash_attn_func(*(x.double() for x in (q, k, v)))
    assert out.dtype == packed_out.dtype == torch.bfloat16
    assert exact.dtype == torch.float64
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32
    assert sink.grad is not None
    assert_close(out, oracle(q, k, v, sink=sink)[0], 2e-2)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_vmap_is_refused(requires_grad: bool) -> None:
    q, k, v = (x[None] for x in dense(requires_grad))
    with pytest.raises(RuntimeError, match="flashhopper operators have no vmap rule"):
        torch.vmap(lambda *x: fh.flash_attn_func(*x))(q, k, v)
    (q, k, v), rest = packed(requires_grad)
    with pytest.raises(RuntimeError, match="flashhopper operators have no vmap rule"):
        torch.vmap(lambda *x: fh.flash_attn_varlen_func(*x, *rest))(q[None], k[None], v[None])


def test_only_inputs_outputs_and_lse_are_saved() -> None:
    """Memory between forward and backward is linear in tokens: no probabilities."""
    q, k, v = dense(requires_grad=True)
    saved: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out, lse = fh.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert sorted(x.numel() for x in saved) == sorted(x.numel() for x in (q, k, v, out, lse))


def test_second_derivatives_are_refused() -> None:
    q, k, v = dense(requires_grad=True)
    (tq, tk, tv), rest = packed(requires_grad=True)
    for x, out in ((q, fh.flash_attn_func(q, k, v)), (tq, fh.flash_attn_varlen_func(tq, tk, tv, *rest))):
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"no second derivative.*reference_attention"):
            first.sum().backward()


def test_function_transforms_refuse_what_there_is_not() -> None:
    q, k, v = dense()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return fh.flash_attn_func(x, k, v).square().sum()

    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(q)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(loss, (q,), (q,))
    with pytest.raises(RuntimeError, match="no vmap rule"):
        torch.func.jacrev(lambda x: fh.flash_attn_func(x, k, v))(q)


def test_forward_mode_is_refused() -> None:
    q, k, v = dense()
    (tq, tk, tv), rest = packed()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            fh.flash_attn_func(dual, k, v)
        dual = torch.autograd.forward_ad.make_dual(tk, torch.ones_like(tk))
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            fh.flash_attn_varlen_func(tq, dual, tv, *rest)
        fh.flash_attn_func(q, k, v)  # without a tangent nothing is lost


def test_func_grad() -> None:
    q, k, v = dense(dtype=torch.float64)
    found = torch.func.grad(lambda x: fh.flash_attn_func(x, k, v).square().sum())(q)
    exact = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(oracle(exact, k, v)[0].square().sum(), exact)
    assert_close(found, expected, 1e-12)


def test_inference_mode_and_checkpoint() -> None:
    q, k, v = dense()
    with torch.inference_mode():
        inferred = fh.flash_attn_func(q, k, v)
    q.requires_grad_()
    direct = fh.flash_attn_func(q, k, v)
    again = torch.utils.checkpoint.checkpoint(fh.flash_attn_func, q, k, v, use_reentrant=False)
    assert torch.equal(inferred, direct)
    (a,), (b,) = (torch.autograd.grad(x.square().sum(), q) for x in (direct, again))
    assert torch.equal(a, b)


def test_fused_layouts() -> None:
    qkv = torch.randn(2, 6, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    out = fh.flash_attn_qkvpacked_func(qkv, causal=True)
    assert_close(out, oracle(*qkv.unbind(2), causal=True)[0], 1e-12)
    assert torch.autograd.gradcheck(lambda x: fh.flash_attn_qkvpacked_func(x[:1, :3, :, :1, :2]), qkv)
    gqa = torch.randn(2, 6, 8, 8, dtype=torch.float64)
    out, lse = fh.flash_attn_qkvpacked_func(gqa, num_heads_q=4, return_lse=True)
    expected, expected_lse = oracle(gqa[:, :, :4], gqa[:, :, 4:6], gqa[:, :, 6:])
    assert_close(out, expected, 1e-12)
    assert_close(lse, expected_lse, 1e-12)
