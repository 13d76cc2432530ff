"""Stored results: read back as they were, summed up rightly, refused when they are not what they should be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gape.report import statistics
from gape.report.results import gather, pack_hits, read_rows, store, unpack_hits
from gape.report.tables import digit_table
from gape.report.write import tables
from gape.tasks import niah
from tests.report.stored import looks, needles, row, stored


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
    assert [r["seed"] for r in found.of("needle")] == [0, 1]
    assert found.runs[0]["settings"] == {"seed": 0}


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    home = run_directory(tmp_path / "a", row("rope", "last", 0, 1))
    with (home / "eval.jsonl").open("a") as file:
        file.write('{"run": "hal')
    assert len(gather([home]).of("needle")) == 1


def test_a_broken_line_before_the_end_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"b"\n{"c": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_rows(path)


NESTED = '{"run": ' + '{"a": ' * 200 + "1" + "}" * 200 + "}"


@pytest.mark.parametrize(
    "line",
    [
        *(json.dumps(row("rope", "last", 1, 2, run=wrong)) for wrong in (None, ["a"], 7, {"a": 1})),
        json.dumps(row("rope", "last", 1, 2) | {"seed": "a"}),
        json.dumps(row("rope", "last", 1, 2, accuracy=[0.5])),
        json.dumps(row("rope", "last", 1, 2))[:-1] + f', "options": {NESTED}' + "}",
        "[" * 100_000,
    ],
)
def test_a_row_of_wrong_types_is_told_by_file_and_line(tmp_path: Path, line: str) -> None:
    home = run_directory(tmp_path / "a", row("rope", "last", 0, 1))
    with (home / "eval.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ValueError, match=r"eval\.jsonl: line 2 "):
        tables(gather([home]))


def test_a_later_row_of_the_same_measurement_counts(tmp_path: Path) -> None:
    home = run_directory(tmp_path / "a", row("rope", "last", 0, 1), row("rope", "last", 0, 1, accuracy=0.5))
    assert [r["accuracy"] for r in gather([home]).of("needle")] == [0.5]


def test_two_runs_of_one_name_are_not_mixed(tmp_path: Path) -> None:
    one = run_directory(tmp_path / "a", row("rope", "last", 0, 1))
    other = run_directory(tmp_path / "b", row("rope", "last", 0, 1, accuracy=0.5))
    for paths in ([one, other], [tmp_path]):
        with pytest.raises(ValueError, match="another run is called seed0_last_rope too"):
            gather(paths)
    assert len(gather([one, one]).of("needle")) == 1


def test_rows_of_weights_that_were_trained_further_do_not_count(tmp_path: Path) -> None:
    home = run_directory(tmp_path / "a", row("rope", "last", 0, 4, step=10), row("rope", "last", 0, 1, step=20))
    (home / "analysis.json").write_text(json.dumps(looks("rope", "last", 0)))
    found = gather([home])
    assert [(r["factor"], r["step"]) for r in found.of("needle")] == [(1, 20)]
    assert found.of("inside") == ()


def test_runs_count_where_a_report_lies_beside_them(tmp_path: Path) -> None:
    run_directory(tmp_path / "a", row("rope", "last", 0, 1))
    store(gather([tmp_path]), tmp_path)
    run_directory(tmp_path / "b", row("rope", "last", 1, 1))
    assert len(gather([tmp_path]).of("needle")) == 2


@pytest.mark.parametrize(
    ("changed", "settings", "said"),
    [
        ({"length": 128}, {}, "differ in length;"),
        ({}, {"train": {"learning_rate": 0.1}}, "differ in train.learning_rate;"),
        ({"seed": 0}, {}, "are both seed 0;"),
    ],
)
def test_other_experiments_are_not_taken_for_seeds(
    tmp_path: Path, changed: dict[str, object], settings: dict[str, object], said: str
) -> None:
    one = run_directory(tmp_path / "a", row("rope", "last", 0, 1, run="a"))
    other = run_directory(tmp_path / "b", row("rope", "last", 1, 1) | {"run": "b"} | changed)
    for home, extra in ((one, {}), (other, settings)):
        run = {"seed": 0, "train": {"learning_rate": 0.2, "max_steps": 5, "seed": 0}, "device": home.name} | extra
        (home / "run.json").write_text(json.dumps(run))
    with pytest.raises(ValueError, match=said):
        gather([tmp_path])


def test_a_line_cut_within_a_letter_is_left_out(tmp_path: Path) -> None:
    home = run_directory(tmp_path / "a", row("rope", "last", 0, 1))
    with (home / "eval.jsonl").open("ab") as file:
        file.write('{"run": "λ'.encode()[:-1])
    assert len(gather([home]).of("needle")) == 1


def test_results_written_over_themselves_are_whole_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(stored(), tmp_path)
    before = (tmp_path / "results.jsonl").read_bytes()

    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gape.utils.files.write", full)
    with pytest.raises(OSError, match=r"no room for results\.jsonl"):
        store(stored(seeds=1), tmp_path)
    assert (tmp_path / "results.jsonl").read_bytes() == before


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
    (curve,) = statistics.curves(needles(rows))
    assert curve.means[0].mean == pytest.approx(0.5)
    assert curve.means[0].std == pytest.approx(np.std([0.2, 0.4, 0.9], ddof=1))
    assert str(statistics.mean_of([0.5])) == "0.50"


def test_an_advantage_is_found_and_its_absence_too() -> None:
    found = statistics.accuracy_differences(stored(schemes=("rope", "rope+gape"), targets=("last",), seeds=3))
    assert [(d.at, d.verdict) for d in found] == [(1, "not separable"), (2, "better"), (4, "better")]
    assert found[2].low < found[2].difference < found[2].high
    assert found[2].difference > 0.5


def test_digits_that_are_never_named_are_counted() -> None:
    """A model that finds every needle and takes half of the digits for others; one that solves the task is left out."""
    task = niah.NIAHConfig(length=64, n_needles=1, target="last")
    asked = niah.sample(task, 100, split="test").targets[:, -1] - niah.DIGIT_0
    named = (asked >= 5).tolist()
    merged = row("rope", "last", 0, 1, accuracy=sum(named) / 100, hits=pack_hits(named))
    solved = row("alibi", "last", 0, 1, accuracy=1.0, hits=pack_hits([True] * 100))
    table = digit_table(needles((merged, solved)))
    assert table is not None
    assert table.rows == (("RoPE · needle close (last)", "0", f"{sum(named) / 100:.2f}", "5", "5", "0"),)
    assert digit_table(needles((solved,))) is None


def test_the_committed_tables_are_those_of_the_committed_rows() -> None:
    home = Path(__file__).parents[2] / "results" / "niah" / "paper"
    text = "\n\n".join(table.markdown() for table in tables(gather([home]))) + "\n"
    assert (home / "tables.md").read_text(encoding="utf-8") == text


def test_only_the_same_samples_are_compared() -> None:
    rows = (row("rope", "last", 0, 1), row("rope+gape", "last", 0, 1, eval_seed=5))
    assert statistics.accuracy_differences(needles(rows)) == []


def test_one_seed_decides_nothing() -> None:
    (found,) = statistics.accuracy_differences(
        needles(
            (
                row("rope", "last", 0, 1, hits=pack_hits([False] * 100)),
                row("rope+gape", "last", 0, 1, hits=pack_hits([True] * 100)),
            )
        )
    )
    assert (found.low, found.high, found.verdict) == (1.0, 1.0, "better, one seed")


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
        (found,) = statistics.accuracy_differences(needles(rows))
        inside += found.low <= 0.1 <= found.high
    assert 0.9 <= inside / 200 <= 0.99


@pytest.mark.parametrize(("freedom", "point"), [(2, 4.303), (10, 2.228), (11, 2.201), (30, 2.042), (100, 1.984)])
def test_students_points(freedom: int, point: float) -> None:
    assert statistics.student(freedom) == pytest.approx(point, abs=3e-3)
