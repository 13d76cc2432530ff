"""Check a built site: links and their anchors exist, and pages ask no other host for anything."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Attributes that a browser follows by itself, by tag.
LOADED = {"link": "href"} | dict.fromkeys(("script", "img", "iframe", "source", "video", "audio", "embed"), "src")
#: What a style sheet loads.
STYLE_URL = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s]+)""")


class Page(HTMLParser):
    """What a page links to, what it loads and which anchors it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = STYLE_URL.findall(text)
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect one tag's links."""
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        link = values.get(LOADED.get(tag, "href"))
        if link and values.get("rel") != "canonical":
            self.links.append(link)
            if tag in LOADED:
                self.loaded.append(link)


def problems(site: Path) -> list[str]:
    """Every dead link and every request to another host of the pages and style sheets under a directory."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        # The page for missing addresses is served under any of them, so its links start at the root.
        base = site if path.name == "404.html" else path.parent
        dead = [link for link in page.links if not exists(link, path, base, pages)]
        found += [f"{path.relative_to(site)}: dead link {link}" for link in dict.fromkeys(dead)]
        found += [f"{path.relative_to(site)}: loads {link}" for link in page.loaded if urlsplit(link).netloc]
    for path in site.rglob("*.css"):
        found += [f"{path.name}: loads {link}" for link in STYLE_URL.findall(path.read_text(encoding="utf-8"))]
    return found


def exists(link: str, path: Path, base: Path, pages: dict[Path, Page]) -> bool:
    """Whether a link leads to a file of the site, and to an anchor that it has; other hosts are not asked."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
    if target.is_dir():
        target /= "index.html"
    anchor = unquote(parts.fragment)
    return target.is_file() and (not anchor or target not in pages or anchor in pages[target].anchors)
