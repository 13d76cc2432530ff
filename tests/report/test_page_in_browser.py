"""The report's page in a real Chromium: figures zoom as the explorer's maps do, and their data are behind a link."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from gape.report.catalogue import Entry
from gape.report.page import page
from gape.report.results import Results

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")]


@pytest.mark.parametrize("width", [390, 1280])
def test_a_figure_zooms_and_its_data_are_behind_a_link(tmp_path: Path, width: int) -> None:
    figure = Figure(figsize=(6, 3))
    figure.add_subplot().plot([1, 2, 3])
    figure.savefig(tmp_path / "curve.png")
    (tmp_path / "curve.json").write_text(json.dumps({"y": [1, 2, 3]}))
    entry = Entry(name="curve", paper=None, caption="A curve", draw=lambda data: figure)
    html = page("A report", Results(), [], [(entry, tmp_path / "curve.png")])
    (tmp_path / "index.html").write_text(html, encoding="utf-8")
    problems: list[str] = []
    with playwright.sync_playwright() as library:
        browser = library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        opened = browser.new_page(viewport={"width": width, "height": 800})
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        opened.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
        opened.goto((tmp_path / "index.html").as_uri())
        opened.wait_for_selector("html[data-ready=yes]")
        frame, image, whole = (opened.locator(f"figure {part}") for part in (".zoom", "img", "button"))
        before = image.bounding_box()["width"]
        assert whole.is_hidden()
        frame.dblclick()
        assert image.bounding_box()["width"] == pytest.approx(2 * before, rel=0.01)
        whole.click()
        assert image.bounding_box()["width"] == pytest.approx(before, rel=0.01)
        link = opened.locator("figure a")
        assert link.get_attribute("download") == "curve.json"
        data = link.get_attribute("href").partition(",")[2]
        assert json.loads(base64.b64decode(data)) == {"y": [1, 2, 3]}
        assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
        browser.close()
    assert problems == []
