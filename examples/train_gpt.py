"""Trains a small byte-level GPT on this repository's own pages, once with flashhopper's attention and twice with
torch's, and compares the loss curves.

    python examples/train_gpt.py [--steps 200] [--device cpu|cuda]

The three runs share initial weights and batches. Two of them use scaled_dot_product_attention with different kernels
that compute the same, so what they differ by is what rounding does to a training run; flashhopper's run may differ by
a few times that. The first step's gradients are compared in the same way, before training has blurred anything. Exit
code 1 where either comparison fails. On a GPU the model runs under bf16 autocast, on a CPU in fp32 on the tiled engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashhopper

ROOT = Path(__file__).resolve().parent.parent
OURS, REFERENCE, EQUIVALENT = "flashhopper", "SDPA", "SDPA, math kernels"
# One pair of equivalent runs is one sample of what rounding does: allow a few times that, and a little (nats, and parts
# of the gradient's norm) where it happens to be nothing.
ALLOWED_RATIO = 4.0
LEAST = {"cuda": (0.02, 1e-3), "cpu": (1e-3, 1e-5)}
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Settings:
    """What a run is made of; two runs of equal settings differ in their attention alone."""

    device: str
    steps: int = 200
    seed: int = 0
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    seqlen: int = 512
    batch: int = 16
    learning_rate: float = 1e-3

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def attend_flashhopper(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = flashhopper.flash_attn_func(q, k, v, causal=True)
    assert isinstance(out, torch.Tensor)
    return out


def attend_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if q.is_cuda else contextlib.nullcontext():
        return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


def attend_math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, settings: Settings, attend: Attend) -> None:
        super().__init__()
        self.settings, self.attend = settings, attend
        width, s = settings.width, settings
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (s.heads + 2 * s.kv_heads) * s.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = self.settings
        fused = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, s.head_dim))
        q, k, v = fused.split((s.heads, s.kv_heads, s.kv_heads), dim=2)  # views: flashhopper reads them where they lie
        x = x + self.out(self.attend(q, k, v).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nn.Module):
    """Byte-level language model with learned positions."""

    def __init__(self, settings: Settings, attend: Attend) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, settings.width)
        self.positions = nn.Embedding(settings.seqlen, settings.width)
        self.blocks = nn.ModuleList(Block(settings, attend) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, 256, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) + self.positions(torch.arange(x.size(1), device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_text() -> torch.Tensor:
    """The repository's pages as bytes."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return torch.frombuffer(bytearray(b"\n".join(page.read_bytes() for page in pages)), dtype=torch.uint8).long()


@dataclass
class Run:
    """Loss of each step in nats a byte, and all gradients of the first step in one vector."""

    losses: torch.Tensor
    first_gradient: torch.Tensor


def train(settings: Settings, attend: Attend, text: torch.Tensor) -> Run:
    torch.manual_seed(settings.seed)
    model = Gpt(settings, attend).to(settings.device)  # made on the CPU: the same weights on every device
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.1)
    batches = torch.Generator().manual_seed(settings.seed)
    offsets = torch.arange(settings.seqlen + 1)
    losses, first_gradient = [], torch.empty(0)
    for step in range(settings.steps):
        for group in optimizer.param_groups:  # warm-up
            group["lr"] = settings.learning_rate * min(1.0, (step + 1) / 20)
        starts = torch.randint(len(text) - settings.seqlen, (settings.batch, 1), generator=batches)
        window = text[starts + offsets].to(settings.device)
        with torch.autocast(settings.device, torch.bfloat16, enabled=settings.device == "cuda"):
            logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if step == 0:
            first_gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return Run(torch.stack(losses).cpu(), first_gradient.cpu())


def smoothed(losses: torch.Tensor) -> torch.Tensor:
    """Means over a tenth of the run, so that single batches do not decide."""
    return losses.unfold(0, max(1, len(losses) // 10), 1).mean(-1)


@dataclass
class Comparison:
    """flashhopper against SDPA, and what may lie between them."""

    loss_difference: float
    loss_allowed: float
    gradient_difference: float
    gradient_allowed: float

    @property
    def agrees(self) -> bool:
        """NaN never does."""
        return self.loss_difference <= self.loss_allowed and self.gradient_difference <= self.gradient_allowed


def compare(runs: dict[str, Run], device: str) -> Comparison:
    least_loss, least_gradient = LEAST[device]

    def loss_difference(name: str) -> float:
        return float((smoothed(runs[name].losses) - smoothed(runs[REFERENCE].losses)).abs().max())

    def gradient_difference(name: str) -> float:
        reference = runs[REFERENCE].first_gradient
        return float((runs[name].first_gradient - reference).norm() / reference.norm())

    return Comparison(
        loss_difference(OURS),
        max(least_loss, ALLOWED_RATIO * loss_difference(EQUIVALENT)),
        gradient_difference(OURS),
        max(least_gradient, ALLOWED_RATIO * gradient_difference(EQUIVALENT)),
    )


def train_all(settings: Settings) -> dict[str, Run]:
    text = read_text()
    attends = {OURS: attend_flashhopper, REFERENCE: attend_sdpa, EQUIVALENT: attend_math}
    return {name: train(settings, attend, text) for name, attend in attends.items()}


def engine(settings: Settings) -> str:
    """What serves the attention of this model, and its gradients."""
    dtype = torch.bfloat16 if settings.device == "cuda" else torch.float32
    shape = (settings.batch, settings.seqlen, settings.heads, settings.head_dim)
    q = torch.empty(shape, dtype=dtype, device=settings.device)
    plan = flashhopper.explain(q, q[:, :, : settings.kv_heads], q[:, :, : settings.kv_heads], causal=True)
    return f"{plan.backend}; gradients {plan.gradients}"


def loss_table(runs: dict[str, Run]) -> Table:
    table = Table(title="Loss, nats a byte, mean of a tenth of the run")
    for column in ("steps", *runs, "flashhopper - SDPA"):
        table.add_column(column, justify="right")
    curves = {name: smoothed(run.losses) for name, run in runs.items()}
    width, count = max(1, len(runs[OURS].losses) // 10), len(curves[OURS])
    for index in sorted({round(i * (count - 1) / 9) for i in range(10)}):
        values = [f"{curve[index]:.4f}" for curve in curves.values()]
        difference = f"{curves[OURS][index] - curves[REFERENCE][index]:+.5f}"
        table.add_row(f"{index + 1}-{index + width}", *values, difference)
    return table


def main(
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps of each run")] = 200,
    device: Annotated[str, typer.Option(help="cuda or cpu; default: a GPU where there is one")] = "",
    seed: Annotated[int, typer.Option()] = 0,
    layers: Annotated[int, typer.Option(min=0, help="0: 4 on a GPU, 2 on a CPU")] = 0,
    seqlen: Annotated[int, typer.Option(min=0, help="0: 512 on a GPU, 64 on a CPU")] = 0,
    batch: Annotated[int, typer.Option(min=0, help="0: 16 on a GPU, 8 on a CPU")] = 0,
    learning_rate: Annotated[float, typer.Option()] = 1e-3,
) -> None:
    """Trains a small GPT with flashhopper and with torch's attention; exit code 1 where the loss curves differ."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        settings = Settings(device, steps, seed, layers or 4, 8, 4, 64, seqlen or 512, batch or 16, learning_rate)
    else:
        settings = Settings(device, steps, seed, layers or 2, 4, 2, 16, seqlen or 64, batch or 8, learning_rate)
    console = Console()
    console.print(
        f"{settings.layers} layers, {settings.heads} query and {settings.kv_heads} key/value heads of"
        f" {settings.head_dim}, {settings.batch} x {settings.seqlen} bytes a step, {device}"
    )
    console.print(f"flashhopper {flashhopper.__version__}: {engine(settings)}\n")
    runs = train_all(settings)
    console.print(loss_table(runs))
    found = compare(runs, device)
    console.print(
        f"largest difference of the curves {found.loss_difference:.5f} nats ({found.loss_allowed:.5f} allowed:"
        f" {ALLOWED_RATIO:g} times that of two SDPA kernels, or {LEAST[device][0]:g})\n"
        f"first gradient differs by {found.gradient_difference:.2e} of its norm ({found.gradient_allowed:.2e} allowed)"
    )
    if not found.agrees:
        console.print("[bold red]flashhopper and SDPA do not train alike")
        raise typer.Exit(1)
    console.print("[bold green]flashhopper and SDPA train alike")


if __name__ == "__main__":
    typer.run(main)
