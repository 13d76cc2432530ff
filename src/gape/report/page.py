"""One HTML page that holds everything: images and their data inside, readable without a network."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from gape.explore.export import policy, script
from gape.report.catalogue import Entry
from gape.report.results import Results, flat
from gape.report.tables import Table

#: Bytes of a figure's numbers that go into the page; more stay in their file beside it.
MOST_DATA = 2**20

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; color: #222; background: #fff;
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; height: auto; }
figcaption { color: #555; font-size: .9rem; }
.zoom { overflow: hidden; display: inline-block; max-width: 100%; vertical-align: top; }
.zoom img { display: block; transform-origin: 0 0; } .zoom.zoomed { cursor: grab; touch-action: none; }
figure button { font: inherit; border: 0; background: none; color: #06c; padding: 0 .3rem; cursor: pointer; }
.zoom:not(.zoomed) + figcaption button { display: none; }
table { border-collapse: collapse; margin: 1rem 0; font-size: .88rem; font-variant-numeric: tabular-nums;
  display: block; overflow-x: auto; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #eee; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid #bbb; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: .8rem; } summary { cursor: pointer; }
"""


def page(
    title: str,
    results: Results,
    tables: Sequence[Table],
    drawn: Iterable[tuple[Entry, Path]],
    notes: Sequence[str] = (),
) -> str:
    """The page as text.

    Args:
        title: its heading.
        results: what it is about: settings and provenance are listed from its runs.
        tables: in order.
        drawn: figures with the PNG that goes into the page.
        notes: lines under the heading.
    """
    figures = "\n".join(_figure(entry, png) for entry, png in drawn)
    content = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(note)}</p>" for note in notes),
        "<h2>Tables</h2>",
        *(table.html() for table in tables),
        "<h2>Figures</h2>",
        figures or "<p>None were drawn.</p>",
        "<h2>Configuration</h2>",
        *_configuration(results),
        "<h2>Provenance</h2>",
        *_provenance(results),
    ]
    return document(title, content)


def document(title: str, content: Iterable[str]) -> str:
    """A whole page of pieces of HTML."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    code = script(("panzoom.js", "figures.js"))
    head += f'<meta http-equiv="Content-Security-Policy" content="{escape(policy(code, _STYLE))}">'
    head += f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>"
    body = "\n".join([*content, f'<script type="module">{code}</script>'])
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'


def _figure(entry: Entry, png: Path) -> str:
    image = base64.b64encode(png.read_bytes()).decode()
    of = f" Answers the paper's {entry.paper}." if entry.paper else ""
    caption = f"<strong>{escape(entry.name)}.</strong> {escape(entry.caption + of)}"
    alt = escape(entry.caption, quote=True)
    picture = f'<div class="zoom" tabindex="0"><img alt="{alt}" src="data:image/png;base64,{image}"></div>'
    links = f'{_data_link(png.with_suffix(".json"))} <button type="button">Whole figure</button>'
    return f"<figure>{picture}<figcaption>{caption} {links}</figcaption></figure>"


def _data_link(path: Path) -> str:
    """A link to the numbers of a figure: inside the page, or beside it where they are many."""
    if not path.is_file():
        return ""
    data = path.read_bytes()
    if len(data) > MOST_DATA:
        return f'<a href="figures/{path.name}">Data</a>'
    text = base64.b64encode(data).decode()
    return f'<a download="{path.name}" href="data:application/json;base64,{text}">Data</a>'


def _configuration(results: Results) -> list[str]:
    """What all runs share, then what tells them apart."""
    settings = [flat(run.get("settings", {})) for run in results.runs]
    if not any(settings):
        return ["<p>No settings were stored.</p>"]
    keys = list(dict.fromkeys(key for run in settings for key in run))
    differing = [key for key in keys if len({json.dumps(run.get(key)) for run in settings}) > 1]
    shared = {key: settings[0].get(key) for key in keys if key not in differing}
    parts = [f"<pre>{escape(_lines(shared))}</pre>"]
    shown = [key for key in differing if key not in ("name", "train.decay_steps")]
    if shown:
        rows = tuple(
            (str(run["run"]), *(str(each.get(key, "–")) for key in shown))
            for run, each in zip(results.runs, settings, strict=True)
        )
        parts.append(_details(Table(title="What tells the runs apart", header=("Run", *shown), rows=rows)))
    return parts


def _provenance(results: Results) -> list[str]:
    """Distinct versions, machines and code, then each run's training in a row."""
    manifests = [flat(run.get("manifest", {})) for run in results.runs]
    keys = list(dict.fromkeys(key for each in manifests for key in each))
    keys = [key for key in keys if key not in ("started", "seed", "data")]
    distinct = {key: sorted({str(each[key]) for each in manifests if key in each}) for key in keys}
    parts = [f"<pre>{escape(_lines({key: ', '.join(values) for key, values in distinct.items()}))}</pre>"]
    columns = (("manifest", "started"), ("training", "status"), ("training", "step"), ("manifest", "data"))
    rows = tuple(
        (str(run["run"]), *(str(run.get(part, {}).get(key, "–")) for part, key in columns)) for run in results.runs
    )
    if rows:
        header = ("Run", "started", "training", "steps", "data")
        parts.append(_details(Table(title="Runs", header=header, rows=rows)))
    return parts


def _details(table: Table) -> str:
    """A table of runs that opens on a click."""
    return f"<details><summary>{len(table.rows)} runs</summary>{table.html()}</details>"


def _lines(values: dict[str, Any]) -> str:
    return "\n".join(f"{key} = {value}" for key, value in values.items())
