"""Measures the report's rows. Before it: command.py; after it: contenders.py, speed.py, rows.py.

A problem is drawn once, its float64 reference is computed once, and every contender and every variant of the ablation
that the problem is due meets both.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch

from ..engine import hopper
from ..engine.reference import reference_attention
from ..fp8 import Fp8Recipe
from ..fp8.attention import quantize_fp8
from ..testing import FAMILIES, ErrorMetrics, Inputs, LlmLayer, error_metrics, make_inputs
from . import contenders as c
from . import speed
from .rows import EMULATED, AblationRow, AccumulationRow, Histogram, Report, Row, ScaleMap

ALL_QUERIES = 2048  # up to this length every query is computed, above it the last BLOCK_QUERIES
BLOCK_QUERIES = 128
ABLATION_LENGTH, ABLATION_HEAD_DIM = 2048, 128  # taken where the settings have them
SCALE_HEADS, SCALE_LENGTH = 8, 16384  # of the drawn scales: heads, and the longest context
MODEL_QUERIES, MODEL_HEAD_DIM = 16, 64  # of rows in the model of the accumulator, which is slow
REFERENCE_SCORES = 1 << 25  # float64 scores held at once
BIN_EDGES = tuple(-6.0 + 0.125 * i for i in range(51))  # log10 of the error of an element

Watch = Callable[[int, int, str], None]  # steps done, steps in all, what comes next

_BEST = Fp8Recipe.accurate()
# Every field of the recipe, switched off or coarser.
ABLATIONS: tuple[tuple[str, str, Fp8Recipe], ...] = (
    ("qk_format='e4m3'", "queries and keys in e4m3 in place of int8", replace(_BEST, qk_format="e4m3")),
    (
        "power_scales=True",
        "queries and keys in e4m3, scales of keys in powers of two",
        replace(_BEST, qk_format="e4m3", power_scales=True),
    ),
    ("rotate=False", "no rotation", replace(_BEST, rotate=False)),
    ("rotate_block=4", "rotation of four columns at a time", replace(_BEST, rotate_block=4)),
    ("smooth_k=False", "keys not smoothed", replace(_BEST, smooth_k=False)),
    ("center_v=False", "values not centred", replace(_BEST, center_v=False)),
    ("q_block=128", "a scale for 128 rows of queries", replace(_BEST, q_block=128)),
    ("q_block=0", "one scale a head of queries", replace(_BEST, q_block=0)),
    ("k_block=0", "one scale a head of keys", replace(_BEST, k_block=0)),
    ("v_block=0", "one scale a head of values", replace(_BEST, v_block=0)),
    ("seed=0", "other signs of the rotation", replace(_BEST, seed=0)),
)
ONE_LEVEL = ("two_level=False", "one-level sums", replace(_BEST, two_level=False))
ACCUMULATIONS: tuple[tuple[str, Fp8Recipe], ...] = (
    ("FA3's scales, one level", c.FA3),
    ("not centred, one level", replace(_BEST, center_v=False, two_level=False)),
    ("not centred, two levels", replace(_BEST, center_v=False)),
    ("accurate(), one level", replace(_BEST, two_level=False)),
    ("accurate()", _BEST),
)


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    recipes: tuple[str, ...] = c.RECIPES
    families: tuple[str, ...] = FAMILIES
    lengths: tuple[int, ...] = (512, 2048, 8192)
    head_dims: tuple[int, ...] = (128,)
    heads: int = 1
    causal: bool = True
    seed: int = 1
    device: str = "cpu"
    ablation: bool = True


def collect(settings: Settings, layers: tuple[LlmLayer, ...] = (), watch: Watch | None = None) -> Report:
    """Run everything.

    Args:
        layers: problems of a real model besides the families; moved to the device, float32 and wider become bfloat16.
        watch: called before every step.
    """
    compared = c.contenders(settings.recipes)
    report = Report(
        _environment(settings), asdict(settings), {x.name: {"label": x.label, "text": x.text} for x in compared}
    )
    report.settings["layers"] = [layer.name for layer in layers]
    steps = _Steps(_count(settings, layers, len(compared)), watch)
    with torch.no_grad():
        for problem in _problems(settings, layers):
            _measure(report, settings, problem, compared, steps)
        if settings.ablation:
            report.accumulation.extend(_accumulation(settings, steps))
        if speed.is_served(settings.device):
            report.speed.extend(speed.measure(settings, compared, report.rows, steps.next))
    report.notes.extend(_notes(report, settings))
    return report


class _Steps:
    def __init__(self, total: int, watch: Watch | None) -> None:
        self.done, self.total, self.watch = 0, total, watch

    def next(self, text: str) -> None:
        if self.watch is not None:
            self.watch(self.done, self.total, text)
        self.done += 1


def _count(settings: Settings, layers: tuple[LlmLayer, ...], compared: int) -> int:
    synthetic = len(settings.families) * len(settings.lengths) * len(settings.head_dims)
    total = (synthetic + len(layers)) * (compared + 1)
    if settings.ablation:
        ablated = len(settings.families) + len(layers)
        total += ablated * (len(ABLATIONS) + 1) + len(settings.lengths) * len(ACCUMULATIONS)
    if speed.is_served(settings.device):
        total += speed.count(settings) * compared
    return total


def queries_of(seqlen: int) -> int:
    """Queries that are computed for a sequence of this length: the last ones."""
    return seqlen if seqlen <= ALL_QUERIES else BLOCK_QUERIES


def _problems(settings: Settings, layers: tuple[LlmLayer, ...]) -> Iterator[c.Problem]:
    device = torch.device(settings.device)
    for layer in layers:
        q, k, v = _sixteen_bits(layer.inputs, device)
        some = Inputs(q[:, -queries_of(q.shape[1]) :], k, v)  # masks are aligned at the last query and key
        yield c.Problem("llm", some, layer.softmax_scale, layer.window_size, True, layer.name)
    for family in settings.families:
        for head_dim in settings.head_dims:
            for seqlen in settings.lengths:
                inputs = make_inputs(
                    family,
                    seqlen_q=queries_of(seqlen),
                    seqlen_k=seqlen,
                    heads=settings.heads,
                    head_dim=head_dim,
                    device=device,
                    seed=settings.seed,
                )
                yield c.Problem(family, inputs, head_dim**-0.5, (-1, -1), settings.causal)


def _sixteen_bits(inputs: Inputs, device: torch.device) -> Inputs:
    dtype = inputs.q.dtype if inputs.q.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
    return Inputs(*(x.to(device=device, dtype=dtype) for x in inputs))


def reference(problem: c.Problem) -> torch.Tensor:
    """The float64 oracle, some rows of one head at a time: the scores of a long context do not fit memory together."""
    q, k, v = problem.inputs
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, group = k.shape[1], heads // k.shape[2]
    out = torch.empty(batch, seqlen_q, heads, v.shape[3], dtype=torch.float64, device=q.device)
    step = max(1, REFERENCE_SCORES // max(seqlen_k, 1))
    is_closed = problem.causal or problem.window_size[1] == 0
    for h in range(heads):
        own = slice(h // group, h // group + 1)
        for begin in range(0, seqlen_q, step):
            end = min(begin + step, seqlen_q)
            # Masks are aligned at the last query and key: later keys go with the later queries, which see them alone.
            keys = seqlen_k - (seqlen_q - end) if is_closed else seqlen_k
            some = (q[:, begin:end, h : h + 1], k[:, : max(keys, 0), own], v[:, : max(keys, 0), own])
            if not is_closed and (begin, end) != (0, seqlen_q) and problem.window_size != (-1, -1):
                raise ValueError(f"window_size is {problem.window_size}: an open window needs {seqlen_k} keys at once")
            out[:, begin:end, h : h + 1] = reference_attention(*some, **problem.options())[0]  # type: ignore[arg-type]
    return out


def _measure(
    report: Report, settings: Settings, problem: c.Problem, compared: tuple[c.Contender, ...], steps: _Steps
) -> None:
    title = _title(problem)
    steps.next(f"{title}: float64")
    exact = reference(problem)
    is_shown = _is_shown(settings, problem)
    outcomes: dict[str, tuple[c.Outcome, ErrorMetrics]] = {}
    for contender in compared:
        steps.next(f"{title}: {contender.label}")
        outcome = contender.attend(problem)
        outcomes[contender.name] = (outcome, error_metrics(outcome.out, exact))
        if is_shown:
            report.histograms.append(_histogram(contender.name, problem, outcome.out, exact))
    baseline = outcomes[c.BASELINE][1].relative_rmse
    report.rows.extend(
        _row(problem, contender, outcome, errors, baseline)
        for contender, (outcome, errors) in zip(compared, outcomes.values(), strict=True)
    )
    if is_shown:
        report.scales.append(_scale_map(settings, problem))
    if settings.ablation and (problem.layer or is_shown):
        mine = outcomes.get("accurate")
        errors = mine[1] if mine else error_metrics(c.attend_8bit(problem, _BEST).out, exact)
        report.ablation.extend(_ablation(problem, exact, errors.relative_rmse, steps))


def _title(problem: c.Problem) -> str:
    seqlen_k, head_dim = problem.inputs.k.shape[1], problem.inputs.q.shape[3]
    return f"{problem.layer or problem.family}, {seqlen_k} keys, head_dim {head_dim}"


def _is_shown(settings: Settings, problem: c.Problem) -> bool:
    """Whether a problem is the one of its family for histogram, scales and ablation."""
    if problem.layer:
        return True
    head_dim = ABLATION_HEAD_DIM if ABLATION_HEAD_DIM in settings.head_dims else settings.head_dims[0]
    length = ABLATION_LENGTH if ABLATION_LENGTH in settings.lengths else min(settings.lengths)
    return problem.inputs.q.shape[3] == head_dim and problem.inputs.k.shape[1] == length


def _row(problem: c.Problem, contender: c.Contender, outcome: c.Outcome, errors: ErrorMetrics, baseline: float) -> Row:
    q, k, _ = problem.inputs
    judged = c.judge(contender.name, problem.family, k.shape[1], errors.relative_rmse, baseline)
    return Row(
        contender.name,
        problem.family,
        problem.layer,
        q.shape[3],
        q.shape[1],
        k.shape[1],
        q.shape[2],
        k.shape[2],
        problem.causal,
        outcome.engine,
        outcome.engine == EMULATED,
        outcome.why,
        *errors,
        _over(errors.relative_rmse, baseline),
        judged and judged[0],
        judged and judged[1],
    )


def _over(error: float, baseline: float) -> float | None:
    return error / baseline if baseline > 0 else None


def _ablation(problem: c.Problem, exact: torch.Tensor, best: float, steps: _Steps) -> Iterator[AblationRow]:
    q, k, v = problem.inputs

    def row(
        variant: str, text: str, queries: int, sums: str, engine: str, error: float, baseline: float
    ) -> AblationRow:
        sizes = (q.shape[3], queries, k.shape[1])
        is_emulated = engine == EMULATED
        ratio = _over(error, baseline)
        where = (problem.family, problem.layer)
        return AblationRow(variant, text, *where, *sizes, sums, engine, is_emulated, error, baseline, ratio)

    for variant, text, recipe in ABLATIONS:
        steps.next(f"{_title(problem)}: accurate() with {variant}")
        outcome = c.attend_8bit(problem, recipe)
        error = error_metrics(outcome.out, exact).relative_rmse
        yield row(variant, text, q.shape[1], "float32", outcome.engine, error, best)
    # The accumulator's model is slow: the last queries will do, of the first KV head.
    variant, text, recipe = ONE_LEVEL
    steps.next(f"{_title(problem)}: accurate() with {variant}")
    count, group = min(q.shape[1], MODEL_QUERIES), q.shape[2] // k.shape[2]
    few = replace(problem, inputs=Inputs(q[:1, -count:, :group], k[:1, :, :1], v[:1, :, :1]))
    few_exact = exact[:1, -count:, :group]
    error, baseline = (error_metrics(c.attend_14bit(few, x), few_exact).relative_rmse for x in (recipe, _BEST))
    yield row(variant, text, count, "14bit", EMULATED, error, baseline)


def _accumulation(settings: Settings, steps: _Steps) -> Iterator[AccumulationRow]:
    for seqlen in settings.lengths:
        rows = min(seqlen, MODEL_QUERIES)
        inputs = make_inputs(
            "vmean", seqlen_q=rows, seqlen_k=seqlen, heads=1, head_dim=MODEL_HEAD_DIM, seed=settings.seed
        )
        moved = Inputs(*(x.to(settings.device) for x in inputs))
        problem = c.Problem("vmean", moved, MODEL_HEAD_DIM**-0.5, (-1, -1), False)
        exact = reference(problem)
        for variant, recipe in ACCUMULATIONS:
            steps.next(f"sums over {seqlen} keys: {variant}")
            error = error_metrics(c.attend_14bit(problem, recipe), exact).relative_rmse
            yield AccumulationRow(variant, recipe.two_level, "vmean", seqlen, rows, MODEL_HEAD_DIM, error)


def _histogram(name: str, problem: c.Problem, out: torch.Tensor, exact: torch.Tensor) -> Histogram:
    scale = exact.square().mean().sqrt().clamp(min=1e-300)
    logs = ((out.double() - exact).abs() / scale).clamp(min=1e-300).log10().flatten().cpu()
    inside = logs.nan_to_num(posinf=BIN_EDGES[-1], nan=BIN_EDGES[-1]).clamp(BIN_EDGES[0], BIN_EDGES[-1])
    counts = torch.histc(inside, bins=len(BIN_EDGES) - 1, min=BIN_EDGES[0], max=BIN_EDGES[-1])
    shares = tuple((counts / max(inside.numel(), 1)).tolist())
    q, k, _ = problem.inputs
    return Histogram(name, problem.family, problem.layer, q.shape[3], k.shape[1], BIN_EDGES, shares)


def _scale_map(settings: Settings, problem: c.Problem) -> ScaleMap:
    """Of a real layer as it is; of a family, more heads and a longer context than the rows have, to see a pattern."""
    q, k, v = problem.inputs
    if not problem.layer:
        length = max((n for n in settings.lengths if n <= SCALE_LENGTH), default=min(settings.lengths))
        q, k, v = make_inputs(
            problem.family,
            seqlen_q=1,
            seqlen_k=length,
            heads=SCALE_HEADS,
            head_dim=q.shape[3],
            device=settings.device,
            seed=settings.seed,
        )
    qkv = quantize_fp8(q[:, -1:], k, v, _BEST)  # scales of keys and values do not depend on queries: one will do
    scales = (tuple(map(tuple, x.flatten(0, 1).tolist())) for x in (qkv.k_scale, qkv.v_scale))
    return ScaleMap(problem.family, problem.layer, q.shape[3], k.shape[1], _BEST.k_block, *scales)


def _environment(settings: Settings) -> dict[str, str]:
    from .. import __version__

    device = torch.device(settings.device)
    name = torch.cuda.get_device_properties(device).name if device.type == "cuda" else "CPU"
    module = "loaded" if hopper.module is not None else f"did not load: {hopper.load_error}"
    return {
        "flashhopper": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
        "compiled module": module,
    }


def _notes(report: Report, settings: Settings) -> Iterator[str]:
    reasons = sorted({row.why for row in report.rows if row.emulated})
    if reasons:
        why = "; ".join(reasons)
        yield f"Rows marked emulated were computed by torch operations with the arithmetic of the 8-bit kernels: {why}."
    if max((row.seqlen_k for row in report.rows), default=0) > ALL_QUERIES:
        yield f"Above {ALL_QUERIES} keys the last {BLOCK_QUERIES} queries of the sequence are computed."
    if any(row.seqlen_k < c.TARGETS_FROM for row in report.rows):
        yield f"Targets are stated for {c.TARGETS_FROM} keys and more; shorter rows are shown without a verdict."
    if settings.heads < 4 and any(row.seqlen_k > ALL_QUERIES for row in report.rows):
        yield (
            f"{settings.heads} head(s) of {BLOCK_QUERIES} queries are few: ratios at long contexts vary by several per "
            "cent with the draw, on peaky inputs by more. Pass --heads 8 for steadier verdicts."
        )
    if not report.speed:
        yield "Speed was not measured: no Hopper GPU with the compiled kernels served this run."
