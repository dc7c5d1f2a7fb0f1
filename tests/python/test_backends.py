"""Which engine serves a call, and why: every reason, broken installations, explain()."""

from __future__ import annotations

import pytest
import torch
from fake_module import FakeModule

import flashhopper as fh
from flashhopper import backends
from flashhopper.engine import hopper

BF16 = torch.bfloat16


class Query:
    """What resolve() looks at in a tensor."""

    def __init__(self, device: str = "cuda:0", dtype: torch.dtype = BF16) -> None:
        self.device, self.dtype = torch.device(device), dtype

    def get_device(self) -> int:
        return -1 if self.device.index is None else self.device.index


def resolve(requested: str, query: Query, dim: int = 128, dim_v: int = 128, **rest: object) -> bool:
    options = {
        "window_left": -1,
        "window_right": 0,
        "softcap": 0.0,
        "has_sink": False,
        "is_packed": False,
        "softmax_scale": 0.1,
        **rest,
    }
    return backends.resolve(requested, query, dim, dim_v, **options)  # type: ignore[arg-type]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda:0 is a Hopper, cuda:1 an Ada, and the module loads."""
    monkeypatch.setattr(hopper, "module", FakeModule())
    monkeypatch.setattr(hopper, "load_error", "")
    capabilities = {torch.device("cuda", 0): (9, 0), torch.device("cuda", 1): (8, 9)}
    monkeypatch.setattr(hopper, "_capabilities", capabilities)


@pytest.mark.usefixtures("machine")
def test_the_kernels_serve() -> None:
    for dtype in (torch.float16, BF16):
        for dim, dim_v in ((8, 8), (64, 64), (72, 40), (128, 128), (192, 128), (256, 256), (64, 256)):
            assert resolve("auto", Query(dtype=dtype), dim, dim_v)
            assert resolve("hopper", Query(dtype=dtype), dim, dim_v, window_right=-1)
    assert not resolve("tiled", Query())


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("is_backward", [False, True])
def test_every_option_is_served(is_backward: bool) -> None:
    for options in (
        {"window_left": 5},
        {"window_right": 3},
        {"softcap": 1e-3},
        {"softcap": 1e3},
        {"has_sink": True},
        {"is_packed": True},
        {"window_left": 0, "window_right": 7, "softcap": 30.0, "has_sink": True, "is_packed": True},
    ):
        assert resolve("auto", Query(), is_backward=is_backward, **options)
        # Above head_dim 128 gradients take no small caps.
        wide = (192, 128) if options.get("softcap") != 1e-3 or not is_backward else (128, 64)
        assert resolve("hopper", Query(), *wide, is_backward=is_backward, **options)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("query", "options", "reason"),
    [
        (Query("cpu"), {}, "q is on cpu, not on a CUDA device"),
        (Query("cuda:1"), {}, "cuda:1 has compute capability 8.9, the kernels need 9.0"),
        (Query(dtype=torch.float32), {}, "q has dtype torch.float32, the kernels take float16 and bfloat16"),
        (Query(), {"dim": 100}, "head_dim is 100, the kernels take multiples of 8 up to 256"),
        (Query(), {"dim_v": 264}, "head_dim_v is 264, the kernels take multiples of 8 up to 256"),
        (Query(), {"softcap": 1e-4}, r"softcap is 0.0001, the kernels take 0.0 \(none\) and 0.001 to 1000.0"),
        (Query(), {"softcap": 2e3}, "softcap is 2000.0, the kernels take"),
        (Query(), {"softcap": 2e3, "is_backward": True}, "softcap is 2000.0, the kernels take"),
        (
            Query(),
            {"softcap": 0.5, "dim": 192, "is_backward": True},
            r"softcap is 0.5, the kernels take 0.0 \(none\) and 1.0 to",
        ),
        (Query(), {"softmax_scale": 0.0}, "softmax_scale is 0.0, the kernels take 1e-30 to 1e"),
        (Query(), {"softmax_scale": -0.1}, "softmax_scale is -0.1, the kernels take"),
        (Query(), {"softmax_scale": 1e39}, "softmax_scale is 1e"),
    ],
)
def test_reasons(query: Query, options: dict[str, object], reason: str) -> None:
    for _ in range(2):  # the second answer comes from memory
        assert not resolve("auto", query, **options)
        with pytest.raises(RuntimeError, match=f'backend "hopper" cannot serve this call: {reason}'):
            resolve("hopper", query, **options)


@pytest.mark.usefixtures("machine")
def test_a_build_with_few_head_sizes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeModule, "rows", ((128, 128),))
    assert resolve("auto", Query(), 64, 64)
    assert not resolve("auto", Query(), 192, 128)
    with pytest.raises(
        RuntimeError,
        match=r"no forward kernel was built for bf16 with head_dim 192 and head_dim_v 128 \(built, up to: 128/128\)",
    ):
        resolve("hopper", Query(), 192, 128)


@pytest.mark.usefixtures("machine")
def test_forward_and_backward_are_served_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeModule, "rows", ((128, 128),))
    monkeypatch.setattr(FakeModule, "backward_rows", ((64, 64), (256, 256)))
    assert resolve("auto", Query(), 64, 64, is_backward=True)
    assert resolve("auto", Query(), 256, 192, is_backward=True)
    assert not resolve("auto", Query(), 256, 192)
    monkeypatch.setattr(FakeModule, "backward_rows", ((64, 64),))
    backends.forget()
    assert resolve("hopper", Query(), 128, 128)
    assert not resolve("auto", Query(), 128, 128, is_backward=True)
    with pytest.raises(
        RuntimeError,
        match=r"no backward kernel was built for bf16 with head_dim 128 and head_dim_v 128 \(built, up to: 64/64\)",
    ):
        resolve("hopper", Query(), 128, 128, is_backward=True)


@pytest.mark.usefixtures("machine")
def test_a_broken_installation_on_a_hopper_gpu_is_no_silent_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "module", None)
    monkeypatch.setattr(hopper, "load_error", "ImportError: libflashhopper.so: cannot open")
    with pytest.raises(RuntimeError, match=r"did not load: ImportError: libflashhopper.so.*flashhopper doctor.*tiled"):
        resolve("auto", Query())
    with pytest.raises(RuntimeError, match='backend "hopper" cannot serve this call: the compiled module'):
        resolve("hopper", Query())
    assert not resolve("tiled", Query())
    assert not resolve("auto", Query(), softcap=1e4)  # the tiled engine's whatever the installation
    assert not resolve("auto", Query("cuda:1"))
    assert not resolve("auto", Query("cpu"))


def test_no_gpu_at_all() -> None:
    assert hopper.capability(torch.device("cuda", 63)) is None
    with pytest.raises(RuntimeError, match="no CUDA device answers for cuda:63"):
        resolve("hopper", Query("cuda:63"))


def test_set_backend() -> None:
    assert fh.backend() == "auto"
    fh.set_backend("tiled")
    assert fh.backend() == "tiled"
    with fh.set_backend("hopper"):
        assert fh.backend() == "hopper"
        with fh.set_backend("auto"):
            assert fh.backend() == "auto"
        assert fh.backend() == "hopper"
    assert fh.backend() == "tiled"
    with pytest.raises(ValueError, match="backend is 'cuda': must be one of 'auto', 'hopper', 'tiled'"):
        fh.set_backend("cuda")
    with pytest.raises(KeyError), fh.set_backend("auto"):
        raise KeyError
    assert fh.backend() == "tiled"


def test_hopper_where_it_cannot_run() -> None:
    q = torch.randn(1, 4, 2, 8)
    cu = torch.tensor([0, 4]).int()
    with fh.set_backend("hopper"):
        with pytest.raises(RuntimeError, match='backend "hopper" cannot serve this call: q is on cpu'):
            fh.flash_attn_func(q, q, q)
        with pytest.raises(RuntimeError, match='backend "hopper" cannot serve this call: q is on cpu'):
            fh.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 4, 4)
        assert "the call would raise RuntimeError, q is on cpu" in fh.explain(q, q, q).why


def test_explain_tiled() -> None:
    q, k = torch.randn(2, 100, 8, 64), torch.randn(2, 50, 2, 64)
    plan = fh.explain(q, k, k[..., :32], causal=True)
    assert (plan.backend, plan.requested, plan.grid, plan.copies) == ("tiled", "auto", 0, ())
    assert plan.why == "q is on cpu, not on a CUDA device"
    kept = sum(max(0, i - 49) for i in range(100))
    assert plan.flops == 2 * 8 * kept * 2 * (64 + 32)
    sizes = 2 * 100 * 8 * 64 + 2 * 50 * 2 * (64 + 32) + 2 * 100 * 8 * 32 + 2 * 8 * 100
    assert plan.bytes == 4 * sizes
    for text in ("batch 2, 8 heads on 2 KV heads, seqlen_q 100, seqlen_k 50", "causal", "gradients  tiled engine"):
        assert text in str(plan)
    assert fh.explain(q, k, k, window_size=(3, 2)).problem.count("window (3, 2)") == 1
    with fh.set_backend("tiled"):
        assert fh.explain(q, k, k).why == "asked for by name"


def test_explain_says_loudly_that_the_module_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "module", None)
    monkeypatch.setattr(hopper, "load_error", "ImportError: broken")
    q = torch.randn(1, 4, 2, 8)
    assert "THE COMPILED MODULE DID NOT LOAD: ImportError: broken" in str(fh.explain(q, q, q))
    assert isinstance(fh.flash_attn_func(q, q, q), torch.Tensor)


def test_explain_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    from fake_module import install

    module = install(monkeypatch)
    q, k = torch.randn(2, 100, 8, 128).bfloat16(), torch.randn(2, 50, 2, 128).bfloat16()
    plan = fh.explain(q, k, k, causal=True, sm_margin=2)
    assert module.plan_arguments == ((2, 8, 2, 100, 50, 128, 128, -1, 0), FakeModule.BF16, 2, 132)
    assert (plan.backend, plan.config, plan.tile_m, plan.tile_n) == ("hopper", "fwd_hd128_m128_n160", 128, 160)
    assert (plan.grid, plan.tiles, plan.splits, plan.smem_bytes, plan.workspace_bytes) == (132, 64, 1, 200000, 130)
    assert "132 thread blocks of 384 threads" in str(plan)
    assert module.backward_plans[-1] == ((2, 8, 2, 100, 50, 128, 128, -1, 0), FakeModule.BF16, 2, False, 132)
    text = "hopper, bwd_hd128_m128_n160: 64 tiles of 160 keys, 132 thread blocks, 200000 bytes of shared memory"
    assert plan.gradients == f"{text}, 4321 of workspace; dq summed in the order of arrival"
    assert plan.gradients in str(plan)
    assert "in a fixed order, bit-reproducible" in fh.explain(q, k, k, deterministic=True).gradients
    with fh.set_backend("tiled"):
        assert "tiled engine" in fh.explain(q, k, k).gradients
    assert fh.explain(q, k, k, window_size=(3, 0)).gradients.startswith("hopper, bwd_hd128")
    assert module.calls == module.backward_calls == []


def test_explain_without_a_backward_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from fake_module import install

    module = install(monkeypatch)
    module.backward_rows = ((64, 64),)
    q = torch.randn(2, 100, 8, 128).bfloat16()
    plan = fh.explain(q, q, q)
    assert plan.backend == "hopper"
    assert "tiled engine" in plan.gradients
    assert fh.explain(q[..., :64], q[..., :64], q[..., :64]).gradients.startswith("hopper, bwd_hd64")
