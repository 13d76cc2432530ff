"""The explorer as one HTML file: page, modules, style and data inside, nothing loaded. Imports no torch."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files as resources
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from gape.explore.view import KINDS, TILE, Bytes, View, levels

if TYPE_CHECKING:
    from gape.explore.exploration import Exploration

#: The modules of the page; each imports only those before it.
_NAMES = ("colours", "elements", "view", "state", "panzoom", "tiles", "tokens", "heads", "map", "details", "main")
MODULES = tuple(f"{name}.js" for name in _NAMES)
#: Bytes of an exported page at most, and of its data once the browser has unpacked them.
MOST_BYTES, MOST_UNPACKED = 29 * 10**6, 160 * 10**6
#: Base64 makes four bytes of three.
_BASE64 = 4 / 3


def asset(name: str) -> str:
    """The text of a file of the page."""
    return resources("gape.explore").joinpath("web", name).read_text(encoding="utf-8")


def script(modules: Sequence[str] = MODULES) -> str:
    """Modules as one script without imports, so that it runs in a page that was opened from disk."""
    text = "\n".join(asset(name) for name in modules)
    return re.sub(r"^export ", "", re.sub(r"^import .*\n", "", text, flags=re.M), flags=re.M)


def policy(*inline: str) -> str:
    """A Content-Security-Policy under which these inline scripts and styles run and nothing else is loaded."""
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in inline]
    return f"default-src 'none'; script-src {' '.join(hashes)}; style-src {' '.join(hashes)}; img-src data: blob:"


def page(view: View, exploration: Exploration | None = None, heads: Sequence[tuple[int, int]] = ()) -> str:
    """The page as text; maps of `heads`, (layer, query head), go into it as fine as its size allows.

    They come from `exploration`; without it the page has what the view has.
    """
    if exploration is not None and heads:
        view = with_full_maps(exploration, heads)
    data = base64.b64encode(gzip.compress(view.to_bytes(), 6, mtime=0)).decode()
    code, style = script(), asset("style.css")
    text = asset("index.html")
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy(code, style))}">\n<style>{style}</style>'
    )
    end = f'<script id="view" type="application/gzip">{data}</script>\n<script type="module">{code}</script>'
    parts = {"HEAD": head, "END": end, "TITLE": escape(str(view.header["title"]))}
    return re.sub(r"<!-- (HEAD|END) -->|(TITLE)", lambda match: parts[match[1] or match[2]], text)


def with_full_maps(exploration: Exploration, heads: Sequence[tuple[int, int]]) -> View:
    """The view with finer maps of some heads: tiles of every level that fits, empty tiles left out.

    Levels are added to all heads before the next finer one, until the page would be too large. `full` of the header
    has the finest level of each head by "LAYER.HEAD".
    """
    view = View({**exploration.view.header, "full": {}}, dict(exploration.view.arrays))
    tiles: dict[str, dict[tuple[int, int, int], Bytes]] = {}
    for level, layer, head, maps in _levels_that_fit(view, exploration, heads):
        view.header["full"][f"{layer}.{head}"] = level
        for (kind, row, column), tile in maps.items():
            tiles.setdefault(f"{kind}/{layer}/{head}", {})[level, row, column] = tile
    for name, stored in tiles.items():
        view.arrays[f"tiles_{name}"] = np.stack(list(stored.values()))
        view.arrays[f"index_{name}"] = np.array(list(stored), dtype=np.int32)
    return view


def _levels_that_fit(
    view: View, exploration: Exploration, heads: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int, dict[tuple[str, int, int], Bytes]]]:
    """(level, layer, head, tiles by kind, row and column) until the page would be too large."""
    kinds = KINDS if view.header["gated"] else KINDS[:1]
    packed = len(gzip.compress(view.to_bytes(), 1))
    unpacked = sum(array.nbytes for array in view.arrays.values())
    for level, cell in list(levels(view.header["tokens"]))[1:]:
        across = -(-view.header["tokens"] // (cell * TILE))
        below = [(row, column) for row in range(across) for column in range(row + 1)]
        for layer, head in heads:
            maps: dict[tuple[str, int, int], Bytes] = {}
            for kind, (row, column) in product(kinds, below):
                tile = exploration.tile(kind, layer, head, level, row, column)
                if tile.any():
                    packed, unpacked = packed + len(gzip.compress(tile.tobytes(), 1)), unpacked + tile.nbytes
                    if packed * _BASE64 > MOST_BYTES or unpacked > MOST_UNPACKED:
                        return
                    maps[kind, row, column] = tile
            yield level, layer, head, maps
