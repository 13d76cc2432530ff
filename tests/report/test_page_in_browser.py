"""The report's page in a real Chromium: curves and maps say their values, figures zoom, data are behind a link."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from gape.report import catalogue
from gape.report.page import page
from gape.report.results import Results
from tests.report import lm_stored
from tests.report.stored import stored

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")]


@pytest.fixture
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page of a figure with one picture for all; afterwards nothing may have failed or been loaded."""
    name, results, options = request.param
    entry = catalogue.figure(name)
    figure = Figure(figsize=(6, 3))
    figure.add_subplot().plot([1, 2, 3])
    figure.savefig(tmp_path / f"{name}.png")
    (tmp_path / f"{name}.json").write_text(json.dumps(entry.data(results)))
    html = page("A report", Results(), [], [(entry, tmp_path / f"{name}.png")])
    (tmp_path / "index.html").write_text(html, encoding="utf-8")
    problems: list[str] = []
    with playwright.sync_playwright() as library:
        browser = library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(**options)
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        tab.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
        tab.goto((tmp_path / "index.html").as_uri())
        if options.get("java_script_enabled", True):
            tab.wait_for_selector("html[data-ready=yes]")
        yield tab
        assert tab.locator("html").evaluate("page => page.scrollWidth <= page.clientWidth")
        browser.close()
    assert problems == []


WIDE, NARROW = ({"viewport": {"width": width, "height": 800}} for width in (1280, 390))
NEEDLES, BOOKS = stored(), lm_stored.stored(schemes=("rope", "p-rope+gape"))


@pytest.mark.parametrize("opened", [("query-gate", NEEDLES, WIDE), ("query-gate", NEEDLES, NARROW)], indirect=True)
def test_a_picture_zooms_and_its_data_are_behind_a_link(opened: Any) -> None:
    frame, image, whole = (opened.locator(f"figure {part}") for part in (".zoom", "img", "figcaption button"))
    before = image.bounding_box()["width"]
    assert whole.is_hidden()
    frame.dblclick()
    assert image.bounding_box()["width"] == pytest.approx(2 * before, rel=0.01)
    whole.click()
    assert image.bounding_box()["width"] == pytest.approx(before, rel=0.01)
    link = opened.locator("figure a")
    assert link.get_attribute("download") == "query-gate.json"
    assert json.loads(base64.b64decode(link.get_attribute("href").partition(",")[2])) == catalogue.figure(
        "query-gate"
    ).data(NEEDLES)


@pytest.mark.parametrize("opened", [("fox", NEEDLES, WIDE), ("fox", NEEDLES, NARROW)], indirect=True)
def test_curves_say_their_values_and_switch_off(opened: Any) -> None:
    line = next(each for each in catalogue.figure("fox").data(NEEDLES)["rows"][0][0]["lines"] if each["label"] == "FoX")
    canvas, tip = opened.locator(".panels canvas").first, opened.locator("#tip")
    # Near the right end, at the largest length.
    canvas.hover(position={"x": canvas.bounding_box()["width"] - 24, "y": 40})
    assert f": {line['lengths'][-1]}" in tip.text_content()
    said = re.search(r"FoX  ([\d.]+) \(", tip.text_content())
    assert float(said[1]) == pytest.approx(line["mean"][-1], rel=1e-3)
    opened.get_by_role("button", name="FoX").click()
    canvas.hover(position={"x": canvas.bounding_box()["width"] - 25, "y": 40})
    assert "FoX" not in tip.text_content()
    canvas.dblclick()
    opened.get_by_role("button", name="Whole figure").click()
    assert opened.get_by_role("button", name="Whole figure").is_hidden()


@pytest.mark.parametrize("opened", [("lm-maps", BOOKS, WIDE), ("lm-masks", BOOKS, NARROW)], indirect=True)
def test_maps_say_the_value_of_a_cell(opened: Any) -> None:
    canvas = opened.locator(".maps canvas").first
    side = canvas.bounding_box()["width"]
    canvas.hover(position={"x": side / 4, "y": 3 * side / 4})
    # Both stored maps have 0.4 in this cell of 2 × 2; a byte of a logarithmic scale is within 4%.
    said = re.search(r"queries 512–1023, keys 0–511\n.*: ([\d.]+)$", opened.locator("#tip").text_content())
    assert float(said[1]) == pytest.approx(0.4, rel=0.04)
    canvas.hover(position={"x": 3 * side / 4, "y": side / 4})
    assert opened.locator("#tip").is_hidden()


@pytest.mark.parametrize("opened", [("fox", NEEDLES, {"java_script_enabled": False})], indirect=True)
def test_without_scripts_the_picture_is_there(opened: Any) -> None:
    assert opened.locator("figure img").is_visible()
