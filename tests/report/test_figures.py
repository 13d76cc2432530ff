"""Figures, tables and the page: drawn from stored results alone, the same bytes every time."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gape.report import catalogue, inside, series, tables, write
from gape.report.results import Results, gather, store
from tests.report.stored import needles, row, stored

Figure = pytest.importorskip("matplotlib.figure").Figure


@pytest.mark.parametrize("name", [n for n, e in catalogue.FIGURES.items() if n != "variants" and not e.command])
def test_every_figure_is_drawn(name: str, tmp_path: Path) -> None:
    paths = catalogue.write(catalogue.figure(name), stored(), tmp_path)
    assert [path.name for path in paths] == [f"{name}.json", f"{name}.png", f"{name}.pdf"]
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    assert paths[2].read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("name", ["fox", "logit-gap"])
def test_the_same_results_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    store(stored(), tmp_path / "results")
    for place in ("one", "two"):
        catalogue.write(catalogue.figure(name), gather([tmp_path / "results"]), tmp_path / place)
    for ending in ("json", "png", "pdf"):
        one, two = ((tmp_path / place / f"{name}.{ending}").read_bytes() for place in ("one", "two"))
        assert one == two


def test_the_numbers_of_a_figure_draw_it_again(tmp_path: Path) -> None:
    entry = catalogue.figure("fox")
    numbers, png, _ = catalogue.write(entry, stored(), tmp_path)
    again = catalogue.Entry(
        name="again", paper=None, caption="", draw=entry.draw, derive=lambda: json.loads(numbers.read_text())
    )
    assert catalogue.write(again, None, tmp_path)[1].read_bytes() == png.read_bytes()


def test_the_accuracy_figure_shows_the_means() -> None:
    data = series.accuracy(stored())
    assert [[panel["title"].partition(":")[0] for panel in r] for r in data["rows"]] == [["NoPE", "RoPE", "p-RoPE"]] * 2
    (panel,) = [p for r in data["rows"] for p in r if p["target"] == "first" and p["title"].startswith("RoPE")]
    line = next(entry for entry in panel["lines"] if entry["label"] == "RoPE+GAPE")
    expected = [sum(row("rope+gape", "first", s, f)["accuracy"] for s in (0, 1)) / 2 for f in (1, 2, 4)]
    assert line["mean"] == pytest.approx(expected)
    assert {entry["label"] for entry in panel["lines"] if entry["position"] == entry["evaluated"]} == {
        "RoPE", "RoPE+GAPE", "ALiBi",
    }  # fmt: skip


def test_entropy_change_is_the_difference_on_the_same_samples() -> None:
    results = stored(schemes=("nope", "nope+gape"), targets=("last",), seeds=1)
    (panel,) = inside.entropy_change(results)["panels"]
    bar = panel["series"][0]["bars"][0]
    plain, gated = (
        next(a for a in results.of("inside") if a["position"] == p)["spread"][0]["entropy"]
        for p in ("nope", "nope+gape")
    )
    assert (bar["layer"], bar["length"]) == (0, 64)
    assert bar["mean"] == pytest.approx(sum(gated[0][0]) / 2 - sum(plain[0][0]) / 2)


def test_a_kind_of_token_that_never_came_has_no_landmark(tmp_path: Path) -> None:
    results = stored(schemes=("rope+gape",), targets=("last",), seeds=1)
    results.of("inside")[0]["gates"]["landmark"]["filler"] = [[[None, None], [None, None]]] * 2
    numbers, *_ = catalogue.write(catalogue.figure("landmark-kinds"), results, tmp_path)
    kinds = json.loads(numbers.read_text())["rows"][0]["kinds"]
    assert [head["mean"] for head in kinds["filler"]] == [None] * 4
    assert all(head["mean"] is not None for head in kinds["digit"])


def test_figures_without_data_say_so() -> None:
    empty = Results()
    for entry in catalogue.FIGURES.values():
        if entry.measure is not None:
            with pytest.raises(series.NoData):
                entry.data(empty)


def test_variants_stand_beside_each_other(tmp_path: Path) -> None:
    rows = tuple(
        row("rope+gape", "last", 0, factor, variant=variant, run=variant) for variant in "ab" for factor in (1, 2)
    )
    data = series.variants(needles(rows))
    assert [line["label"] for line in data["rows"][0][0]["lines"]] == ["a", "b"]


def test_a_figure_of_one_variant_among_several_says_which(tmp_path: Path) -> None:
    rows = tuple(row("rope+gape", "last", 0, 1, variant=variant, run=variant) for variant in ("floor", "plain"))
    results = needles(rows)
    drawn: list[str] = []

    def draw(data: series.Data) -> Figure:
        drawn.append(data["variant"])
        return figure

    figure = Figure()
    entry = replace(catalogue.figure("overview"), draw=draw)
    catalogue.write(entry, results, tmp_path)
    assert drawn == ["floor"]
    assert figure.get_suptitle() == "variant floor"
    assert "variant" not in catalogue.figure("variants").data(results)


def test_a_name_is_shown_as_it_is_and_not_as_a_formula(tmp_path: Path) -> None:
    name = r"$\frac{$"
    rows = tuple(row("rope", "last", 0, factor, variant=variant) for factor in (1, 2) for variant in ("", name))
    numbers, *_ = catalogue.write(
        catalogue.figure("variants"), needles(rows), tmp_path
    )  # fmt: skip
    assert name in json.dumps(json.loads(numbers.read_text()), ensure_ascii=False).replace(r"\\", "\\")


def test_attention_maps_say_which_needle_was_asked_for() -> None:
    for target, words in (("first", "Needle far (first)"), ("last", "Needle close (last)")):
        entry = catalogue.figure("attention-maps")
        data = entry.data(stored(schemes=("rope",), targets=(target,), seeds=1))
        assert entry.draw(data).get_suptitle() == f"{words}, 64 tokens"


def test_figures_that_are_no_longer_drawn_go_and_those_of_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {name: catalogue.figure(name) for name in ("overview", "attention-maps")}
    monkeypatch.setattr(catalogue, "FIGURES", entries)
    results, figures = stored(schemes=("rope",), targets=("last",), seeds=1), tmp_path / "figures"
    write.report(results, tmp_path)
    mine = {"fox.png": b"mine", "attention-maps.pdf": b"drawn over by hand"}
    for name, content in mine.items():
        (figures / name).write_bytes(content)
    for _ in range(2):
        write.report(results.without(["inside"]), tmp_path)
        assert {path.name for path in figures.iterdir()} == {
            "overview.json", "overview.png", "overview.pdf", "drawn.json", *mine,
        }  # fmt: skip
    assert {name: (figures / name).read_bytes() for name in mine} == mine


def test_an_unknown_figure_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean accuracy"):
        catalogue.figure("acuracy")


def test_a_table_has_means_deviations_and_the_best() -> None:
    rows = [row("rope", "last", s, 1, accuracy=a) for s, a in enumerate((0.2, 0.4))]
    rows += [row("rope+gape", "last", s, 1, accuracy=a) for s, a in enumerate((0.8, 0.8))]
    (table,) = tables.accuracy_tables(needles(rows))
    assert table.rows == (("RoPE", "2", "0.30 ± 0.14"), ("RoPE+GAPE", "2", "0.80 ± 0.00"))
    assert table.strong == {(1, 2)}
    assert "| RoPE+GAPE | 2 | **0.80 ± 0.00** |" in table.markdown()


def test_a_table_says_where_seeds_are_missing() -> None:
    rows = [row("rope", "last", s, f) for s in range(3) for f in (1, 2) if (s, f) != (2, 2)]
    (table,) = tables.accuracy_tables(needles(rows))
    assert table.rows[0][1] == "2–3"


def test_a_table_gives_no_length_that_is_not_everyones() -> None:
    rows = (row("rope", "last", 0, 1), row("nope", "last", 0, 1, length=128))
    (table,) = tables.accuracy_tables(needles(rows))
    assert table.header[2] == "1×"


@pytest.mark.parametrize(("seeds", "verdict"), [(1, "one seed"), (3, "better")])
def test_a_verdict_needs_several_seeds(seeds: int, verdict: str) -> None:
    table = tables.comparison_table(stored(schemes=("rope", "rope+gape"), targets=("last",), seeds=seeds))
    assert table is not None
    assert table.rows[2][-1] == verdict


class Links(HTMLParser):
    """Collects whatever a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.images = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.images += tag == "img"
        fetching = ("src", "href", "srcset", "data", "action", "poster")
        self.found += [v or "" for name, v in attrs if name in fetching and not (v or "").startswith("data:image/png")]
        assert tag not in ("script", "link", "iframe")


def test_the_page_stands_alone(tmp_path: Path) -> None:
    results = stored(schemes=("p-rope", "p-rope+gape"), targets=("last",))
    page = write.report(results, tmp_path, title="<needles> & more").read_text(encoding="utf-8")
    links = Links()
    links.feed(page)
    assert links.found == []
    assert links.images == len(list((tmp_path / "figures").glob("*.png"))) > 5
    assert not re.search(r"url\(|@import|https?://", page)
    assert "<h1>&lt;needles&gt; &amp; more</h1>" in page
    assert tables.accuracy_tables(results)[0].rows[1][2] in page
    assert "model.n_layer = 2" in page
    assert "versions.torch = 2.9" in page


def test_a_report_can_be_reported_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "FIGURES", {"overview": catalogue.figure("overview")})
    write.report(gather_of(tmp_path), tmp_path / "one")
    write.report(gather([tmp_path / "one"]), tmp_path / "two")
    names = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*") if p.is_file())
    assert all((tmp_path / "one" / n).read_bytes() == (tmp_path / "two" / n).read_bytes() for n in names)


def gather_of(tmp_path: Path) -> Results:
    store(stored(schemes=("p-rope", "p-rope+gape"), targets=("last",)), tmp_path / "stored")
    return gather([tmp_path / "stored"])


def test_without_matplotlib_there_are_tables_and_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    said: list[str] = []
    page = write.report(stored(), tmp_path, say=said.append).read_text(encoding="utf-8")
    assert "pip install 'gape[plot]'" in said[0]
    assert "<table>" in page
    assert "<img" not in page
