"""The accuracy report: its numbers, its JSON, its page, and the page in a browser; bad options are refused by name."""

from __future__ import annotations

import html
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from flashhopper import Fp8Recipe, cli, reference_attention
from flashhopper.report import SCHEMA_VERSION, Report, collect, command, contenders, render, speed, verdict
from flashhopper.report.collect import Settings, reference
from flashhopper.report.contenders import Problem, judge
from flashhopper.report.rows import Row, SpeedRow
from flashhopper.testing import LlmLayer, error_metrics, make_inputs

SLICE = Path(__file__).parents[1] / "data/gemma3_270m_qkv_slice.safetensors"
TINY = ["--lengths", "64,160", "--head-dims", "16", "--heads", "2", "--device", "cpu"]
CONTENDERS = ["fp16", "bf16", "naive_fp16", "fa3", "accurate", "e4m3", "paper"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str, str]:
    """JSON, page and terminal output of one small run."""
    folder = tmp_path_factory.mktemp("report")
    paths = ["--html", str(folder / "out.html"), "--json", str(folder / "out.json")]
    result = CliRunner().invoke(cli.app, ["report", "--families", "normal,vmean", *TINY, *paths])
    assert result.exit_code == 0, result.output
    return json.loads((folder / "out.json").read_text()), (folder / "out.html").read_text(), result.stdout


def test_json_has_every_row_and_all_of_them_finite(written: tuple[dict, str, str]) -> None:
    found = written[0]
    assert found["schema_version"] == SCHEMA_VERSION == 1
    assert list(found["contenders"]) == CONTENDERS
    keys = [(row["family"], row["seqlen_k"], row["contender"]) for row in found["rows"]]
    assert keys == [(f, n, c) for f in ("normal", "vmean") for n in (64, 160) for c in CONTENDERS]
    for row in found["rows"]:
        assert all(math.isfinite(row[name]) for name in ("rmse", "relative_rmse", "max_error", "cosine", "ratio"))
        assert row["target"] is None  # below 2048 keys
        assert row["met"] is None
        is_8bit = row["contender"] in ("fa3", "accurate", "e4m3", "paper")
        assert row["emulated"] == is_8bit
        assert row["engine"] == ("emulated" if is_8bit else "torch" if row["contender"] == "naive_fp16" else "tiled")
        assert row["why"]
        # bf16 keeps 8 bits, fp16 11; 8 bits lose per cents.
        limits = {"fp16": 4e-4, "bf16": 3e-3, "naive_fp16": 3e-3}
        assert 0 < row["relative_rmse"] < limits.get(row["contender"], 0.08)
    assert found["speed"] == []
    assert any("Speed was not measured" in note for note in found["notes"])
    assert any("q is on cpu" in note for note in found["notes"])


def test_ablation_switches_off_every_field(written: tuple[dict, str, str]) -> None:
    found = written[0]
    changed = {row["variant"].split("=")[0] for row in found["ablation"]}
    assert changed == {field.name for field in fields(Fp8Recipe) if field.init}
    for row in found["ablation"]:
        assert row["emulated"]
        assert row["accumulation"] == ("14bit" if row["variant"] == "two_level=False" else "float32")
        assert row["ratio"] == pytest.approx(row["relative_rmse"] / row["baseline"])
    uncentred = [row for row in found["ablation"] if (row["variant"], row["family"]) == ("center_v=False", "vmean")]
    assert uncentred[0]["ratio"] > 1.2
    grown = {(row["variant"], row["seqlen_k"]): row["relative_rmse"] for row in found["accumulation"]}
    assert len(grown) == 10
    assert grown["FA3's scales, one level", 160] > 1.5 * grown["accurate()", 160]


def test_histograms_and_scales(written: tuple[dict, str, str]) -> None:
    found = written[0]
    assert len(found["histograms"]) == 2 * len(CONTENDERS)
    for histogram in found["histograms"]:
        assert len(histogram["edges"]) == len(histogram["shares"]) + 1
        assert sum(histogram["shares"]) == pytest.approx(1, abs=1e-5)
    for scales in found["scales"]:
        assert (len(scales["k_scale"]), len(scales["v_scale"])) == (8, 8)
        assert {len(row) for row in scales["k_scale"] + scales["v_scale"]} == {2}  # 160 keys, blocks of 128


def test_terminal_names_recipes_and_says_emulated(written: tuple[dict, str, str]) -> None:
    text = written[2]
    assert "accurate(): No target applies" in text
    assert "* emulated" in text
    assert "accurate() *" in text
    assert "wrote " in text


def test_real_layers(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    options = ["--families", "llm", "--tensors", str(SLICE), "--recipes", "accurate", "--no-ablation"]
    result = CliRunner().invoke(cli.app, ["report", *options, "--device", "cpu", "--json", str(path)])
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    rows = {(row["layer"], row["contender"]): row for row in found["rows"]}
    assert list(dict.fromkeys(layer for layer, _ in rows)) == ["layer0", "layer5", "layer11"]
    assert len(rows) == 15
    for layer in ("layer0", "layer5", "layer11"):
        assert rows[layer, "accurate"]["family"] == "llm"
        assert rows[layer, "accurate"]["relative_rmse"] < 0.06
        assert rows[layer, "accurate"]["ratio"] < 0.85
    assert (found["ablation"], found["accumulation"]) == ([], [])
    assert len(found["scales"]) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipes", "best"], "--recipes is 'best': must be of accurate, e4m3, paper"),
        (["--recipes", ","], "--recipes is ',': must name at least one"),
        (["--families", "odd"], "--families is 'odd': must be of normal"),
        (["--families", "llm"], "pass --tensors file.safetensors"),
        (["--families", "normal", "--tensors", str(SLICE)], "leaves out llm"),
        (["--lengths", "2q"], "--lengths is '2q': must be a number of keys"),
        (["--lengths", "0"], "--lengths is '0'"),
        (["--lengths", "2048k"], "--lengths is '2048k'"),
        (["--head-dims", "257"], "--head-dims is '257': must be a whole number from 1 to 256"),
        (["--heads", "0"], "--heads is '0': must be 1 or more"),
        (["--seed", "-1"], "--seed is '-1': must be 0 or more"),
        (["--device", "tpu"], "--device is 'tpu': must be cpu or cuda"),
        (["--tensors", "absent.safetensors"], "must be a safetensors file that exists"),
        (["--tensors", __file__], "could not be read as NAME.q, NAME.k, NAME.v"),
        (["--html", "absent/out.html"], "absent must be a directory that exists"),
        (["--json", "."], "--json is '.': is a directory"),
    ],
)
def test_bad_options_are_refused_by_name(options: list[str], message: str) -> None:
    result = CliRunner(env={"COLUMNS": "400", "TERM": "dumb"}).invoke(cli.app, ["report", *options])
    assert result.exit_code == 2
    assert message in " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


def test_layers_of_wrong_shapes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    save_file({"a.q": torch.ones(1, 8, 3, 16), "a.k": torch.ones(1, 8, 2, 16), "a.v": torch.ones(1, 8, 2, 16)}, path)
    result = CliRunner(env={"COLUMNS": "400", "TERM": "dumb"}).invoke(cli.app, ["report", "--tensors", str(path)])
    assert result.exit_code == 2
    assert "heads must be a multiple of KV heads" in result.output


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "jinja2" else found(name, *rest)
    )
    result = CliRunner(env={"COLUMNS": "400", "TERM": "dumb"}).invoke(
        cli.app, ["report", "--html", str(tmp_path / "out.html")]
    )
    assert result.exit_code == 2
    assert "--html needs jinja2" in result.output
    assert "pip install 'flashhopper[report]'" in result.output
    assert command.EXTRA == ("jinja2", "matplotlib")


@pytest.mark.parametrize("window", [(-1, -1), (20, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_reference_in_parts_is_the_oracle(
    monkeypatch: pytest.MonkeyPatch, causal: bool, window: tuple[int, int]
) -> None:
    monkeypatch.setattr(collect, "REFERENCE_SCORES", 60 * 7)
    inputs = make_inputs("peaky", seqlen_q=33, seqlen_k=60, heads=4, kv_heads=2, head_dim=16)
    problem = Problem("peaky", inputs, 0.3, window, causal)
    whole = reference_attention(*inputs, 0.3, causal, window)[0]
    assert torch.allclose(reference(problem), whole, rtol=1e-12, atol=1e-14)


def test_long_contexts_take_the_last_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "ALL_QUERIES", 100)
    monkeypatch.setattr(collect, "BLOCK_QUERIES", 8)
    layers = tuple(
        LlmLayer(f"n{n}", make_inputs("normal", seqlen_q=n, heads=1, head_dim=8), 0.3, (-1, 0)) for n in (90, 120)
    )
    settings = replace(Settings(), recipes=("accurate",), families=("normal",), lengths=(100, 130), head_dims=(16,))
    steps = []
    report = collect.collect(settings, layers, lambda done, total, _: steps.append((done, total)))
    sizes = {(row.seqlen_q, row.seqlen_k) for row in report.rows}
    assert sizes == {(90, 90), (8, 120), (100, 100), (8, 130)}
    assert [done for done, _ in steps] == list(range(steps[0][1]))


def test_naive_fp16_is_worse_than_fp16_and_right() -> None:
    inputs = make_inputs("vmean", seqlen_q=64, seqlen_k=600, heads=4, kv_heads=2, head_dim=32)
    problem = Problem("vmean", inputs, 32**-0.5, (-1, -1), True)
    by_name = {x.name: x for x in contenders.contenders(("accurate",))}
    exact = reference(problem)
    naive, fp16 = (error_metrics(by_name[name].attend(problem).out, exact) for name in ("naive_fp16", "fp16"))
    assert fp16.relative_rmse < naive.relative_rmse < 5e-3


def test_targets_apply_where_they_are_stated() -> None:
    assert judge("accurate", "normal", 2048, 0.03, 0.05) == (pytest.approx(0.6), 0.80)
    assert judge("accurate", "vmean", 2048, 2e-3, 1e-3) == (2e-3, 3e-3)
    assert judge("accurate", "normal", 1024, 0.03, 0.05) is None
    assert judge("paper", "kbias", 2048, 0.03, 0.05) is None
    assert judge("bf16", "normal", 2048, 0.03, 0.05) is None


def _row(name: str, family: str, relative: float, judged: float | None, target: float | None) -> Row:
    sizes = (128, 2048, 2048, 1, 1, True, "emulated", True, "no kernel")
    return Row(name, family, "", *sizes, relative, relative, 4 * relative, 0.999, judged, judged, target)


def _report(*rows: Row) -> Report:
    words = {row.contender: {"label": f"{row.contender}()", "text": "a recipe"} for row in rows}
    return Report({}, {"recipes": tuple(words)}, words, list(rows))


def test_verdicts() -> None:
    met, missed = _row("accurate", "normal", 0.035, 0.7, 0.8), _row("accurate", "outlier", 0.06, 0.6, 0.5)
    good = verdict.verdicts(_report(met))[0]
    assert (good.status, good.headline) == (verdict.GOOD, "Meets its target")
    bad = verdict.verdicts(_report(met, missed))[0]
    assert (bad.status, bad.headline) == (verdict.BAD, "Misses 1 of 2 targets")
    assert bad.missed == ("outlier 2k, d128: 0.60× against 0.50×",)
    assert bad.worst == "6.0 % on outlier 2k, d128"
    none = verdict.verdicts(_report(replace(met, judged=None, target=None)))[0]
    assert none.status == verdict.OPEN
    broken = replace(met, relative_rmse=math.nan, judged=math.nan)
    assert verdict.verdicts(_report(broken))[0].status == verdict.BAD
    assert _report(broken).as_dict()["rows"][0]["relative_rmse"] is None


@pytest.mark.parametrize(
    ("value", "text"), [(0.0351, "3.5 %"), (0.12, "12 %"), (0.0017, "0.17 %"), (2e-4, "0.020 %"), (0.0, "0 %")]
)
def test_percent(value: float, text: str) -> None:
    assert verdict.percent(value) == text
    assert verdict.percent(math.nan) == "–"


def test_speed_rows_where_kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(recipes=("accurate",), families=("normal",), lengths=(64, 32768), head_dims=(64,), heads=1)
    compared = contenders.contenders(settings.recipes)
    monkeypatch.setattr(speed, "TOKENS", 128)
    assert speed.measure(settings, compared, [], lambda _: None) == []  # nothing serves a CPU
    monkeypatch.setattr(speed.plan, "explain", lambda *_, **__: SimpleNamespace(backend="hopper"))
    monkeypatch.setattr(speed, "elapsed_ms", lambda _: 2.0)
    known = replace(_row("accurate", "normal", 0.04, None, None), head_dim=64, seqlen_k=64)
    rows = speed.measure(settings, compared, [known], lambda _: None)
    assert [row.contender for row in rows] == ["fp16", "bf16", "fa3", "accurate"]
    assert {(row.batch, row.heads, row.seqlen) for row in rows} == {(2, 32, 64)}
    assert rows[0].tflops == pytest.approx(2 * (64 * 65 // 2) * 2 * 32 * 128 / 2e-3 / 1e12)
    assert [row.relative_rmse for row in rows] == [None, None, None, 0.04]
    assert [row.quantize_ms for row in rows] == [0.0, 0.0, 0.0, 2.0]


def test_page_holds_every_plot_and_table_and_nothing_external(written: tuple[dict, str, str]) -> None:
    page = written[1]
    for name in ("error-normal-16", "error-vmean-16"):
        assert f'id="plot-{name}"' in page
    for name in ("histogram-normal", "histogram-vmean", "scales-normal", "scales-vmean"):
        assert f'id="plot-{name}"' in page
    for name in ("summary", "ablation", "accumulation", "rows"):
        assert f'<table id="table-{name}">' in page
    assert page.count("<svg") == page.count('role="img"') == 6
    assert page.count('class="tag">emulated') > 10
    assert "8-bit rows here are emulated" in page
    assert not re.search(r"https?:|<script|@import|<iframe|<object", page)
    assert len(page) < 1_000_000
    references = re.findall(r'(?:src|href)="([^"]*)"|url\(([^)]*)\)', page)
    assert all((a or b).startswith(("#", "data:")) for a, b in references)
    identifiers = re.findall(r'\bid="([^"]+)"', page)
    assert len(identifiers) == len(set(identifiers))
    assert {b for _, b in references if b} | {a for a, _ in references if a.startswith("#")} <= {
        f"#{x}" for x in identifiers
    }


def test_page_shows_speed() -> None:
    report = collect.collect(replace(Settings(), families=("normal",), lengths=(64,), head_dims=(16,), ablation=False))
    report.speed.append(SpeedRow("accurate", 64, 256, 128, 16, True, 0.5, 0.1, 700.0, 0.04))
    page = render.page(report)
    assert '<table id="table-speed">' in page
    assert 'id="plot-speed-16"' in page
    assert 'id="table-ablation"' not in page


def _luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_contrast_in_light_and_dark(written: tuple[dict, str, str]) -> None:
    """WCAG AA: 4.5 for text, 3 for lines and markers."""
    schemes = re.findall(r":root \{(.*?)\}", written[1], re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", scheme))

        def contrast(front: str, back: str, colours: dict[str, str] = colours) -> float:
            light, dark = sorted((_luminance(colours[front]), _luminance(colours[back])), reverse=True)
            return (light + 0.05) / (dark + 0.05)

        pairs = [(front, back) for front in ("text", "muted", "good", "bad") for back in ("page", "card")]
        assert min(contrast(*pair) for pair in [*pairs, ("open", "open-soft")]) >= 4.5
        assert min(contrast(name, "card") for name in colours if name.startswith("series-")) >= 3


PROBE = """<!DOCTYPE html><meta charset="utf-8"><script>
function look(frame) {
  const d = frame.contentDocument, shown = x => { const r = x.getBoundingClientRect(); return [r.width, r.height]; };
  const out = document.createElement("pre");
  out.textContent = "RESULT" + JSON.stringify({
    width: frame.clientWidth, scroll: d.documentElement.scrollWidth, title: d.querySelector("h1").innerText,
    plots: [...d.querySelectorAll(".plot svg")].map(shown), images: [...d.querySelectorAll("svg image")].map(shown),
    boxes: [...d.querySelectorAll(".scroll")].map(x => [x.clientWidth, x.scrollWidth]),
    resources: frame.contentWindow.performance.getEntriesByType("resource").map(x => x.name.slice(0, 40)),
  }) + "END";
  document.body.append(out);
}
console.error("probe");
</script><body>"""


def _chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        message = "no chromium: install it (Debian: apt-get install chromium) to open the page in a browser"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found


def test_page_in_a_browser(written: tuple[dict, str, str], tmp_path: Path) -> None:
    source = html.escape(written[1])
    frames = "".join(
        f'<iframe onload="look(this)" style="border:0;width:{width}px;height:900px" srcdoc="{source}"></iframe>'
        for width in (390, 1280)
    )
    (tmp_path / "probe.html").write_text(PROBE + frames, encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --disable-dev-shm-usage --enable-logging=stderr"
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    arguments = [_chromium(), *flags.split(), profile, "--dump-dom", f"file://{tmp_path / 'probe.html'}"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True)
    # The probe's own message shows that messages arrive here; the page must have none.
    messages = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    assert len(messages) == 1, messages
    assert "probe" in messages[0]
    looks = [json.loads(html.unescape(text)) for text in re.findall(r">RESULT(.*?)END<", result.stdout)]
    assert sorted(look["width"] for look in looks) == [390, 1280]
    for look in looks:
        assert look["scroll"] <= look["width"], "the page scrolls sideways"
        assert look["title"] == "What 8-bit attention loses"
        assert len(look["plots"]) == 6
        assert all(width > 250 and height > 150 for width, height in look["plots"])
        assert len(look["images"]) >= 4  # heat maps
        assert all(width > 0 and height > 0 for width, height in look["images"])
        assert all(name.startswith("data:") for name in look["resources"])
    phone = min(looks, key=lambda look: look["width"])
    assert any(scroll > width for width, scroll in phone["boxes"]), "wide tables scroll in their own boxes"
