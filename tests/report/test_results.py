"""Stored results: read back as they were, summed up rightly, refused when they are not what they should be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gape.report import summary
from gape.report.results import Results, gather, pack_hits, read_lines, store, unpack_hits
from tests.report.stored import row, stored


def test_a_report_is_read_back_as_it_was_stored(tmp_path: Path) -> None:
    store(stored(), tmp_path / "one")
    first = gather([tmp_path / "one"])
    store(first, tmp_path / "two")
    assert gather([tmp_path / "two"]) == first
    for name in ("results.jsonl", "analysis.jsonl", "runs.jsonl"):
        store(first, tmp_path / "three")
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "three" / name).read_bytes()


def run_directory(home: Path, *rows: dict[str, object]) -> Path:
    home.mkdir(parents=True)
    (home / "eval.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (home / "run.json").write_text(json.dumps({"seed": 0}))
    return home


def test_runs_are_found_wherever_they_lie(tmp_path: Path) -> None:
    run_directory(tmp_path / "a", row("rope", "last", 0, 1))
    run_directory(tmp_path / "deep" / "b", row("rope", "last", 1, 1))
    found = gather([tmp_path])
    assert [r["seed"] for r in found.rows] == [0, 1]
    assert found.runs[0]["settings"] == {"seed": 0}


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    home = run_directory(tmp_path / "a", row("rope", "last", 0, 1))
    with (home / "eval.jsonl").open("a") as file:
        file.write('{"run": "hal')
    assert len(gather([home]).rows) == 1


def test_a_broken_line_before_the_end_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"b"\n{"c": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_lines(path)


def test_a_later_row_of_the_same_measurement_counts(tmp_path: Path) -> None:
    home = run_directory(tmp_path / "a", row("rope", "last", 0, 1), row("rope", "last", 0, 1, accuracy=0.5))
    assert [r["accuracy"] for r in gather([home]).rows] == [0.5]


def test_two_runs_of_one_name_are_not_mixed(tmp_path: Path) -> None:
    one = run_directory(tmp_path / "a", row("rope", "last", 0, 1))
    other = run_directory(tmp_path / "b", row("rope", "last", 0, 1, accuracy=0.5))
    with pytest.raises(ValueError, match="another run"):
        gather([one, other])
    assert len(gather([one, one]).rows) == 1


@pytest.mark.parametrize("content", [None, {"run": "x"}])
def test_what_is_no_result_is_refused(tmp_path: Path, content: dict[str, object] | None) -> None:
    if content:
        run_directory(tmp_path / "a", content)
    with pytest.raises(ValueError, match=r"lacks|expected a run"):
        gather([tmp_path])


@given(st.lists(st.booleans(), max_size=50))
def test_hits_are_packed_without_loss(hits: list[bool]) -> None:
    assert unpack_hits(pack_hits(hits), len(hits)) == hits


def test_means_and_deviations_over_seeds() -> None:
    rows = [row("rope", "last", seed, 1, accuracy=a) for seed, a in enumerate((0.2, 0.4, 0.9))]
    (curve,) = summary.curves(Results(rows=tuple(rows), analyses=(), runs=()))
    assert curve.means[0].mean == pytest.approx(0.5)
    assert curve.means[0].std == pytest.approx(np.std([0.2, 0.4, 0.9], ddof=1))
    assert str(summary.mean_of([0.5])) == "0.50"


def test_an_advantage_is_found_and_its_absence_too() -> None:
    found = summary.comparisons(stored(schemes=("rope", "rope+gape"), targets=("last",), seeds=3))
    assert [c.factor for c in found] == [1, 2, 4]
    assert not found[0].separable
    assert found[2].separable
    assert found[2].low < found[2].difference < found[2].high
    assert found[2].difference > 0.5


def test_an_interval_holds_the_truth_nineteen_times_in_twenty() -> None:
    """Models whose true difference is 0.1, one seed, 200 samples each."""
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        right, other = random.random(200) < 0.6, random.random(200) < 0.5
        rows = [
            row("rope+gape", "last", 0, 1, samples=200, hits=pack_hits(right)),
            row("rope", "last", 0, 1, samples=200, hits=pack_hits(other)),
        ]
        (found,) = summary.comparisons(Results(rows=tuple(rows), analyses=(), runs=()))
        inside += found.low <= 0.1 <= found.high
    assert 0.9 <= inside / 200 <= 0.99
