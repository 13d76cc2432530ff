"""The page in a real Chromium: what is chosen is shown, nothing else is loaded, and text stays text."""

from __future__ import annotations

import re
import shutil
import threading
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gape
from gape.explore.exploration import Exploration, explore
from gape.explore.export import page as exported
from gape.explore.notebook import show
from gape.explore.server import Explorer
from gape.explore.view import View, default_heads

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
NEEDLE = Path(__file__).parents[2] / "src/gape/explore/needle/view.gz"
HOSTILE = (
    "<script>document.title='taken'</script>", "<img src=x onerror=document.title='taken'>", "</script>", "\u202eabc",
    "שלום", "\x00\x07", "\ud800", "&amp;", "a" * 10**6, "", "\n", "\u2028", '"><svg onload=document.title=1>',
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as library:
        browser = library.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Opened:
    """A page that has to stay without errors and without requests to other hosts."""

    def __init__(self, browser: Any, url: str, width: int = 1280, height: int = 800) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": height})
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)
        self.page.wait_for_selector("html[data-ready=yes]", timeout=60_000)

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).first.text_content())

    def slide(self, step: int) -> None:
        self.page.locator("#eps").evaluate(
            "(input, step) => { input.value = step; input.dispatchEvent(new Event('input')); }", step
        )

    def close(self, *allowed: str) -> None:
        assert self.errors == []
        assert [url for url in self.requests if not url.startswith((*allowed, "file:", "data:", "blob:"))] == []
        self.page.close()


@pytest.fixture(scope="module")
def hostile() -> Exploration:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "context_length": 64}
    model = gape.GPT(gape.GPTConfig(vocab_size=len(HOSTILE), position="p-rope+gape", **sizes)).eval()
    ids = torch.arange(300)[None] % len(HOSTILE)
    return explore(model, ids, HOSTILE.__getitem__, title="</title><b>title</b>", about={"name": "<i>name</i>"})


@pytest.fixture
def live(hostile: Exploration) -> Iterator[Explorer]:
    server = Explorer(hostile.view, hostile)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_the_exported_needle_opens_from_disk_and_answers(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "needle.html").write_text(exported(View.load(NEEDLE)), encoding="utf-8")
    opened = Opened(browser, (tmp_path / "needle.html").as_uri())
    page = opened.page
    assert opened.text("#details h2") == "Token 511"
    page.locator("#heads").press("ArrowRight")
    assert opened.text("#head-name").startswith("Layer 1")
    page.locator("#tokens").click(position={"x": 20, "y": 60})
    chosen = opened.text("#details h2")
    assert chosen != "Token 511"
    page.keyboard.press("ArrowRight")
    assert opened.text("#details h2") != chosen
    opened.slide(16)
    assert re.search(r"may evict \d+ of 512 keys", opened.text("#bytes"))
    page.locator("#query").fill("KEY=8")
    assert re.fullmatch(r"\d+ of \d+", opened.text("#matches"))
    opened.close()


@pytest.mark.slow
def test_a_link_brings_the_same_state_back(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "needle.html").write_text(exported(View.load(NEEDLE)), encoding="utf-8")
    opened = Opened(
        browser, (tmp_path / "needle.html").as_uri() + "#l=1&h=0&t=40&e=12&c=gate&m=entropy&a=3,9&z=0.1,0.2,3"
    )
    assert opened.text("#head-name") == "Layer 1, head 0"
    assert opened.text("#details h2") == "Token 40"
    assert opened.text("#eps-value") == "0.001"
    assert opened.page.locator("input[value=gate]").is_checked()
    assert opened.page.locator("#metric").input_value() == "entropy"
    opened.page.locator("#tokens").press("End")
    opened.page.wait_for_url(re.compile("t=511"))
    opened.page.reload()
    opened.page.wait_for_selector("html[data-ready=yes]")
    assert opened.text("#details h2") == "Token 511"
    assert "a=3,9" in opened.page.url
    assert "z=0.1" in opened.page.url
    opened.close()


@pytest.mark.slow
def test_a_server_that_has_ended_leaves_no_attention_of_an_earlier_token(browser: Any, live: Explorer) -> None:
    opened = Opened(browser, live.url)
    assert "·" in opened.text("#details ol")
    opened.page.route("**/row?*", lambda route: route.abort())
    opened.page.keyboard.press("ArrowLeft")
    opened.page.get_by_text("No answer").wait_for()
    assert opened.page.locator("#details .columns p.note").count() == 2
    opened.page.close()


@pytest.mark.slow
def test_a_link_out_of_range_changes_nothing(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "needle.html").write_text(exported(View.load(NEEDLE)), encoding="utf-8")
    opened = Opened(browser, (tmp_path / "needle.html").as_uri() + "#l=9&h=-1&t=1e9&e=99&c=<b>&a=x,&z=1,2")
    assert opened.text("#details h2") == "Token 511"
    opened.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_hostile_text_is_shown_as_text(browser: Any, live: Explorer, width: int) -> None:
    opened = Opened(browser, live.url, width)
    page = opened.page
    shown = []
    for _ in range(len(HOSTILE)):
        page.keyboard.press("ArrowLeft")
        shown.append(opened.text("#details .token"))
    # Neither invisible characters, nor those that turn the text around them, nor a text that fills the page.
    assert {unicodedata.category(c) for text in shown for c in text}.isdisjoint({"Cc", "Cf", "Cs", "Zl"})
    assert max(map(len, shown)) < 60
    page.locator("#query").fill("<script>")
    page.locator("#query").press("Enter")
    assert page.evaluate("document.querySelectorAll('script, img, svg, b > *').length") == 1
    assert page.title() != "taken"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert "<script>" in opened.text("#details .token")
    opened.close(live.url)


@pytest.mark.slow
def test_shift_click_adds_and_hover_tells_values(browser: Any, live: Explorer) -> None:
    opened = Opened(browser, live.url)
    page = opened.page
    page.locator("#tokens").click(position={"x": 30, "y": 30}, modifiers=["Shift"])
    assert page.locator("#details").get_by_text("Also selected").is_visible()
    box = page.locator("#map-gated").bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + box["height"] - 20)
    assert "attention" in opened.text("#tip")
    page.mouse.wheel(0, -800)
    page.wait_for_function("document.getElementById('map-where').textContent.startsWith('zoom')")
    page.wait_for_timeout(500)
    assert any("/tile?" in url for url in opened.requests)
    opened.close(live.url)


@pytest.mark.slow
def test_the_button_exports_what_opens_from_disk(browser: Any, live: Explorer, tmp_path: Path) -> None:
    opened = Opened(browser, live.url)
    with opened.page.expect_download() as download:
        opened.page.locator("#export").click()
    download.value.save_as(tmp_path / "saved.html")
    opened.close(live.url)
    again = Opened(browser, (tmp_path / "saved.html").as_uri())
    assert again.text("#details h2") == "Token 299"
    assert again.page.title() == "</title><b>title</b>"
    assert again.page.locator("#export").is_hidden()
    again.close()


@pytest.mark.slow
def test_the_frame_of_a_notebook_runs_in_an_origin_of_its_own(browser: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "context_length": 64}
    model = gape.GPT(gape.GPTConfig(vocab_size=257, position="nope+gape", **sizes)).eval()
    frame = show(model, "The key is 7. Which key?")
    (tmp_path / "notebook.html").write_text(f"<html data-ready=yes><body>{frame._repr_html_()}", encoding="utf-8")
    opened = Opened(browser, (tmp_path / "notebook.html").as_uri())
    inside = opened.page.frame_locator("iframe")
    inside.locator("html[data-ready=yes]").wait_for(timeout=30_000)
    assert inside.locator("#details h2").text_content() == "Token 23"
    opened.close("about:")


def test_short_texts_have_every_head_in_full(hostile: Exploration) -> None:
    assert default_heads(hostile.view.header) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert default_heads({"tokens": 16384, "model": {"layers": 30, "n_heads": 9}}) == []
