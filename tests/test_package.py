"""The package as a whole: what README says runs, importing is cheap and silent, figures are the stored ones."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gape
from gape.report.results import read_rows

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("number", [0, 1])
def test_readme_examples_run(number: int) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    exec(compile(blocks[number], f"README example {number}", "exec"), {})


def test_import_is_quick_and_silent() -> None:
    script = "import torch, time; t = time.perf_counter(); import gape; print(time.perf_counter() - t)"
    # Warnings of torch's own import are not ours: errors are switched on after it.
    script = script.replace("import torch, time;", "import torch, time, warnings; warnings.simplefilter('error');")
    script = script.replace("import gape;", "import gape; gape.gated_attention; gape.GAPEAttention;")
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(said.stdout) < 0.5
    assert said.stderr == ""


def test_public_names_exist_and_are_documented() -> None:
    for name in gape.__all__:
        assert getattr(gape, name) is not None
        assert name == "__version__" or getattr(gape, name).__doc__, name
    assert set(gape.__all__) <= set(dir(gape))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = gape.no_such_name


def cells(line: str) -> list[str]:
    return [cell.strip(" *`") for cell in line.strip().strip("|").split("|")]


def test_readme_figures_are_the_stored_ones() -> None:
    with (ROOT / "benchmarks" / "data" / "precision.csv").open(encoding="utf-8") as f:
        rows = [row for row in csv.DictReader(f) if row["device"] == "NVIDIA H200" and row["quantity"] == "output"]
    stored = {row["keys"]: row for row in rows if (row["dtype"], row["strength"]) == ("bfloat16", "10")}
    shown = [cells(line) for line in (ROOT / "README.md").read_text().splitlines() if re.match(r"\| [\d,]+ \| 0", line)]
    assert len(shown) == 3
    for keys, *figures in shown:
        row = stored[keys.replace(",", "")]
        for figure, name in zip(figures, ("plain", "rank2", "split"), strict=True):
            digits = len(figure.split(".")[1])
            assert float(figure) == pytest.approx(float(row[name]), abs=0.51 * 10**-digits), (keys, name)


def test_reproduction_figures_are_the_stored_ones() -> None:
    """The page's table has columns 1×, 4× and 16× of the two stored ones, close needle first."""
    tables = (ROOT / "results" / "niah" / "paper" / "tables.md").read_text(encoding="utf-8").split("**Accuracy")[1:3]
    stored = [{c[0]: c for c in map(cells, table.splitlines()) if len(c) == 7} for table in tables]
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8").splitlines()
    shown = [c for c in map(cells, page) if len(c) == 7 and "±" in c[1]]
    assert len(shown) == 12
    for scheme, *figures in shown:
        expected = [table[scheme][column] for table in stored for column in (2, 4, 6)]
        assert figures == expected, scheme


def test_readme_needle_figures_are_the_stored_ones() -> None:
    tables = (ROOT / "results" / "niah" / "paper" / "tables.md").read_text(encoding="utf-8").split("**Accuracy")[1:3]
    close, far = ({c[0]: c for c in map(cells, table.splitlines()) if len(c) == 7} for table in tables)
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    shown = [c for c in map(cells, readme) if len(c) == 6 and "±" in c[1]]
    assert len(shown) == 9
    for scheme, *figures in shown:
        assert figures == [close[scheme][2], close[scheme][4], close[scheme][6], far[scheme][2], far[scheme][6]], scheme


def test_readme_costs_are_the_stored_ones() -> None:
    with (ROOT / "benchmarks" / "data" / "prologue.csv").open(encoding="utf-8", newline="") as file:
        rows = [
            row for row in csv.DictReader(file) if row["impl"] == "fused-gape+attention" and "H200" in row["device"]
        ]
    found = {(row["direction"], int(row["length"])): row for row in rows}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = [cells(line)[1:] for line in readme.split("| tokens | 4,096")[1].splitlines()[2:6]]
    for figures, kind in zip(
        shown, ("of_fused_rope", "of_fused_rope", "of_compiled_rope", "of_compiled_rope"), strict=True
    ):
        direction = ("forward", "both")[shown.index(figures) % 2]
        assert figures == [f"{float(found[direction, n][kind]):.3f}" for n in (4096, 16384, 65536)], kind


def test_landmark_figures_are_the_stored_ones() -> None:
    """The page's table: variants in the order told, means over seeds, the first layer's two heads, far needle."""
    stored = ROOT / "results" / "niah" / "landmarks"
    kinds = ("digit", "filler", "key", "equals")
    landmarks: dict[tuple[str, str], list[Any]] = {}
    right: dict[tuple[str, str], list[float]] = {}
    for r in read_rows(stored / "analysis.jsonl"):
        if r["target"] == "first":
            means = [np.mean(r["gates"]["landmark"][kind], axis=0)[0] for kind in kinds]
            landmarks.setdefault((r["variant"], r["position"]), []).append(means)
    for r in read_rows(stored / "results.jsonl"):
        if (r["target"], r["factor"]) == ("first", 1):
            right.setdefault((r["variant"], r["position"]), []).append(r["accuracy"])
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    shown = list(map(cells, page.split("| | digits | fillers |")[1].split("\n\n")[0].splitlines()[2:]))
    rotated = [(name, "p-rope+gape") for name in ("plain", "long", "fast-gates", "floor", "l1-0.01", "l1-0.1")]
    for case, row in zip([*rotated, ("plain", "nope+gape"), ("l1-0.01", "nope+gape")], shown, strict=True):
        heads = np.mean(landmarks[case], axis=0)
        assert row[1:5] == [f"{one:.2f}, {other:.2f}" for one, other in heads], case
        assert row[5] == f"{np.mean(right[case]):.2f}", case
        assert ("3 seeds" in row[0]) == (len(landmarks[case]) == 3), case


def test_middle_needle_figures_are_the_stored_ones() -> None:
    stored = (ROOT / "results" / "niah" / "paper" / "tables.md").read_text(encoding="utf-8")
    table = {c[0]: c for c in map(cells, stored.split("**Accuracy")[3].splitlines()) if len(c) == 7}
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    shown = list(map(cells, page.split("| | 1× | 2× | 4× | 16× |")[1].split("\n\n")[0].splitlines()[2:]))
    assert len(shown) == 10
    for scheme, *figures in shown:
        assert figures == [table[scheme][column] for column in (2, 3, 4, 6)], scheme


def test_precision_figures_are_the_stored_ones() -> None:
    rows = [
        r
        for r in read_rows(ROOT / "results" / "niah" / "precision" / "results.jsonl")
        if (r["position"], r["target"]) == ("nope+gape", "last")
    ]
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    shown = list(map(cells, page.split("| NoPE+GAPE, last needle |")[1].split("\n\n")[0].splitlines()[2:]))
    for impl, row in zip(("rank2", "split"), shown, strict=True):
        found = {(r["factor"], r["seed"]): r["accuracy"] for r in rows if r["variant"] == impl}
        wanted = [", ".join(f"{found[factor, seed]:.2f}" for seed in range(3)) for factor in (1, 2, 4, 8, 16)]
        assert row[1:] == wanted, impl


def test_retrofit_figures_are_the_stored_ones() -> None:
    stored = (ROOT / "results" / "hf" / "smollm2" / "tables.md").read_text(encoding="utf-8").split("\n\n")[1]
    table = {c[0]: c for c in map(cells, stored.splitlines())}
    page = (ROOT / "docs" / "hf.md").read_text(encoding="utf-8")
    shown = map(cells, page.split("| context | 1,024 | 8,192 |")[1].split("\n\n")[0].splitlines()[2:])
    names = ("RoPE (not fine-tuned)", "RoPE", "RoPE+GAPE", "RoPE+GAPE (floor4)", "p-RoPE", "YaRN")
    for name, (_, *figures) in zip(names, shown, strict=True):
        assert figures == [table[name][column].strip("*") for column in (2, 5, 6, 7, 8)], name


def test_no_parameter_is_named_after_letters_that_loaders_rename() -> None:
    sizes = {"n_embd": 64, "n_heads": 4, "context_length": 16}
    for position in gape.positions.available():
        names = [name for name, _ in gape.GAPEAttention(**sizes, position=position).named_parameters()]
        assert not [name for name in names if "gamma" in name or "beta" in name]
