"""The benchmark scripts at toy size: rows that say what was measured, and no rows where tests fail."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cases
import common
from attention import CANDIDATES, FIELDS, flops
from gape.experiments.operator_calls import CONTEXT_LENGTH, Shape, Work, against_float64, draw
from gape.ops import dispatch
from gape.ops.implementations import IMPLEMENTATIONS
from tables import speed
from tests.cli.test_commands import exit_code

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SHAPE = Shape(batch=1, heads=2, kv_heads=1, length=40, dim=16)
TINY = ["--device", "cpu", "--dtype", "float32", "--heads", "2", "--seconds", "0.001", "--trust"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(name: str, *arguments: str) -> int:
    """Run a script in this process; its exit code."""
    return exit_code(lambda: common.script(importlib.import_module(name).main), name, *arguments)


def stored(name: str) -> list[dict[str, str]]:
    with (common.DATA / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_attention_appends_a_row_for_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--lengths", "24,40", "--dim", "16", "--tokens", "80", "--kv-heads", "1"]
    command = ["attention", *TINY, *sizes, "--backward", "--impl", "split,split-kept,sdpa-flash,sdpa-cudnn"]
    assert run(*command) == 0
    assert "sdpa-cudnn at 24: skipped, needs a CUDA device" in capsys.readouterr().err
    results = stored("attention")
    kinds = [(row["length"], row["impl"], row["direction"]) for row in results]
    impls = ("split", "split-kept", "sdpa-flash")
    assert kinds == [(n, impl, way) for n in ("24", "40") for impl in impls for way in ("forward", "both")]
    for row in results:
        assert row["batch"] == str(80 // int(row["length"]))
        assert float(row["ms"]) > 0
        assert float(row["error"]) < 1e-6
        assert row["tests"] == "trusted"
        assert row["torch"] == torch.__version__
        assert bool(row["dgate"]) == (row["direction"] == "both" and row["impl"] != "sdpa-flash")
    assert run(*command) == 0
    assert len(stored("attention")) == 2 * len(results)


def test_attention_takes_several_shapes() -> None:
    assert run("attention", *TINY, "--shapes", "2x4x2x24x16, 1x3x1x40x8", "--impl", "split") == 0
    sizes = [[row[name] for name in ("batch", "heads", "kv_heads", "length", "dim")] for row in stored("attention")]
    assert sizes == [["2", "4", "2", "24", "16"], ["1", "3", "1", "40", "8"]]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_decode() -> None:
    impls = ["sdpa", "decode", "split", "sdpa-flash"]
    sizes = ["--lengths", "40", "--dim", "16"]
    assert run("decode", *TINY, *sizes, "--kv-heads", "1", "--impl", ",".join(impls)) == 0
    results = stored("decode")
    assert [row["impl"] for row in results] == impls
    assert all(
        float(row["error"]) < 1e-5 and float(row["of_copy"]) > 0 and float(row["of_sdpa"]) > 0 for row in results
    )


@pytest.mark.parametrize("gates", cases.GATES)
def test_gates_are_of_their_kind_and_nothing_is_zero(gates: str) -> None:
    shape = Shape(batch=1, heads=4, kv_heads=4, length=4000, dim=8)
    drawn = draw(shape, torch.float32, CPU, cases.GATES[gates])
    assert all(x.any() for name, x in drawn.items() if name != "landmark")
    rate = drawn["gate"] / CONTEXT_LENGTH
    largest = cases.largest_logit(drawn["q"], drawn["k"])
    if gates in ("contracting", "landmarks"):
        assert float(rate.min()) * cases.HORIZON == pytest.approx(2 * largest + 17.5, abs=0.01)
        assert float(drawn["landmark"].mean()) == pytest.approx(0.01 * (gates == "landmarks"), abs=0.003)
    if gates.startswith("trained"):
        floor = 4.0 if gates == "trained-floor" else 0.0
        assert largest == pytest.approx(30, rel=1e-3)
        assert float(drawn["landmark"].median()) == pytest.approx(0.2, abs=0.01)
        assert float(drawn["landmark"].quantile(0.99)) == pytest.approx(0.5, abs=0.02)
        medians = drawn["gate"].median(-1).values[0] - floor
        assert medians[[0, -1]].tolist() == pytest.approx([0.1, 9.0], rel=0.1)


def test_errors_are_those_of_the_whole() -> None:
    """A sample of the queries sees the same error as all of them do, and a wrong answer shows."""
    work = CANDIDATES["split"](draw(SHAPE, torch.float32, CPU), 0.0)
    results = against_float64(work, backward=True, queries=10)
    assert set(results) == {"error", "dq", "dk", "dv", "dgate", "dlandmark", "damplitude"}
    assert max(results.values()) < 1e-5
    wrong = Work(leaves=work.leaves, forward=lambda leaves: 1.01 * work.forward(leaves))
    output = against_float64(wrong, backward=True, queries=10)
    assert all(value == pytest.approx(0.01, rel=1e-2) for value in output.values())


def test_operations_are_those_of_the_causal_half() -> None:
    assert flops(SHAPE) == 4 * 1 * 2 * (40 * 40 / 2) * 16


@pytest.mark.slow
def test_failing_tests_leave_no_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (test,) = (tmp_path / path for path in common.TESTS["decode"])
    test.parent.mkdir(parents=True)
    test.write_text("def test_it():\n    assert False, 'broken kernel'\n")
    quick = ["decode", *TINY[:-1], "--lengths", "8", "--dim", "16", "--impl", "sdpa"]
    assert run(*quick) == 1
    assert "broken kernel" in capsys.readouterr().err
    assert not common.DATA.exists()
    test.write_text("def test_it():\n    pass\n")
    assert run(*quick) == 0
    assert stored("decode")[0]["tests"] == "passed"


def test_tables_show_the_newest_rows() -> None:
    case = ["attention", *TINY, "--lengths", "24", "--dim", "16", "--tokens", "24", "--impl", "split"]
    assert run(*case) == 0
    assert run(*case) == 0
    for gates, impl, way, ms, tiles in (
        ("contracting", "triton", "forward", "2", "0.1"),
        ("contracting", "sdpa-cudnn", "forward", "5", ""),
        ("contracting", "triton", "both", "4", "0.1"),
        ("contracting", "sdpa-cudnn", "both", "30", ""),
        ("trained", "triton", "forward", "9", "0.9"),
    ):
        measured = {"gates": gates, "impl": impl, "direction": way, "ms": ms, "tiles": tiles, "length": "4096"}
        with (common.DATA / "attention.csv").open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, FIELDS).writerow(stored("attention")[-1] | measured | {"eps": "0.0001"})
    assert "| `contracting` | 4,096 | 0.1 | 2.50× | 7.50× |\n" in speed.skipping(Path())
    text = speed.benchmarks(Path())
    newest = next(row for row in reversed(stored("attention")) if row["impl"] == "split")
    assert f"| split | 24 | 1 | {newest['ms']} | {newest['tflops']} | {newest['error']} |" in text
    assert text.count("| split |") == 1


def test_tables_keep_errors_of_cases_timed_again_and_compare_triton_with_others() -> None:
    usual = {
        "device": "GPU", "torch": "2", "triton": "3", "tests": "trusted", "gates": "log-normal", "eps": "0",
        "dim": "64", "dtype": "bfloat16", "batch": "1", "heads": "2", "kv_heads": "2", "length": "4096",
        "direction": "both",
    }  # fmt: skip
    for commit, impl, ms, error in (("a", "triton", "3", "0.002"), ("b", "triton", "2", ""), ("b", "fox", "5", "")):
        measured = {"commit": commit, "impl": impl, "ms": ms, "error": error, "dgate": error}
        common.append(common.DATA / "attention.csv", FIELDS, usual | measured)
    text = speed.benchmarks(Path())
    assert "| bfloat16 | 64 | 4,096 | both |  |  | 2.50× |  |  |  | b |" in text
    assert "| triton | 4,096 | 1 | 2 |" in text
    assert "| triton | 4,096 | 1 | a | 0.002 | 0.002 |" in text


def test_render_draws_what_is_between_marks(capsys: pytest.CaptureFixture[str]) -> None:
    Path("docs").mkdir()
    text = "Before\n<!-- table: speed-layer -->\nold\n<!-- end -->\nafter\n"
    Path("docs/page.md").write_text(text, encoding="utf-8")
    Path("README.md").write_text("No table.\n", encoding="utf-8")
    assert run("render", "--check") == 1
    assert Path("docs/page.md").read_text(encoding="utf-8") == text
    assert run("render") == 0
    assert capsys.readouterr().out.split() == ["docs/page.md", "docs/page.md"]
    drawn = Path("docs/page.md").read_text(encoding="utf-8")
    assert drawn.startswith("Before\n<!-- table: speed-layer -->\n\n| tokens |")
    assert drawn.endswith(" |\n\n<!-- end -->\nafter\n")
    Path("docs/page.md").write_text(text.replace("speed-layer", "no-such-table"), encoding="utf-8")
    assert run("render") == 2
    assert "no-such-table" in capsys.readouterr().err


def test_the_table_of_auto_comes_from_rows() -> None:
    fields = ("device", "dtype", "direction", "eps", "dim", "gates", "impl", "ms", "length", "error")
    kind = ("NVIDIA H200", "bfloat16", "forward", "0", "64", "log-normal")
    for impl, ms in (("split", "2"), ("triton", "1")):
        values = (*kind, impl, ms, "4096", "0.002")
        common.append(common.DATA / "attention.csv", fields, dict(zip(fields, values, strict=True)))
    assert run("dispatch", "--out", "table.toml") == 0
    (rule,) = dispatch.load(Path("table.toml"), IMPLEMENTATIONS)
    assert (rule.impl, rule.length_at_least, rule.device) == ("triton", 4096, "NVIDIA H200")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", *TINY, "--lengths", "many"], "lengths: got 'many'"),
        (["attention", *TINY, "--gates", "open"], "gates: got str 'open'"),
        (["attention", *TINY, "--impl", "magic"], "impl: got str 'magic'"),
        (["attention", *TINY, "--kv-heads", "3"], "kv_heads: got int 3"),
        (["attention", *TINY, "--shapes", "2x4x3x24x16"], "shapes: got str '2x4x3x24x16'"),
        (["attention", *TINY, "--shapes", "2x4x2x24"], "shapes: got str '2x4x2x24'"),
        (["attention", *TINY, "--kv-heads", "0"], "kv_heads: got int 0"),
        (["attention", *TINY, "--eps", "1.5"], "eps: got float 1.5"),
        (["attention", *TINY, "--device", "warp"], "device: got str 'warp'"),
        (["attention", *TINY[:-1]], "start this in a clone, or pass --trust"),
        (["decode", *TINY, "--dtype", "int8"], "dtype: got str 'int8'"),
        (["precision", "--save", "--quick"], "leave out --quick"),
        (["precision", "--save"], "expected the root of a clone"),
        (["render"], "expected the root of a clone"),
        (["dispatch"], "there is no benchmarks/data/attention.csv"),
    ],
)
def test_mistakes_end_with_two_and_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not common.DATA.exists()


def test_a_file_of_other_columns_is_left_alone() -> None:
    common.append(common.DATA / "decode.csv", ("a", "b"), {"a": "1", "b": "2"})
    before = (common.DATA / "decode.csv").read_text()
    assert run("decode", *TINY, "--lengths", "8", "--dim", "16") == 2
    assert (common.DATA / "decode.csv").read_text() == before


def test_a_script_runs_from_a_clone() -> None:
    command = [sys.executable, "benchmarks/dispatch.py", "--show"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout == dispatch.TABLE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["flex-score-mod", "flex-causal"])
def test_flex_attention_is_exact(name: str) -> None:
    """Grouped heads, and more than one tile of keys."""
    shape = Shape(batch=2, heads=4, kv_heads=2, length=300, dim=16)
    work = CANDIDATES[name](draw(shape, torch.float32, CPU), 0.0)
    with torch.no_grad():
        assert against_float64(work, backward=False)["error"] < 1e-5
