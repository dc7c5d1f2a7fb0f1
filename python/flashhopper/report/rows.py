"""What the report measures, as typed rows, and its JSON. Before it: collect.py; after it: verdict.py, plots.py,
render.py.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA_VERSION = 1
EMULATED = "emulated"


@dataclass(frozen=True)
class Row:
    """One contender on one problem, against float64 on the same 16-bit inputs."""

    contender: str
    family: str
    layer: str  # of a real model; "" for synthetic inputs
    head_dim: int
    seqlen_q: int  # the last ones of the sequence
    seqlen_k: int
    heads: int
    kv_heads: int
    causal: bool
    engine: str  # "hopper", "tiled", "emulated" or "torch"
    emulated: bool  # an 8-bit row that the kernels did not compute
    why: str  # this engine
    rmse: float
    relative_rmse: float  # rmse / rms(reference)
    max_error: float
    cosine: float
    ratio: float | None  # relative rmse over that of FA3's scales
    judged: float | None  # the figure that the target is about: ratio, or relative rmse for vmean
    target: float | None  # the most that it may be

    @property
    def met(self) -> bool | None:
        """None where there is no target."""
        if self.judged is None or self.target is None:
            return None
        return self.judged <= self.target

    @property
    def case(self) -> str:
        """The problem, in a few words."""
        return self.layer or f"{short_length(self.seqlen_k)}, d{self.head_dim}"


@dataclass(frozen=True)
class AblationRow:
    """accurate() with one field changed, on one problem."""

    variant: str  # "rotate=False"
    text: str
    family: str
    layer: str
    head_dim: int
    seqlen_q: int
    seqlen_k: int
    accumulation: str  # "float32", or "14bit": the model of Hopper's 8-bit accumulator
    engine: str
    emulated: bool
    relative_rmse: float
    baseline: float  # relative rmse of accurate() itself, computed likewise
    ratio: float | None


@dataclass(frozen=True)
class AccumulationRow:
    """Growth of the error with the context, in the model of Hopper's 8-bit accumulator; emulated."""

    variant: str
    two_level: bool
    family: str
    seqlen_k: int
    seqlen_q: int
    head_dim: int
    relative_rmse: float
    emulated: bool = True


@dataclass(frozen=True)
class SpeedRow:
    """Device time of one contender; only where the Hopper kernels serve."""

    contender: str
    seqlen: int
    batch: int
    heads: int
    head_dim: int
    causal: bool
    kernel_ms: float  # attention alone
    quantize_ms: float  # 0 for 16 bit
    tflops: float  # of the attention kernel
    relative_rmse: float | None  # on `normal` inputs of this length and head_dim, where measured


@dataclass(frozen=True)
class Histogram:
    """Errors of single elements, |out - reference| / rms(reference), of one problem."""

    contender: str
    family: str
    layer: str
    head_dim: int
    seqlen_k: int
    edges: tuple[float, ...]  # log10, one more than shares
    shares: tuple[float, ...]  # of elements; the first and last bins take what lies beyond


@dataclass(frozen=True)
class ScaleMap:
    """Scales of accurate()'s keys and values, a row a (batch, KV head), a column a block of `block` keys."""

    family: str
    layer: str
    head_dim: int
    seqlen_k: int
    block: int
    k_scale: tuple[tuple[float, ...], ...]
    v_scale: tuple[tuple[float, ...], ...]


@dataclass
class Report:
    """Everything measured in one run."""

    environment: dict[str, str]
    settings: dict[str, Any]
    contenders: dict[str, dict[str, str]]  # name -> label, text
    rows: list[Row] = field(default_factory=list)
    ablation: list[AblationRow] = field(default_factory=list)
    accumulation: list[AccumulationRow] = field(default_factory=list)
    speed: list[SpeedRow] = field(default_factory=list)
    histograms: list[Histogram] = field(default_factory=list)
    scales: list[ScaleMap] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def has_emulated(self) -> bool:
        """Whether any 8-bit row did not come from a kernel."""
        return any(row.emulated for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: numbers that are not finite become null."""
        rows = [{**asdict(row), "met": row.met} for row in self.rows]
        plain = {**asdict(self), "rows": rows}
        found = _finite({"schema_version": SCHEMA_VERSION, **plain})
        assert isinstance(found, dict)
        return found


def _finite(x: object) -> object:
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, dict):
        return {key: _finite(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_finite(value) for value in x]
    return x


def short_length(seqlen: int) -> str:
    """2048 -> "2k"."""
    return f"{seqlen // 1024}k" if seqlen >= 1024 and seqlen % 1024 == 0 else str(seqlen)
