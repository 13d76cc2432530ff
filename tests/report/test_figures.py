"""Figures, their numbers and the page: drawn from stored results alone, the same bytes every time."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gape.report import catalogue, inside, series
from gape.report.page import report, tables
from gape.report.results import Results, gather, store
from gape.report.style import lines
from gape.report.tables import perplexity_tables
from tests.report import lm_stored
from tests.report.stored import needles, row, stored

Figure = pytest.importorskip("matplotlib.figure").Figure

#: Enough for every figure of language models to have something to show.
FEW = ("rope", "p-rope+gape", "alibi")
DRAWN = [name for name in catalogue.FIGURES if name != "hf-perplexity"]


def results_for(entry: catalogue.Entry) -> Results:
    if entry.name == "variants":
        return needles(row("rope", "last", 0, f, variant=v, run=v) for v in "ab" for f in (1, 2))
    return lm_stored.stored(schemes=FEW) if entry.recipe.startswith(("lm/", "hf/")) else stored()


@pytest.mark.parametrize("name", DRAWN)
def test_every_figure_is_drawn(name: str) -> None:
    entry = catalogue.figure(name)
    data = entry.data(results_for(entry))
    json.dumps(data, allow_nan=False)
    figure = entry.draw(data)
    figure.draw_without_rendering()
    assert figure.axes
    if entry.chart is not None:
        chart = entry.chart.of(data)
        json.dumps(chart, allow_nan=False)
        assert chart.get("panels") or chart.get("rows")


def test_the_numbers_of_a_figure_draw_it_again(tmp_path: Path) -> None:
    entry = catalogue.figure("fox")
    numbers, png, _ = catalogue.write(entry, stored(), tmp_path)
    again = catalogue.Entry(
        name="again", paper=None, caption="", draw=entry.draw, derive=lambda: json.loads(numbers.read_text())
    )
    assert catalogue.write(again, None, tmp_path)[1].read_bytes() == png.read_bytes()


def test_figures_without_data_say_so() -> None:
    for entry in catalogue.FIGURES.values():
        if entry.measure is not None:
            with pytest.raises(series.NoData):
                entry.data(Results())


def test_an_unknown_figure_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="accuracy"):
        catalogue.figure("acuracy")


def test_the_accuracy_figure_shows_the_means() -> None:
    data = series.accuracy(stored())
    assert [[panel["title"].partition(":")[0] for panel in r] for r in data["rows"]] == [["NoPE", "RoPE", "p-RoPE"]] * 2
    (panel,) = [p for r in data["rows"] for p in r if p["target"] == "first" and p["title"].startswith("RoPE")]
    line = next(entry for entry in panel["lines"] if entry["label"] == "RoPE+GAPE")
    expected = [sum(row("rope+gape", "first", s, f)["accuracy"] for s in (0, 1)) / 2 for f in (1, 2, 4)]
    assert line["mean"] == pytest.approx(expected)
    assert {entry["label"] for entry in panel["lines"]} == {"RoPE", "RoPE+GAPE", "ALiBi"}


def test_entropy_change_is_the_difference_on_the_same_samples() -> None:
    results = stored(schemes=("nope", "nope+gape"), targets=("last",), seeds=1)
    (panel,) = inside.entropy_change(results)["panels"]
    bar = panel["series"][0]["bars"][0]
    by = {record["position"]: record["spread"][0]["entropy"] for record in results.of("inside")}
    assert (bar["layer"], bar["length"]) == (0, 64)
    assert bar["mean"] == pytest.approx(sum(by["nope+gape"][0][0]) / 2 - sum(by["nope"][0][0]) / 2)


def test_a_kind_of_token_that_never_came_has_no_landmark() -> None:
    results = stored(schemes=("rope+gape",), targets=("last",), seeds=1)
    results.of("inside")[0]["gates"]["landmark"]["filler"] = [[[None, None], [None, None]]] * 2
    data = inside.landmark_kinds(results)
    kinds = data["rows"][0]["kinds"]
    assert [head["mean"] for head in kinds["filler"]] == [None] * 4
    assert all(head["mean"] is not None for head in kinds["digit"])
    catalogue.figure("landmark-kinds").draw(data)


def test_variants_stand_beside_each_other() -> None:
    data = series.variants(results_for(catalogue.figure("variants")))
    assert [line["label"] for line in data["rows"][0][0]["lines"]] == ["a", "b"]


def test_a_figure_of_one_variant_among_several_names_it(tmp_path: Path) -> None:
    results = needles(row("rope+gape", "last", 0, 1, variant=variant, run=variant) for variant in ("floor", "plain"))
    figure = Figure()
    catalogue.write(replace(catalogue.figure("overview"), draw=lambda data: figure), results, tmp_path)
    assert "floor" in figure.get_suptitle()
    assert "variant" not in catalogue.figure("variants").data(results)


def test_a_name_is_shown_as_it_is_and_not_as_a_formula(tmp_path: Path) -> None:
    name = r"$\frac{$"
    rows = [row("rope", "last", 0, factor, variant=variant) for factor in (1, 2) for variant in ("", name)]
    numbers, *_ = catalogue.write(catalogue.figure("variants"), needles(rows), tmp_path)
    assert name in {line["label"] for line in json.loads(numbers.read_text())["rows"][0][0]["lines"]}


def test_perplexity_is_drawn_by_stratum_with_variants_named() -> None:
    data = series.perplexity(lm_stored.stored())
    assert [panel["stratum"] for panel in data["panels"]] == ["8192", "32768"]
    labels = [line["label"] for line in data["panels"][0]["lines"]]
    assert labels == ["RoPE", "p-RoPE", "p-RoPE+GAPE", "p-RoPE+GAPE (floor4)", "ALiBi", "FoX"]


def test_contexts_that_few_documents_fill_are_not_joined_to_the_others() -> None:
    results = lm_stored.stored(schemes=("rope", "p-rope+gape"))
    whole = [row | {"stratum": None} for row in results.of("perplexity") if row["stratum"] == "8192"]
    few = [row | {"documents": 1} if row["context"] == 32768 else row for row in whole]
    again = [row | {"align": 32768, "max_windows": 9, "documents": 1} for row in whole]
    fewer = [row | {"max_windows": 3, "documents": 7} for row in again if row["context"] == 512]
    both = results.only(perplexity=(*few, *again, *fewer))
    data = series.perplexity(both)
    one, other = data["panels"]
    assert (one["stretches"], one["documents"]["32768"]) == ([[512, 1024, 4096], [32768]], 1)
    assert (other["stretches"], other["align"]) == ([[512, 1024, 4096, 32768]], 32768)
    first, second = perplexity_tables(both)
    assert (first.rows[-1][2:], len(second.rows)) == (("4", "4", "4", "1"), 2)
    catalogue.figure("lm-perplexity").draw(data)


def test_models_of_transformers_are_drawn_apart_from_ours() -> None:
    own = lm_stored.stored(schemes=("rope",)).of("perplexity")
    theirs = tuple(row | {"base": "m", "native": 2048, "variant": series.UNTRAINED, "run": "m"} for row in own)
    results = Results(measured={"perplexity": own + theirs})
    data = series.hf_perplexity(results)
    assert (data["native"], data["panels"][0]["lines"][0]["position"]) == (2048, series.UNTRAINED)
    assert [line["label"] for line in series.own_perplexity(results)["panels"][0]["lines"]] == ["RoPE"]
    catalogue.figure("hf-perplexity").draw(data)


def test_several_seeds_are_averaged() -> None:
    results = lm_stored.stored(schemes=("rope",), seeds=2)
    line = series.far_back(results)["columns"][0]["loss"][0]
    distance = lm_stored.DISTANCES[0]
    nll = [row["nll"] for row in results.of("far_back") if (row["kind"], row["distance"]) == ("ngram", distance)]
    assert (line["mean"][0], line["n"][0]) == (pytest.approx(sum(nll) / 2), 2)
    assert line["low"][0] < sum(nll) / 2 < line["high"][0]


def test_entropy_is_that_of_prompts_where_there_are_any() -> None:
    data = inside.entropy(lm_stored.stored())
    assert data["asked"] == {"data": "ruler.jsonl", "length": None}
    assert data["scatter"]["label"] == "p-RoPE+GAPE"
    assert (data["masks"]["layer"], len(data["masks"]["heads"])) == (1, 4)


def test_pictures_stand_beside_each_other_as_in_the_paper() -> None:
    results = lm_stored.stored()
    assert [model["label"] for model in inside.maps(results)["models"][:3]] == ["p-RoPE+GAPE", "p-RoPE", "RoPE"]
    assert [model["label"] for model in inside.masks(results)["models"]] == ["p-RoPE+GAPE", "p-RoPE+GAPE (floor4)"]


def test_variants_with_gates_and_without_have_styles_of_their_own() -> None:
    drawn = lines([{"position": position} for position in ("yarn", "yarn", "yarn+gape", "yarn+gape", "yarn+gape")])
    assert len({(style["color"], style["markerfacecolor"]) for style in drawn}) == 5


class Links(HTMLParser):
    """Collects whatever a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.images = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.images += tag == "img"
        fetching = ("src", "href", "srcset", "data", "action", "poster")
        inside = ("data:image/png", "data:application/json")
        self.links += [v or "" for name, v in attrs if name in fetching and not (v or "").startswith(inside)]
        assert tag not in ("link", "iframe")


def test_the_page_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("overview", "lm-far-back", "fox")
    monkeypatch.setattr(catalogue, "FIGURES", {name: catalogue.figure(name) for name in names})
    results = stored(schemes=("p-rope", "p-rope+gape"), targets=("last",))
    results = replace(results, measured={**results.measured, **lm_stored.stored(schemes=FEW).measured})
    page = report(results, tmp_path, title="<needles> & more").read_text(encoding="utf-8")
    links = Links()
    links.feed(page)
    assert links.links == []
    assert links.images == len(list((tmp_path / "figures").glob("*.png"))) == 2
    assert not re.search(r"url\(|@import|https?://", page)
    assert "<h1>&lt;needles&gt; &amp; more</h1>" in page
    assert all(table.html() in page for table in tables(results))
    assert "model.n_layer = 2" in page
    assert "versions.torch = 2.9" in page


def test_a_report_can_be_reported_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "FIGURES", {"overview": catalogue.figure("overview")})
    store(stored(schemes=("p-rope", "p-rope+gape"), targets=("last",)), tmp_path / "zero")
    for before, after in (("zero", "one"), ("one", "two")):
        report(gather([tmp_path / before]), tmp_path / after)
    names = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*") if p.is_file())
    assert all((tmp_path / "one" / n).read_bytes() == (tmp_path / "two" / n).read_bytes() for n in names)


def test_without_matplotlib_there_are_tables_and_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    messages: list[str] = []
    page = report(stored(), tmp_path, log=messages.append).read_text(encoding="utf-8")
    assert "gape[plot]" in messages[0]
    assert "<table>" in page
    assert "<img" not in page


@pytest.mark.parametrize("name", [pytest.param("fox", marks=pytest.mark.slow), "logit-gap"])
def test_the_same_results_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    store(stored(), tmp_path / "results")
    for place in ("one", "two"):
        paths = catalogue.write(catalogue.figure(name), gather([tmp_path / "results"]), tmp_path / place)
        assert [path.name for path in paths] == [f"{name}.json", f"{name}.png", f"{name}.pdf"]
    for path in paths:
        assert path.read_bytes() == (tmp_path / "one" / path.name).read_bytes()
