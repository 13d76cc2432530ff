"""The package as a whole: what README says runs, importing is cheap and silent, pages are drawn from rows."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gape
from gape.bench import page, precision
from gape.report.results import read_lines

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


def test_precision_page_is_drawn_from_its_rows() -> None:
    rows = precision.load(ROOT)
    assert precision.rendered(rows) in (ROOT / precision.PAGE).read_text(encoding="utf-8")
    assert precision.verdict(rows) == []
    promised = [row for row in rows if row["quantity"] == "output" and row["dtype"] == "bfloat16"]
    assert {int(row["keys"]) for row in promised} >= {1024, 8192, 131072}


def test_benchmark_page_is_drawn_from_its_rows() -> None:
    assert page.rendered(ROOT) in (ROOT / page.PAGE).read_text(encoding="utf-8")
    assert page.skipping(ROOT) in (ROOT / page.SKIPPING).read_text(encoding="utf-8")


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
    """The page's table: variants in the order told, the first layer's two heads, far needle."""
    stored = ROOT / "results" / "niah" / "landmarks"
    found = {r["variant"]: r for r in read_lines(stored / "analysis.jsonl") if r["target"] == "first"}
    right = {
        r["variant"]: r for r in read_lines(stored / "results.jsonl") if (r["target"], r["factor"]) == ("first", 1)
    }
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    table = page.split("| | digits | fillers |")[1].split("\n\n")[0]
    shown = list(map(cells, table.splitlines()[2:]))
    for name, row in zip(("plain", "long", "fast-gates", "floor", "l1-0.01", "l1-0.1"), shown, strict=True):
        kinds = [np.mean(found[name]["gates"]["landmark"][k], axis=0)[0] for k in ("digit", "filler", "key", "equals")]
        assert row[1:5] == [f"{one:.2f}, {other:.2f}" for one, other in kinds], name
        assert row[5] == f"{right[name]['accuracy']:.2f}", name


def test_no_parameter_is_named_after_letters_that_loaders_rename() -> None:
    sizes = {"n_embd": 64, "n_heads": 4, "context_length": 16}
    for position in gape.positions.available():
        names = [name for name, _ in gape.GAPEAttention(**sizes, position=position).named_parameters()]
        assert not [name for name in names if "gamma" in name or "beta" in name]
