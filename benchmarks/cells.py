"""Benchmark cells: one problem size each, their textual form and the named presets. Standard library only.

A cell reads `dtype:head_dim:mask:seqlen` plus optional `key=value` fields, with `bwd:` before it for the backward pass,
for example

    bf16:128:causal:8192                       16384 tokens in all, heads * head_dim = 2048
    bf16:192/128:full:4096                     head_dim of v differs
    bf16:128:causal:sq=300:sk=77:b=2:h=4:kvh=2
    bwd:bf16:128:causal:8192                   the gradients of the first
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

TOKENS = 16384  # batch * seqlen of a cell that names only its seqlen (the FA3 paper's workload)
WIDTH = 2048  # heads * head_dim, likewise

DTYPES = ("bf16", "fp16")
MASKS = ("full", "causal")
OPS = ("fwd", "bwd")
BACKWARD_FLOPS = 2.5  # five GEMMs where the forward has two


@dataclass(frozen=True)
class Cell:
    """Shape of one attention call: q is (batch, seqlen_q, heads, head_dim), v's last dimension is head_dim_v."""

    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    op: str = "fwd"

    @property
    def kept_scores(self) -> int:
        """Scores of one head that the mask keeps, counted exactly (bottom-right causal)."""
        if not self.causal:
            return self.seqlen_q * self.seqlen_k
        offset = self.seqlen_k - self.seqlen_q
        first = max(0, -offset)  # queries before this one see nothing
        rows = self.seqlen_q - first
        return rows * (first + offset + 1) + rows * (rows - 1) // 2 if rows > 0 else 0

    @property
    def flops(self) -> float:
        """Two GEMMs over the whole score matrix (backward: 2.5 times that), halved when causal: the convention of every
        published table."""
        return self._forward_flops * (BACKWARD_FLOPS if self.op == "bwd" else 1.0)

    @property
    def _forward_flops(self) -> float:
        whole = 2.0 * self.batch * self.heads * self.seqlen_q * self.seqlen_k * (self.head_dim + self.head_dim_v)
        if not self.causal:
            return whole
        if self.seqlen_q == self.seqlen_k:
            return whole / 2
        return 2.0 * self.batch * self.heads * self.kept_scores * (self.head_dim + self.head_dim_v)

    @property
    def name(self) -> str:
        dims = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        op = "" if self.op == "fwd" else f"{self.op}:"
        head = f"{op}{self.dtype}:{dims}:{'causal' if self.causal else 'full'}"
        square = self.seqlen_q == self.seqlen_k
        paper = paper_cell(self.dtype, self.head_dim, self.causal, self.seqlen_q, self.head_dim_v, self.op)
        if square and self == paper:
            return f"{head}:{self.seqlen_q}"
        size = str(self.seqlen_q) if square else f"sq={self.seqlen_q}:sk={self.seqlen_k}"
        groups = "" if self.kv_heads == self.heads else f":kvh={self.kv_heads}"
        return f"{head}:{size}:b={self.batch}:h={self.heads}{groups}"

    def as_row(self) -> dict[str, object]:
        """The fields of a record row that describe the shape (results schema)."""
        shape = {name: value for name, value in asdict(self).items() if name != "op"}
        return {**shape, "window": [-1, 0] if self.causal else [-1, -1]}


def paper_cell(
    dtype: str, head_dim: int, causal: bool, seqlen: int, head_dim_v: int | None = None, op: str = "fwd"
) -> Cell:
    """The cell with 16k tokens and heads * head_dim = 2048."""
    heads = max(1, WIDTH // head_dim)
    batch = max(1, TOKENS // max(1, seqlen))
    return Cell(dtype, head_dim, head_dim_v or head_dim, causal, batch, heads, heads, seqlen, seqlen, op)


def parse_cell(text: str) -> Cell:
    """Reads one cell; ValueError names the part that is wrong."""
    parts = text.strip().split(":")
    op = parts.pop(0) if parts[0] in OPS else "fwd"
    if len(parts) < 4:
        raise ValueError(
            f"cell {text!r}: expected [bwd:]dtype:head_dim:mask:seqlen[:key=value...], got {len(parts)} parts"
        )
    dtype, dims, mask = parts[:3]
    if dtype not in DTYPES:
        raise ValueError(f"cell {text!r}: dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if mask not in MASKS:
        raise ValueError(f"cell {text!r}: mask {mask!r} is not one of {', '.join(MASKS)}")
    head_dim, _, head_dim_v = dims.partition("/")
    fields: dict[str, int] = {}
    for part in parts[3:]:
        key, equals, value = part.partition("=")
        if not equals:
            key, value = "s", part
        if key not in ("s", "sq", "sk", "b", "h", "kvh"):
            raise ValueError(f"cell {text!r}: unknown field {key!r}; fields are sq, sk, b, h, kvh")
        fields[key] = int(value)
    seqlen_q = fields.get("sq", fields.get("s"))
    if seqlen_q is None:
        raise ValueError(f"cell {text!r}: no seqlen")
    base = paper_cell(dtype, int(head_dim), mask == "causal", seqlen_q, int(head_dim_v or head_dim))
    heads = fields.get("h", base.heads)
    return Cell(
        dtype=dtype,
        head_dim=base.head_dim,
        head_dim_v=base.head_dim_v,
        causal=base.causal,
        batch=fields.get("b", base.batch),
        heads=heads,
        kv_heads=fields.get("kvh", heads),
        seqlen_q=seqlen_q,
        seqlen_k=fields.get("sk", fields.get("s", seqlen_q)),
        op=op,
    )


SEQLENS = (2048, 8192, 16384)
DIMS = ((64, 64), (128, 128), (256, 256))
OTHER_DIMS = ((96, 96), (192, 192), (192, 128))
_Dims = tuple[tuple[int, int], ...]


def _grid(op: str, dtypes: tuple[str, ...], dims: _Dims, seqlens: tuple[int, ...]) -> list[Cell]:
    return [
        paper_cell(dtype, head_dim, causal, seqlen, head_dim_v, op)
        for dtype in dtypes
        for head_dim, head_dim_v in dims
        for causal in (False, True)
        for seqlen in seqlens
    ]


PRESETS: dict[str, list[Cell]] = {
    "issue2": _grid("fwd", DTYPES, DIMS, SEQLENS),
    # One cell per kernel of interest: enough to see whether a change helped.
    "quick": _grid("fwd", ("bf16",), DIMS, (8192,)),
    "head_dims": _grid("fwd", ("bf16",), OTHER_DIMS, (8192,)),
    "issue3": _grid("bwd", ("bf16",), DIMS, SEQLENS),
    "bwd_quick": _grid("bwd", ("bf16",), DIMS, (8192,)),
    "fp8": _grid("fwd", ("bf16",), DIMS, SEQLENS),  # the 16-bit inputs that 8-bit contenders quantise
    "bwd_head_dims": _grid("bwd", ("bf16",), OTHER_DIMS, (8192,)),
}


def parse_cells(text: str) -> list[Cell]:
    """A comma-separated list of cells and preset names, in order, without repeats."""
    cells: list[Cell] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        cells.extend(PRESETS[part] if part in PRESETS else [parse_cell(part)])
    if not cells:
        raise ValueError(f"no cells in {text!r}; presets are {', '.join(PRESETS)}")
    return list(dict.fromkeys(cells))
