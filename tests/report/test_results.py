"""Stored results of every kind: read back as they were, refused when they are not what they should be."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gape.report.page import tables
from gape.report.results import Results, gather, pack_hits, read_rows, store, unpack_hits
from gape.report.series import perplexity, recall
from gape.utils.stored_rows import fault
from tests.report import lm_stored
from tests.report.stored import looks, row, stored

REST = {"protocol": "last-k", "plan": "p", "nll": 4.0, "perplexity": 54.6, "context": 512}
ROUTING = {"layer": 0, "head": 0, "mean_mask": 0.1, "landmark": 0.5, "gate": 0.1, "amplitude": 1.0}


def scored(seed: int = 0, **changed: Any) -> dict[str, Any]:
    """A row of perplexity."""
    return lm_stored.identity("rope", seed) | REST | changed


def run_directory(home: Path, *rows: dict[str, Any], settings: dict[str, Any] | None = None) -> Path:
    """A run that left rows of the needle task, or of perplexity."""
    home.mkdir(parents=True)
    name = "eval.jsonl" if "hits" in rows[0] else "perplexity.jsonl"
    (home / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    (home / "run.json").write_text(json.dumps({"seed": 0} if settings is None else settings))
    return home


BOTH = replace(stored(), measured={**stored().measured, **lm_stored.stored().measured})


@pytest.mark.parametrize("results", [stored(), lm_stored.stored(), BOTH], ids=["needle", "language", "both"])
def test_a_report_is_read_back_as_it_was_stored(tmp_path: Path, results: Results) -> None:
    store(results, tmp_path / "one")
    first = gather([tmp_path / "one"])
    store(first, tmp_path / "two")
    assert gather([tmp_path / "two"]) == first
    assert {kind: len(rows) for kind, rows in first.measured.items()} == {
        kind: len(rows) for kind, rows in results.measured.items()
    }
    store(first, tmp_path / "three")
    for path in (tmp_path / "two").iterdir():
        assert path.read_bytes() == (tmp_path / "three" / path.name).read_bytes()


def test_runs_are_found_wherever_they_lie(tmp_path: Path) -> None:
    run_directory(tmp_path / "a", row("rope", "last", 0, 1))
    run_directory(tmp_path / "deep" / "b", row("rope", "last", 1, 1))
    gathered = gather([tmp_path])
    assert [r["seed"] for r in gathered.of("needle")] == [0, 1]
    assert gathered.runs[0]["settings"] == {"seed": 0}


@pytest.mark.parametrize("cut", [b'{"run": "hal', '{"run": "λ'.encode()[:-1]])
def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path, cut: bytes) -> None:
    home = run_directory(tmp_path / "a", row("rope", "last", 0, 1))
    with (home / "eval.jsonl").open("ab") as file:
        file.write(cut)
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
def test_a_row_of_wrong_types_is_named_by_file_and_line(tmp_path: Path, line: str) -> None:
    home = run_directory(tmp_path / "a", row("rope", "last", 0, 1))
    with (home / "eval.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ValueError, match=r"eval\.jsonl: line 2 "):
        tables(gather([home]))


def test_a_perplexity_of_any_size_is_a_number() -> None:
    assert fault({"perplexity": 3.2e19}) is None
    assert fault({"perplexity": math.inf}) is not None


@pytest.mark.parametrize("content", [None, {"run": "x"}, {"run": "x", "hits": "0"}])
def test_what_is_no_result_is_refused(tmp_path: Path, content: dict[str, Any] | None) -> None:
    if content:
        run_directory(tmp_path / "a", content)
    with pytest.raises(ValueError, match=r"lacks|expected a run"):
        gather([tmp_path])


def test_a_later_row_of_the_same_measurement_counts(tmp_path: Path) -> None:
    home = run_directory(tmp_path / "a", row("rope", "last", 0, 1), row("rope", "last", 0, 1, accuracy=0.5))
    assert [r["accuracy"] for r in gather([home]).of("needle")] == [0.5]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (row("rope", "last", 0, 1), row("rope", "last", 0, 1, accuracy=0.5)),
        (scored(), scored(nll=5.0)),
    ],
)
def test_two_runs_of_one_name_are_not_mixed(tmp_path: Path, one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = run_directory(tmp_path / "a", one), run_directory(tmp_path / "b", other)
    for paths in ([first, second], [tmp_path]):
        with pytest.raises(ValueError, match=f"b: another run is called {one['run']} too"):
            gather(paths)
    assert len(gather([first, first]).runs) == 1


def test_recall_is_averaged_over_runs_that_were_measured_alike(tmp_path: Path) -> None:
    results = lm_stored.stored(("alibi",), seeds=2)
    rows = [row | {"facts": 1, "samples": 100} for row in results.of("recall")]
    rows += [row | {"facts": 8, "match": 9.0} for row in rows if row["seed"] == 0 and row["what"] == "several"]
    data = recall(replace(results, measured={"recall": tuple(rows)}))
    assert all(max(line["mean"]) < 1 and line["n"] == [2] * 4 for panel in data["panels"] for line in panel["lines"])
    other = [row | {"samples": 5 if row["seed"] else 100} for row in rows]
    store(replace(results, measured={"recall": tuple(other)}), tmp_path)
    with pytest.raises(ValueError, match="differ in samples"):
        gather([tmp_path])


def test_equal_rows_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    for seed in (0, 1):
        run_directory(tmp_path / str(seed), scored(), settings={"kind": "lm", "seed": seed})
    with pytest.raises(ValueError, match="another run is called rope_seed0 too"):
        gather([tmp_path])


def test_a_needle_run_and_a_language_model_may_have_one_name(tmp_path: Path) -> None:
    run_directory(tmp_path / "lm", scored(), settings={"kind": "lm"})
    run_directory(tmp_path / "niah", row("rope", "last", 0, 1, run="rope_seed0"))
    gathered = gather([tmp_path])
    assert [run["settings"] for run in gathered.runs] == [{"kind": "lm"}, {"seed": 0}]
    store(gathered, tmp_path / "report")
    assert gather([tmp_path / "report"]) == gathered


def test_rows_of_weights_that_were_trained_further_do_not_count(tmp_path: Path) -> None:
    home = run_directory(tmp_path / "a", row("rope", "last", 0, 4, step=10), row("rope", "last", 0, 1, step=20))
    (home / "analysis.json").write_text(json.dumps(looks("rope", "last", 0) | {"step": 10}))
    other = run_directory(tmp_path / "b", scored(step=10), scored(step=20, context=1024))
    (other / "routing.jsonl").write_text(json.dumps(lm_stored.identity("rope") | ROUTING | {"step": 0}) + "\n")
    gathered = gather([tmp_path])
    assert [r["factor"] for r in gathered.of("needle")] == [1]
    assert [r["context"] for r in gathered.of("perplexity")] == [1024]
    assert (len(gathered.of("inside")), len(gathered.of("routing"))) == (0, 1)


@pytest.mark.parametrize("rows", [[row("rope", "last", s, 1) for s in (0, 1)], [scored(s) for s in (0, 1)]])
def test_runs_count_where_a_report_lies_beside_them(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    run_directory(tmp_path / "a", rows[0])
    first = gather([tmp_path])
    store(first, tmp_path)
    store(first, tmp_path / "report")
    run_directory(tmp_path / "b", rows[1])
    assert len(gather([tmp_path]).runs) == 2


@pytest.mark.parametrize("rows", [[row("rope", "last", s, 1) for s in (0, 1)], [scored(s) for s in (0, 1)]])
@pytest.mark.parametrize(
    ("changed", "settings", "message"),
    [
        ({"seed": 0}, {}, "both seed 0"),
        ({"precision": "bfloat16"}, {}, "differ in precision"),
        ({}, {"train": {"learning_rate": 0.1}}, r"differ in train\.learning_rate"),
        ({}, {}, None),
    ],
)
def test_other_experiments_are_not_taken_for_seeds(
    tmp_path: Path, rows: list[dict[str, Any]], changed: dict[str, Any], settings: dict[str, Any], message: str | None
) -> None:
    rows = [rows[0] | {"precision": "float32"}, rows[1] | {"precision": "float32"} | changed]
    for seed, extra in ((0, {}), (1, settings)):
        own = {"seed": seed, "train": {"learning_rate": 0.2, "max_steps": seed + 1, "seed": seed}, "device": str(seed)}
        kind = {} if "hits" in rows[0] else {"kind": "lm"}
        run_directory(tmp_path / str(seed), rows[seed], settings=own | kind | extra)
    if message is None:
        assert len(gather([tmp_path]).runs) == 2
        return
    with pytest.raises(ValueError, match=message):
        gather([tmp_path])


def test_runs_that_share_a_question_are_averaged_on_it(tmp_path: Path) -> None:
    for seed, corpora in ((0, ("a", "b")), (1, ("a",))):
        run_directory(tmp_path / str(seed), *(scored(seed, corpus=corpus, low=3.9, high=4.1) for corpus in corpora))
    (panel,) = perplexity(gather([tmp_path]))["panels"]
    assert panel["lines"][0]["n"] == [2]


def test_results_written_over_themselves_are_whole_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(stored(), tmp_path)
    before = (tmp_path / "results.jsonl").read_bytes()

    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gape.utils.files.write", full)
    with pytest.raises(OSError, match=r"results\.jsonl"):
        store(stored(seeds=1), tmp_path)
    assert (tmp_path / "results.jsonl").read_bytes() == before


def test_a_report_may_leave_kinds_out() -> None:
    results = lm_stored.stored(schemes=("rope",))
    assert set(results.without(["maps", "routing"]).measured) == set(results.measured) - {"maps"}
    with pytest.raises(ValueError, match=r"without: got 'map'"):
        results.without(["map"])


@given(st.lists(st.booleans(), max_size=50))
def test_hits_are_packed_without_loss(hits: list[bool]) -> None:
    assert unpack_hits(pack_hits(hits), len(hits)) == hits
