"""Means, intervals, differences on the same samples or text, and the tables of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gape.report import series, statistics, tables
from gape.report.page import tables as all_tables
from gape.report.results import Results, gather, pack_hits
from gape.tasks import niah
from tests.report import lm_stored
from tests.report.stored import needles, row, stored


def test_means_and_deviations_over_seeds() -> None:
    rows = [row("rope", "last", seed, 1, accuracy=a) for seed, a in enumerate((0.2, 0.4, 0.9))]
    (curve,) = statistics.curves(needles(rows))
    assert curve.means[1].mean == pytest.approx(0.5)
    assert curve.means[1].std == pytest.approx(np.std([0.2, 0.4, 0.9], ddof=1))
    assert str(statistics.mean_of([0.5])) == "0.50"


@pytest.mark.parametrize(("freedom", "point"), [(2, 4.303), (10, 2.228), (11, 2.201), (30, 2.042), (100, 1.984)])
def test_students_points(freedom: int, point: float) -> None:
    assert statistics.student(freedom) == pytest.approx(point, abs=3e-3)


def test_an_advantage_is_found_and_its_absence_too() -> None:
    differences = statistics.accuracy_differences(stored(schemes=("rope", "rope+gape"), targets=("last",), seeds=3))
    assert [(d.at, d.verdict) for d in differences] == [(1, "not separable"), (2, "better"), (4, "better")]
    assert 0.5 < differences[2].low < differences[2].difference < differences[2].high


def test_only_the_same_samples_are_compared() -> None:
    rows = (row("rope", "last", 0, 1), row("rope+gape", "last", 0, 1, eval_seed=5))
    assert statistics.accuracy_differences(needles(rows)) == []


@pytest.mark.parametrize(("seeds", "verdict"), [(1, "one seed"), (3, "better")])
def test_a_verdict_needs_several_seeds(seeds: int, verdict: str) -> None:
    table = tables.comparison_table(stored(schemes=("rope", "rope+gape"), targets=("last",), seeds=seeds))
    assert table is not None
    assert table.rows[2][-1] == verdict


@pytest.mark.parametrize(("seeds", "spread"), [(1, 0.0), (3, 0.0), (3, 0.2), (5, 0.2)])
def test_an_interval_holds_the_truth_nineteen_times_in_twenty(seeds: int, spread: float) -> None:
    """Gates that add 0.1 on average, and by chance more or less in each training run; 200 samples each."""
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        rows = []
        for seed in range(seeds):
            right = random.random(200) < np.clip(0.5 + random.normal(0, spread), 0, 1)
            other = random.random(200) < 0.4
            rows.append(row("rope+gape", "last", seed, 1, samples=200, hits=pack_hits(right)))
            rows.append(row("rope", "last", seed, 1, samples=200, hits=pack_hits(other)))
        (first,) = statistics.accuracy_differences(needles(rows))
        inside += first.low <= 0.1 <= first.high
    assert 0.9 <= inside / 200 <= 0.99


def test_schemes_are_compared_on_the_same_documents() -> None:
    results = lm_stored.stored(schemes=("rope", "p-rope", "p-rope+gape", "alibi", "fox"))
    differences = statistics.far_back_differences(results.of("far_back"))
    assert {d.scheme for d in differences} == {"p-RoPE+GAPE"}
    assert {d.other for d in differences} == {"p-RoPE", "RoPE", "ALiBi", "FoX"}
    beside = next(d for d in differences if d.other == "ALiBi" and d.what == "planted")
    assert (beside.verdict, beside.documents) == ("better, one seed", 3)
    gain = next(d for d in statistics.far_back_differences(results.of("far_back"), gain=True) if d.other == "ALiBi")
    assert (gain.difference, gain.verdict) == (pytest.approx(1.0), "better, one seed")


def test_differences_are_those_of_gape_lm_perplexity() -> None:
    rows = lm_stored.stored(schemes=("p-rope", "p-rope+gape")).of("perplexity")
    first = statistics.perplexity_differences(rows)[0]
    base, gated = (next(row for row in rows if row["position"] == p) for p in ("p-rope", "p-rope+gape"))
    other = statistics.window_difference(gated, base)
    assert (first.difference, first.low, first.high) == (other.difference, other.low, other.high)
    assert first.documents == 4


def test_alignments_are_compared_apart() -> None:
    rows = lm_stored.stored(schemes=("p-rope", "p-rope+gape")).of("perplexity")
    differences = statistics.perplexity_differences([*rows, *(row | {"align": 32768} for row in rows)])
    assert len({d.what for d in differences}) == 4


def test_a_single_document_decides_nothing() -> None:
    rows = []
    for row_ in lm_stored.stored(schemes=("p-rope", "p-rope+gape")).of("far_back"):
        keys = ("document", "document_tokens", "document_nll", "document_control")
        rows.append(row_ | {key: row_[key][:1] for key in keys})
    differences = statistics.far_back_differences(rows)
    assert {(d.verdict, d.low, d.high) for d in differences} == {("one document", None, None)}
    assert statistics.pool_seeds([rows[0] | {"documents": 1}])["low"] is None


def test_a_variant_is_set_beside_the_plain_scheme() -> None:
    rows = lm_stored.stored(schemes=("p-rope+gape", "p-rope+gape_floor4")).of("perplexity")
    pairs = {(d.scheme, d.other) for d in statistics.perplexity_differences(rows)}
    assert pairs == {("p-RoPE+GAPE (floor4)", "p-RoPE+GAPE")}


def test_answers_to_several_questions_are_not_averaged() -> None:
    own = lm_stored.stored(schemes=("rope",)).of("far_back")
    others = tuple(r | {"asked": {"ngram": 8}, "key": "other", "nll": 9.0} for r in own if r["distance"] == 512)
    one, both = (Results(measured={"far_back": rows}) for rows in (own, own + others))
    assert series.far_back(both) == series.far_back(one)
    assert tables.far_back_table(both.of("far_back")) == tables.far_back_table(own)


def test_a_table_has_means_deviations_and_the_best() -> None:
    rows = [row("rope", "last", s, 1, accuracy=a) for s, a in enumerate((0.2, 0.4))]
    rows += [row("rope+gape", "last", s, 1, accuracy=a) for s, a in enumerate((0.8, 0.8))]
    (table,) = tables.accuracy_tables(needles(rows))
    assert table.rows == (("RoPE", "2", "0.30 ± 0.14"), ("RoPE+GAPE", "2", "0.80 ± 0.00"))
    assert table.strong == {(1, 2)}
    assert "| RoPE+GAPE | 2 | **0.80 ± 0.00** |" in table.markdown()


def test_a_table_shows_where_seeds_are_missing() -> None:
    rows = [row("rope", "last", s, f) for s in range(3) for f in (1, 2) if (s, f) != (2, 2)]
    (table,) = tables.accuracy_tables(needles(rows))
    assert table.rows[0][1] == "2–3"


def test_a_table_gives_no_length_that_is_not_everyones() -> None:
    rows = (row("rope", "last", 0, 1), row("nope", "last", 0, 1, length=128))
    (table,) = tables.accuracy_tables(needles(rows))
    assert table.header[2] == "1×"


def test_a_table_of_perplexities_marks_the_lowest() -> None:
    first = tables.perplexity_tables(lm_stored.stored(schemes=("rope", "p-rope+gape")))[0]
    assert first.header[2:] == ("512", "1,024", "4,096", "32,768")
    assert (1, 5) in first.strong


def test_digits_that_are_never_named_are_counted() -> None:
    """A model that finds every needle and takes half of the digits for others; one that solves the task is left out."""
    task = niah.NIAHConfig(length=64, n_needles=1, target="last")
    digits = niah.sample(task, 100, split="test").targets[:, -1] - niah.DIGIT_0
    named = (digits >= 5).tolist()
    merged = row("rope", "last", 0, 1, accuracy=sum(named) / 100, hits=pack_hits(named))
    solved = row("alibi", "last", 0, 1, accuracy=1.0, hits=pack_hits([True] * 100))
    table = tables.digit_table(needles((merged, solved)))
    assert table is not None
    assert [cells[1:] for cells in table.rows] == [("0", f"{sum(named) / 100:.2f}", "5", "5", "0")]
    assert tables.digit_table(needles((solved,))) is None


def test_the_committed_tables_are_those_of_the_committed_rows() -> None:
    home = Path(__file__).parents[2] / "results" / "niah" / "paper"
    text = "\n\n".join(table.markdown() for table in all_tables(gather([home]))) + "\n"
    assert (home / "tables.md").read_text(encoding="utf-8") == text
