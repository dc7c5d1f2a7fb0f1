"""The backward as a citizen of PyTorch on the GPU: a captured training step, checkpointing, compilation, autocast,
opcheck, hooks, transforms and refusals.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_support import assert_equal_bits, draw, draw_dout, gradients, judge_gradients
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flashhopper

# What torch itself does and then warns about: compilation instantiates an autograd.Function.
pytestmark = [
    pytest.mark.usefixtures("hopper_gradients"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


class Block(torch.nn.Module):
    """Causal self-attention with fp32 parameters and bf16 attention, grouped queries."""

    def __init__(self, width: int = 256, heads: int = 4, kv_heads: int = 2, head_dim: int = 64) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.qkv = torch.nn.Linear(width, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.out = torch.nn.Linear(heads * head_dim, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fused = self.qkv(x).bfloat16().unflatten(-1, (-1, self.head_dim))
        attended = flashhopper.flash_attn_qkvpacked_func(fused, causal=True, num_heads_q=self.heads, deterministic=True)
        return self.out(attended.flatten(2).float())  # type: ignore[union-attr]


def _block(seed: int = 0) -> Block:
    torch.manual_seed(seed)
    return Block().cuda()


def _tokens(seed: int, seqlen: int = 300) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(2, seqlen, 256, generator=generator, device="cuda")


@pytest.mark.filterwarnings("ignore:.*AccumulateGrad.*")
def test_cuda_graph_of_a_training_step() -> None:
    """Forward, loss, backward and SGD in one graph: replaying it trains as eager steps do."""
    steps, rate = 5, 0.5
    batches = [(_tokens(2 * i), _tokens(2 * i + 1)) for i in range(steps)]

    def train_step(model: Block, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(x + model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    eager = _block()
    start = [p.detach().clone() for p in eager.parameters()]
    optimizer = torch.optim.SGD(eager.parameters(), lr=rate)
    eager_losses = [train_step(eager, optimizer, x, y).item() for x, y in batches]

    model = _block()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    x, y = (part.clone() for part in batches[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm-up, which trains: the parameters are put back below
        for _ in range(3):
            train_step(model, optimizer, x, y)
    torch.cuda.synchronize()
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        loss = train_step(model, optimizer, x, y)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), start, strict=True):
            parameter.copy_(value)
    losses = []
    for new_x, new_y in batches:
        x.copy_(new_x)
        y.copy_(new_y)
        graph.replay()
        losses.append(loss.item())

    assert losses == pytest.approx(eager_losses, rel=1e-4)
    # cuBLAS may choose other kernels under capture, so the fp32 projections may differ in their last bits.
    for mine, right, begin in zip(model.parameters(), eager.parameters(), start, strict=True):
        moved = (right - begin).norm().item()
        assert moved > 0
        assert (mine - right).norm().item() <= 1e-2 * moved


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    """The recomputed forward gives the same bits, and so does the backward from it."""
    model, x, y = _block(), _tokens(1), _tokens(2)
    found = []
    for attend in (model, lambda x: checkpoint(model, x, use_reentrant=use_reentrant)):
        model.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_()
        F.mse_loss(attend(leaf), y).backward()
        found.append([leaf.grad, *(p.grad for p in model.parameters())])
    for direct, again in zip(*found, strict=True):
        assert_equal_bits(direct, again)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("backend", "dynamic"), [("aot_eager", True), ("inductor", False)])
@pytest.mark.xdist_group("compile")
def test_compile_fullgraph_forward_and_backward(backend: str, dynamic: bool) -> None:
    """GQA, a head dimension of v of its own, lse, changing lengths: one graph, the same bits."""

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = flashhopper.flash_attn_func(q, k, v, causal=True, deterministic=True, return_lse=True)
        return out, lse

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=backend)
    for seqlen in (128, 200, 333) if dynamic else (200,):
        q, k, v = draw(3, 2, seqlen, seqlen, 8, 2, 192, 128)
        dout = draw_dout(3, q, v)
        results = []
        for attend in (model, compiled):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out, lse = attend(*leaves)
            results.append([out, lse, *torch.autograd.grad([out, lse], leaves, [dout, torch.ones_like(lse)])])
        for eager, mine in zip(*results, strict=True):
            assert_equal_bits(mine.detach(), eager.detach())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.xdist_group("compile")
def test_compile_a_module() -> None:
    """A block with its projections, compiled in one graph by inductor, has the gradients of the eager one."""
    torch._dynamo.reset()
    model, x, y = _block(), _tokens(4, 256), _tokens(5, 256)
    compiled = torch.compile(model, fullgraph=True)
    found = []
    for attend in (model, compiled):
        model.zero_grad(set_to_none=True)
        F.mse_loss(attend(x), y).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for eager, mine in zip(*found, strict=True):
        assert (mine - eager).norm().item() <= 1e-2 * eager.norm().item()


def test_autocast() -> None:
    """fp32 leaves under autocast: the kernels run in bf16, gradients arrive in fp32."""
    q, k, v = draw(6, 2, 300, 300, 4, 2, 128)
    dout = draw_dout(6, q, v)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = flashhopper.flash_attn_func(*leaves, causal=True, deterministic=True)
    assert out.dtype == torch.bfloat16  # type: ignore[union-attr]
    found = torch.autograd.grad(out, leaves, dout)
    for mine, right in zip(found, gradients(q, k, v, dout, True, deterministic=True), strict=True):
        assert mine.dtype == torch.float32
        assert_equal_bits(mine, right.float())


def _backward_arguments(values: dict[str, Any]) -> tuple[Any, ...]:
    """In the order of the registered operator, whose options may grow."""
    names = [argument.name for argument in torch.ops.flashhopper.backward.default._schema.arguments]
    unknown = [name for name in names if name not in values]
    assert not unknown, f"no value for {unknown}"
    return tuple(values[name] for name in names)


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.xdist_group("compile")
def test_opcheck_of_the_backward(with_dlse: bool) -> None:
    """Schema, fake and registration of flashhopper::backward tell the truth on CUDA tensors."""
    q, k, v = draw(7, 2, 70, 90, 4, 2, 64)
    out, lse = flashhopper.flash_attn_func(q, k, v, causal=True, return_lse=True)
    numbers = {"softmax_scale": 0.125, "window_left": -1, "window_right": 0, "softcap": 0.0, "sm_margin": 0}
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "sink": None, "dout": draw_dout(7, q, v)}
    values = {**numbers, **tensors, "dlse": torch.ones_like(lse) if with_dlse else None}
    arguments = _backward_arguments({**values, "deterministic": True, "backend": "hopper"})
    torch.library.opcheck(torch.ops.flashhopper.backward.default, arguments)
    dq, dk, dv, *_ = torch.ops.flashhopper.backward.default(*arguments)
    problem = judge_gradients((dq, dk, dv), q, k, v, tensors["dout"], True, 0.125, dlse=values["dlse"])
    assert problem is None, problem


@pytest.mark.xdist_group("compile")
def test_opcheck_of_the_forward_with_gradients() -> None:
    """Traced forward and backward agree with eager ones, also where shapes are symbols."""
    q, k, v = (x.requires_grad_() for x in draw(8, 2, 70, 90, 4, 2, 64))
    names = [argument.name for argument in torch.ops.flashhopper.forward.default._schema.arguments]
    values: dict[str, Any] = {"q": q, "k": k, "v": v, "sink": None, "softmax_scale": 0.125, "window_left": -1}
    values |= {"window_right": 0, "softcap": 0.0, "sm_margin": 0, "deterministic": True, "backend": "hopper"}
    values["pack_gqa"] = True
    torch.library.opcheck(torch.ops.flashhopper.forward.default, tuple(values[name] for name in names))


def test_second_derivative_is_refused_by_name() -> None:
    q, k, v = (x.requires_grad_() for x in draw(9, 1, 64, 64, 2, 2, 64))
    out = flashhopper.flash_attn_func(q, k, v)
    (first,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.float().sum().backward()


def test_backward_twice_needs_the_graph() -> None:
    """A graph that is kept gives the same again; one that is not raises torch's own error."""
    q, k, v = draw(10, 2, 200, 200, 4, 2, 128)
    dout = draw_dout(10, q, v)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flashhopper.flash_attn_func(*leaves, causal=True, deterministic=True)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for mine, right in zip(torch.autograd.grad(out, leaves, dout), first, strict=True):
        assert_equal_bits(mine, right)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves, dout)


def test_inputs_changed_before_the_backward() -> None:
    """q overwritten in place after the forward: autograd must notice."""
    leaf = draw(11, 1, 64, 64, 2, 2, 64)[0].requires_grad_()
    _, k, v = draw(11, 1, 64, 64, 2, 2, 64)
    q = leaf * 1
    out = flashhopper.flash_attn_func(q, k, v)
    q.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()  # type: ignore[union-attr]


def test_gradients_accumulate() -> None:
    """Two backward passes into the same leaves add up; shared inputs get the sum of their parts."""
    q, k, v = draw(12, 1, 200, 200, 4, 4, 128)
    dout = draw_dout(12, q, v)
    single = gradients(q, k, v, dout, True, deterministic=True)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    for _ in range(2):
        flashhopper.flash_attn_func(*leaves, causal=True, deterministic=True).backward(dout)
    for leaf, once in zip(leaves, single, strict=True):
        assert leaf.grad is not None
        assert_equal_bits(leaf.grad, 2 * once)
    shared = q.detach().requires_grad_()
    dq, dk, dv = gradients(q, q, q, dout, True, deterministic=True)
    (total,) = torch.autograd.grad(
        flashhopper.flash_attn_func(shared, shared, shared, causal=True, deterministic=True), shared, dout
    )
    expected = dq.double() + dk.double() + dv.double()
    assert (total.double() - expected).abs().max().item() <= 2**-7 * expected.abs().max().item()


def test_flop_counter() -> None:
    """Five GEMMs backward where the forward has two."""
    q, k, v = (x.requires_grad_() for x in draw(13, 2, 128, 128, 4, 2, 64))
    with FlopCounterMode(display=False) as counter:
        out = flashhopper.flash_attn_func(q, k, v)
        forward = counter.get_total_flops()
        out.sum().backward()  # type: ignore[union-attr]
    assert counter.get_total_flops() == 3.5 * forward


def test_explain_names_the_gradient() -> None:
    q, k, v = draw(14, 2, 1024, 1024, 16, 4, 128)
    plan = flashhopper.explain(q, k, v, causal=True)
    assert plan.gradients.startswith("hopper")
    assert plan.gradients in str(plan)
    flashhopper.set_backend("tiled")
    assert not flashhopper.explain(q, k, v, causal=True).gradients.startswith("hopper")
