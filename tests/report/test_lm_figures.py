"""Figures, tables and the page of language models: drawn from stored rows alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gape.report import catalogue, inside, series, statistics, tables, write
from gape.report.results import Results, collect, gather, store
from gape.report.style import lines
from gape.tasks import perplexity_rows
from tests.report import stored as needle
from tests.report.lm_stored import DISTANCES, identity, stored

pytest.importorskip("matplotlib")
#: Enough for every figure to have something to show.
FEW = ("rope", "p-rope+gape", "alibi")
FIGURES = [name for name, entry in catalogue.FIGURES.items() if entry.command and entry.recipe == catalogue.LANGUAGE]


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn(name: str, tmp_path: Path) -> None:
    numbers, png, pdf = catalogue.write(catalogue.figure(name), stored(schemes=FEW), tmp_path)
    assert json.loads(numbers.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert pdf.read_bytes().startswith(b"%PDF")


def test_perplexity_is_drawn_by_stratum_with_variants_named() -> None:
    data = series.perplexity(stored())
    assert [panel["title"] for panel in data["panels"]] == [
        "Documents of about 8,192 tokens",
        "Documents of about 32,768 tokens",
    ]
    labels = [line["label"] for line in data["panels"][0]["lines"]]
    assert labels == ["RoPE", "p-RoPE", "p-RoPE+GAPE", "p-RoPE+GAPE (floor4)", "ALiBi", "FoX"]


def test_contexts_that_few_documents_fill_are_not_joined_to_the_others(tmp_path: Path) -> None:
    results = stored(schemes=("rope", "p-rope+gape"))
    whole = [row | {"stratum": None} for row in results.measured["perplexity"] if row["stratum"] == "8192"]
    few = [row | {"documents": 1} if row["context"] == 32768 else row for row in whole]
    again = [row | {"align": 32768, "max_windows": 9, "documents": 1} for row in whole]
    fewer = [row | {"max_windows": 3, "documents": 7} for row in again if row["context"] == 512]
    both = replace(results, measured=results.measured | {"perplexity": (*few, *again, *fewer)})
    one, other = series.perplexity(both)["panels"]
    assert (one["stretches"], one["documents"]["32768"]) == ([[512, 1024, 4096], [32768]], 1)
    assert (other["stretches"], other["title"]) == (
        [[512, 1024, 4096, 32768]],
        "All documents (1), tokens that 32,768 precede",
    )
    first, second = tables.perplexity_tables(both)
    assert (first.rows[-1], len(second.rows)) == (("documents", "", "4", "4", "4", "1"), 2)
    base = {"position": "p-rope", "variant": "p-rope"}
    beside = [row | base if row["position"] == "rope" else row for row in (*few, *again)]
    assert {d.what for d in statistics.perplexity_differences(beside)} == {
        "last-k",
        "last-k, tokens that 32,768 precede",
    }
    catalogue.write(catalogue.figure("lm-perplexity"), both, tmp_path)


def test_several_seeds_are_averaged() -> None:
    results = stored(schemes=("rope",), seeds=2)
    line = series.far_back(results)["columns"][0]["loss"][0]
    rows = [row for row in results.measured["far_back"] if row["kind"] == "ngram" and row["distance"] == DISTANCES[0]]
    mean = sum(row["nll"] for row in rows) / 2
    assert (line["mean"][0], line["n"][0]) == (pytest.approx(mean), 2)
    assert line["low"][0] < mean < line["high"][0]


def test_entropy_is_that_of_prompts_where_there_are_any() -> None:
    data = inside.entropy(stored())
    assert data["asked"] == {"data": "ruler.jsonl", "length": None}
    assert data["scatter"]["label"] == "p-RoPE+GAPE"
    assert (data["masks"]["layer"], len(data["masks"]["heads"])) == (1, 4)


def test_pictures_stand_beside_each_other_as_in_the_paper() -> None:
    assert [model["label"] for model in inside.maps(stored())["models"][:3]] == ["p-RoPE+GAPE", "p-RoPE", "RoPE"]
    assert [model["label"] for model in inside.masks(stored())["models"]] == ["p-RoPE+GAPE", "p-RoPE+GAPE (floor4)"]


def test_positions_at_the_ends_of_windows_are_put_together() -> None:
    (line,) = series.positions(stored(schemes=("rope",)))["lines"]
    assert line["at"] == [8.0, 40.0, 160.0]


def test_schemes_are_compared_on_the_same_documents() -> None:
    results = stored(schemes=("rope", "p-rope", "p-rope+gape", "alibi", "fox"))
    found = statistics.far_back_differences(results.measured["far_back"])
    assert {d.scheme for d in found} == {"p-RoPE+GAPE"}
    assert {d.other for d in found} == {"p-RoPE", "RoPE", "ALiBi", "FoX"}
    beside = next(d for d in found if d.other == "ALiBi" and d.what == "planted")
    assert (beside.verdict, beside.documents) == ("better, one seed", 3)
    gains = statistics.far_back_differences(results.measured["far_back"], gain=True)
    assert next(d for d in gains if d.other == "ALiBi").difference == pytest.approx(1.0)
    assert next(d for d in gains if d.other == "ALiBi").verdict == "better, one seed"
    (window, *_) = statistics.perplexity_differences(results.measured["perplexity"])
    assert (window.what, window.documents) == ("last-k, stratum 8192", 4)


def test_a_single_document_decides_nothing() -> None:
    rows = []
    for row in stored(schemes=("p-rope", "p-rope+gape")).measured["far_back"]:
        one = {key: row[key][:1] for key in ("document", "document_tokens", "document_nll", "document_control")}
        rows.append(row | one)
    found = statistics.far_back_differences(rows)
    assert {(d.verdict, d.low, d.high) for d in found} == {("one document", None, None)}
    (table,) = [t for t in tables.far_back_table(rows) if "loss beside" in t.title]
    assert {cells[5:] for cells in table.rows} == {("–", "one document")}
    only = [row | {"documents": 1} for row in rows if row["position"] == "p-rope"]
    assert statistics.pooled(only[:1]) | {"mean": 0} == {"mean": 0, "low": None, "high": None, "n": 1}


def test_differences_are_those_of_gape_lm_perplexity() -> None:
    rows = stored(schemes=("p-rope", "p-rope+gape")).measured["perplexity"]
    found = statistics.perplexity_differences(rows)[0]
    base, gated = (next(row for row in rows if row["position"] == p) for p in ("p-rope", "p-rope+gape"))
    other = perplexity_rows.difference(gated, base)
    assert (found.difference, found.low, found.high) == pytest.approx((other.nll, other.low, other.high))


def test_answers_to_several_questions_are_not_averaged() -> None:
    results = stored(schemes=("rope",))
    own = results.measured["far_back"]
    asked = [row | {"asked": {"ngram": 8}, "key": "other", "nll": 9.0} for row in own if row["distance"] == 512]
    both = replace(results, measured={"far_back": (*own, *asked)})
    assert series.far_back(both) == series.far_back(results)
    assert tables.far_back_table(both.measured["far_back"]) == tables.far_back_table(own)


def test_stored_rows_are_read_back_as_they_were(tmp_path: Path) -> None:
    store(stored(), tmp_path / "one")
    first = gather([tmp_path / "one"])
    store(first, tmp_path / "two")
    assert gather([tmp_path / "two"]) == first
    assert set(first.measured) == set(stored().measured)


#: What every row has that these tests do not care about.
REST: dict[str, dict[str, object]] = {
    "perplexity": {"protocol": "last-k", "plan": "p", "nll": 4.0, "perplexity": 54.6},
    "routing": {"mean_mask": 0.1, "landmark": 0.5, "gate": 0.1, "amplitude": 1.0},
}


def run_directory(home: Path, step: int = 500, **files: list[dict[str, object]]) -> Path:
    home.mkdir(parents=True)
    for name, rows in files.items():
        rest = identity("rope") | {"step": step} | REST[name]
        text = "".join(json.dumps(rest | row) + "\n" for row in rows)
        (home / f"{name}.jsonl").write_text(text)
    return home


def test_two_runs_of_one_name_are_not_mixed(tmp_path: Path) -> None:
    one = run_directory(tmp_path / "a", perplexity=[{"context": 512, "nll": 4.0}])
    other = run_directory(tmp_path / "b", perplexity=[{"context": 512, "nll": 5.0}])
    for paths in ([one, other], [tmp_path]):
        with pytest.raises(ValueError, match=r"b: another run is called rope_seed0 too; report them apart"):
            gather(paths)
    assert len(gather([one, one]).measured["perplexity"]) == 1
    # The same rows, of other settings.
    (other / "perplexity.jsonl").write_bytes((one / "perplexity.jsonl").read_bytes())
    for seed, home in enumerate((one, other)):
        (home / "run.json").write_text(json.dumps({"kind": "lm", "seed": seed}))
    with pytest.raises(ValueError, match="another run is called rope_seed0 too"):
        gather([tmp_path])


@pytest.mark.parametrize(
    ("row", "settings", "said"),
    [
        ({"seed": 0}, {}, "are both seed 0;"),
        ({"corpus": "other"}, {}, "differ in corpus;"),
        ({"precision": "float32"}, {}, "differ in precision;"),
        ({}, {"train": {"learning_rate": 0.1}}, "differ in train.learning_rate;"),
        ({}, {}, None),
    ],
)
def test_other_experiments_are_not_taken_for_seeds(
    tmp_path: Path, row: dict[str, object], settings: dict[str, object], said: str | None
) -> None:
    asked = {"context": 512, "corpus": "c", "precision": "bfloat16", "nll": 4.0}
    for seed, changed, own in ((0, {}, {}), (1, row, settings)):
        home = run_directory(tmp_path / str(seed), perplexity=[identity("rope", seed) | asked | changed])
        told = {"kind": "lm", "seed": seed, "train": {"learning_rate": 0.2, "max_steps": seed + 1}} | own
        (home / "run.json").write_text(json.dumps(told))
    if said is None:
        assert len(gather([tmp_path]).measured["perplexity"]) == 2
        return
    with pytest.raises(ValueError, match=f"rope_seed1 and rope_seed0 {said} report them apart"):
        gather([tmp_path])
    assert len(collect([tmp_path]).measured["perplexity"]) == 2


def test_runs_that_share_a_question_are_averaged_on_it(tmp_path: Path) -> None:
    asked = {"protocol": "last-k", "context": 512, "nll": 4.0, "low": 3.9, "high": 4.1}
    for seed, corpora in ((0, ("a", "b")), (1, ("a",))):
        rows = [identity("rope", seed) | asked | {"corpus": corpus} for corpus in corpora]
        run_directory(tmp_path / str(seed), perplexity=rows)
    (panel,) = series.perplexity(gather([tmp_path]))["panels"]
    assert panel["lines"][0]["n"] == [2]


def test_a_needle_run_and_a_language_model_may_have_one_name(tmp_path: Path) -> None:
    home = run_directory(tmp_path / "lm", perplexity=[{"context": 512}])
    (home / "run.json").write_text('{"kind": "lm"}')
    home = tmp_path / "niah"
    home.mkdir()
    (home / "eval.jsonl").write_text(json.dumps(needle.row("rope", "last", 0, 1, run="rope_seed0")) + "\n")
    (home / "run.json").write_text('{"seed": 0}')
    found = gather([tmp_path])
    assert [run["settings"] for run in found.runs] == [{"kind": "lm"}, {"seed": 0}]
    store(found, tmp_path / "report")
    assert gather([tmp_path / "report"]) == found


def test_rows_of_weights_that_were_trained_further_do_not_count(tmp_path: Path) -> None:
    home = run_directory(tmp_path / "a", perplexity=[{"context": 512}], routing=[{"step": 0, "layer": 0, "head": 0}])
    newer = identity("rope") | {"step": 900, "context": 1024}
    with (home / "perplexity.jsonl").open("a") as file:
        file.write(json.dumps(newer) + '\n{"run": "ro')
    found = gather([tmp_path]).measured
    assert [row["context"] for row in found["perplexity"]] == [1024]
    assert len(found["routing"]) == 1


def test_a_report_among_runs_is_not_read_for_one(tmp_path: Path) -> None:
    run_directory(tmp_path / "a", perplexity=[{"context": 512}])
    first = gather([tmp_path])
    store(first, tmp_path / "report")
    store(first, tmp_path)
    run_directory(tmp_path / "b", perplexity=[{"context": 1024}])
    assert [row["context"] for row in gather([tmp_path]).measured["perplexity"]] == [512, 1024]


def test_needles_and_language_models_go_into_one_report(tmp_path: Path) -> None:
    needles = needle.stored(schemes=("rope",), targets=("last",))
    both = replace(needles, measured={**needles.measured, **stored().measured})
    store(both, tmp_path)
    found = gather([tmp_path])
    assert len(found.of("needle")) == len(both.of("needle"))
    assert found.measured.keys() == both.measured.keys()


def test_the_page_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "FIGURES", {name: catalogue.figure(name) for name in ("lm-far-back", "accuracy")})
    results = stored()
    page = write.report(results, tmp_path, title="Language models").read_text(encoding="utf-8")
    assert page.count("<img") == 1
    for table in tables.language_tables(results):
        assert table.title.split(":")[0] in page
    assert not (tmp_path / "results.jsonl").exists()


def test_a_table_of_perplexities_marks_the_lowest() -> None:
    first = tables.perplexity_tables(stored(schemes=("rope", "p-rope+gape")))[0]
    assert first.header == ("Scheme", "seeds", "512", "1,024", "4,096", "32,768")
    assert (1, 5) in first.strong


def test_a_row_without_a_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "far_back.jsonl").write_text('{"kind": "ngram"}\n')
    with pytest.raises(ValueError, match="lacks run, position, seed"):
        gather([tmp_path])


def test_figures_without_data_say_so() -> None:
    empty = Results()
    for name in FIGURES:
        with pytest.raises(series.NoData):
            catalogue.figure(name).data(empty)


def test_a_report_may_leave_kinds_out() -> None:
    results = stored(schemes=("rope",))
    assert set(results.without(["maps", "routing"]).measured) == set(results.measured) - {"maps"}
    with pytest.raises(ValueError, match=r"without: got 'map', expected some of .*; did you mean maps\?"):
        results.without(["map"])


def test_a_variant_is_set_beside_the_plain_scheme() -> None:
    rows = stored(schemes=("p-rope+gape", "p-rope+gape_floor4")).measured["perplexity"]
    pairs = {(d.scheme, d.other) for d in statistics.perplexity_differences(rows)}
    assert pairs == {("p-RoPE+GAPE (floor4)", "p-RoPE+GAPE")}


def test_variants_with_gates_and_without_are_told_apart() -> None:
    drawn = lines([{"position": position} for position in ("yarn", "yarn", "yarn+gape", "yarn+gape", "yarn+gape")])
    assert len({(look["color"], look["markerfacecolor"]) for look in drawn}) == 5
