"""How long the explorer's page takes to answer, what memory it needs, and how smoothly it moves, in a real Chromium.

The model reads a text, then a browser opens the page of a server in this process: seconds until it answers (`ready_s`,
and those of its process alone, `ready_cpu_s`), memory of its process, frames per second while the text scrolls and the
map zooms, with the milliseconds of processor time that a frame takes (both from a trace), and the bytes of the export.
On a busy machine (`load` processes wait or run) the times of processors tell more. A model without gates gets untrained
ones.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

import common
import gape.hf
from gape.cli.options import Device
from gape.data import load_tokenizer
from gape.experiments.experiment import pick_device
from gape.experiments.open_model import load_transformers, model_home
from gape.explore.exploration import Exploration, explore
from gape.explore.export import page as exported
from gape.explore.notebook import token_text
from gape.explore.server import Explorer
from gape.explore.view import View, parsed_heads
from gape.utils.validation import invalid_argument, whole

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FIELDS = (
    *common.STAMP, "model", "tokens", "key_heads", "compute_s", "view_bytes", "ready_s", "ready_cpu_s",
    "page_bytes", "scroll_fps", "scroll_ms", "zoom_fps", "zoom_ms", "export_bytes", "load", "chromium",
)  # fmt: skip
SHOWN = FIELDS[len(common.STAMP) :]
CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
#: Untrained gates: amplitude 1, and a floor so that keys can be evicted.
GATES = {"gate_floor": 32.0}
#: Seconds that the text scrolls, and that the map zooms.
SECONDS = 4.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured: a model's directory, tokens of the text, the text, heads of the export, a stored view."""

    device: torch.device
    model: Path
    tokens: int
    text: Path
    heads: str
    view: Path | None
    browser: str


def measure(settings: Settings, stamp: common.Row, say: Callable[[str], None]) -> Iterator[common.Row]:
    """One row."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    began = time.monotonic()
    view, exploration = _explored(settings, say)
    row = stamp | {
        "model": settings.model.resolve().name, "tokens": str(view.header["tokens"]),
        "key_heads": str(view.header["model"]["layers"] * view.header["model"]["n_kv_heads"]),
        "compute_s": "" if exploration is None else common.number(time.monotonic() - began),
        "view_bytes": str(len(view.to_bytes())),
    }  # fmt: skip
    say(f"view: {row['compute_s']} s")
    server = Explorer(view, exploration)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as library:
        browser = library.chromium.launch(executable_path=settings.browser, args=FLAGS)
        row |= {"chromium": browser.version} | _page(browser, server.url)
        browser.close()
    server.shutdown()
    sizes = view.header["model"]
    heads = parsed_heads(settings.heads, sizes["layers"], sizes["n_heads"])
    yield row | {"export_bytes": str(len(exported(view, exploration, heads)))}


def _explored(settings: Settings, say: Callable[[str], None]) -> tuple[View, Exploration | None]:
    """The view of a text, computed, or stored by an earlier call."""
    if settings.view is not None and settings.view.is_file():
        return View.load(settings.view), None
    home = model_home(settings.model)
    model = load_transformers(str(home))
    if not hasattr(model.config, "gape"):
        gape.hf.inject(model, context_length=2048, start="paper", gates=GATES)
    tokenizer = load_tokenizer(home)
    ids = tokenizer.encode(settings.text.read_text(encoding="utf-8"))[: settings.tokens]
    if len(ids) < settings.tokens:
        raise invalid_argument("text", len(ids), f"one of {settings.tokens} tokens")
    exploration = explore(
        gape.hf.LanguageModel(model.to(settings.device).eval()), torch.tensor([ids], device=settings.device),
        token_text(tokenizer), title=f"gape explore: {home.name}", about={"name": home.name},
        progress=lambda layers: say(f"{layers} layers"),
    )  # fmt: skip
    if settings.view is not None:
        exploration.view.save(settings.view)
    return exploration.view, exploration


def _page(browser: Browser, url: str) -> common.Row:
    """What a page does from its opening on."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    began = time.monotonic()
    page.goto(url)
    page.wait_for_selector("html[data-ready=yes]", timeout=120_000)
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("document.querySelector('#details h2')?.textContent.length > 0")
    ready, process = time.monotonic() - began, _renderer(browser)
    row = {"ready_s": common.number(ready), "ready_cpu_s": common.number(_seconds(process))}
    page.wait_for_timeout(1000)
    for name, move in (("scroll", _scroll), ("zoom", _zoom)):
        rate, each = _frames(browser, page, move)
        row |= {f"{name}_fps": common.number(rate), f"{name}_ms": common.number(each)}
    return row | {"page_bytes": str(_resident(process)), "load": common.number(os.getloadavg()[0], 2)}


def _scroll(page: Page, until: float) -> None:
    page.mouse.move(300, 400)
    while time.monotonic() < until:
        page.mouse.wheel(0, -120)
        page.wait_for_timeout(16)


def _zoom(page: Page, until: float) -> None:
    box = page.locator("#map-gated").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.7 * box["height"])
    step = 0
    while time.monotonic() < until:
        page.mouse.wheel(0, -60 if step // 60 % 2 == 0 else 60)
        page.wait_for_timeout(16)
        step += 1


def _frames(browser: Browser, page: Page, move: Callable[[Page, float], None]) -> tuple[float, float]:
    """Frames per second that came to the screen while something moved, and the main thread's milliseconds of each."""
    browser.start_tracing(
        page=page, categories=["viz", "benchmark", "disabled-by-default-devtools.timeline", "toplevel"]
    )
    began = time.monotonic()
    move(page, began + SECONDS)
    seconds = time.monotonic() - began
    events = json.loads(browser.stop_tracing())["traceEvents"]
    # A frame has a beginning and an end in the trace.
    shown = sum(event["name"] == "SubmitCompositorFrameToPresentationCompositorFrame" for event in events) / 2
    main = {(e["pid"], e["tid"]) for e in events if e.get("args", {}).get("name") == "CrRendererMain"}
    busy = sum(e.get("tdur", 0) for e in events if e["name"] == "RunTask" and (e["pid"], e["tid"]) in main)
    return shown / seconds, busy / 1000 / max(1, shown)


def _renderer(browser: Browser) -> int:
    """The number of the page's own process: of those that render, the largest."""
    session = browser.new_browser_cdp_session()
    processes: list[dict[str, Any]] = session.send("SystemInfo.getProcessInfo")["processInfo"]
    renderers = [int(process["id"]) for process in processes if process["type"] == "renderer"]
    return max(renderers, key=_resident)


def _resident(process: int) -> int:
    """Bytes of memory of a process, the browser's code in it included."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return 1024 * int(found[1]) if found else 0


def _seconds(process: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(
    model: Annotated[Path, typer.Argument(help="A directory of a model of transformers, such as SmolLM2-135M.")],
    text: Annotated[Path, typer.Option(help="A text that is long enough.")],
    tokens: Annotated[int, typer.Option(help="Tokens of the text.")] = 16384,
    heads: Annotated[str, typer.Option(metavar="<layer.head,...>", help="Heads that the export has in full.")] = "15.0",
    view: Annotated[
        Path | None,
        typer.Option(help="Keep the view in this file, or take it from there; tiles are then not computed."),
    ] = None,
    browser: Annotated[str, typer.Option(help="Chromium.")] = CHROMIUM,
    device: Device = "auto",
    trust: common.Trust = False,
    out: common.Out = None,
    save: common.Save = True,
) -> None:
    """Measure the explorer's page."""
    settings = Settings(
        device=pick_device(device), model=model, tokens=whole("tokens", tokens, 2), text=text, heads=heads, view=view,
        browser=browser,
    )  # fmt: skip
    common.benchmark("explore", FIELDS, measure, settings, SHOWN, trust=trust, out=out, save=save)


if __name__ == "__main__":
    common.script(main)
