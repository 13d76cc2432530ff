"""A report directory: the results, tables, figures, and one HTML page of it all that needs no network."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from gape.explore.export import asset, policy, script
from gape.report import catalogue, forgetting, ruler
from gape.report.catalogue import Entry
from gape.report.results import Results, store
from gape.report.series import Data, NoData
from gape.report.style import matplotlib
from gape.report.tables import Table, hf_differences, language_tables, needle_tables, recall_tables
from gape.utils import files
from gape.utils.settings import flatten

PAGE = "index.html"
#: Bytes of a figure's numbers that go into the page; more stay in their file beside it.
MOST_DATA = 2**20

#: The modules of the page, most of them the explorer's; each imports only those before it.
_MODULES = ("colours.js", "elements.js", "panzoom.js", "tiles.js", "curves.js", "figures.js")


def report(
    results: Results, directory: Path, *, title: str = "Report", log: Callable[[str], None] = lambda message: None
) -> Path:
    """Write everything that can be said of some results; the same results give the same bytes.

    The directory gets `results.jsonl`, `analysis.jsonl` and `runs.jsonl` (so it can be read in place of the runs),
    `tables.md`, `figures/` and `index.html`, whose path is returned. Without Matplotlib the page has tables only;
    it says why, and `log` is called with the reason.
    """
    all_tables = tables(results)
    store(results, directory)
    files.replace(directory / "tables.md", ("\n\n".join(t.markdown() for t in all_tables) + "\n").encode())
    pictures: list[tuple[Entry, Path]] = []
    notes = []
    try:
        matplotlib()
    except ImportError as error:
        notes.append(f"No figures: {error}.")
        log(notes[-1])
    else:
        pictures = _draw(results, directory / "figures")
    text = page(title, results, all_tables, pictures, notes)
    files.replace(directory / PAGE, text.encode())
    return directory / PAGE


def tables(results: Results) -> list[Table]:
    """All tables of some results."""
    kinds = (needle_tables, language_tables, hf_differences, recall_tables, ruler.tables, forgetting.tables)
    return [table for tables_of in kinds for table in tables_of(results)]


def _draw(results: Results, directory: Path) -> list[tuple[Entry, Path]]:
    """Draw what the results have data for, the theory's figures left out."""
    pictures = []
    for entry in catalogue.FIGURES.values():
        if entry.measure is not None:
            with suppress(NoData):
                _, png, _ = catalogue.write(entry, results, directory)
                pictures.append((entry, png))
    return pictures


def page(
    title: str,
    results: Results,
    tables: Sequence[Table],
    pictures: Iterable[tuple[Entry, Path]],
    notes: Sequence[str] = (),
) -> str:
    """The page as text: notes under the title, tables, figures with their PNG, and what is known of the runs."""
    figures = "\n".join(_figure(entry, png) for entry, png in pictures)
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
    code, style = script(_MODULES), asset("report.css")
    head += f'<meta http-equiv="Content-Security-Policy" content="{escape(policy(code, style))}">'
    head += f"<title>{escape(title)}</title>\n<style>{style}</style>"
    body = "\n".join([*content, '<div id="tip" role="tooltip" hidden></div>', f'<script type="module">{code}</script>'])
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'


def figure(caption: str, chart: Data | None, picture: str = "") -> str:
    """A figure that zooms, of HTML; where the page runs scripts a chart is drawn in place of the picture."""
    # No name in the numbers may end their script.
    numbers = "" if chart is None else json.dumps(chart).replace("<", "\\u003c")
    script = f'<script type="application/json">{numbers}</script>' if numbers else ""
    button = '<button type="button">Whole figure</button>'
    frame = f'<div class="zoom" tabindex="0">{picture}</div>'
    return f"<figure>{frame}<figcaption>{caption} {button}</figcaption>{script}</figure>"


def _figure(entry: Entry, png: Path) -> str:
    of = f" Answers the paper's {entry.paper}." if entry.paper else ""
    numbers = png.with_suffix(".json")
    caption = f"<strong>{escape(entry.name)}.</strong> {escape(entry.caption + of)} {_data_link(numbers)}"
    image = base64.b64encode(png.read_bytes()).decode()
    picture = f'<img alt="{escape(entry.caption, quote=True)}" src="data:image/png;base64,{image}">'
    chart = entry.chart.of(json.loads(numbers.read_bytes())) if entry.chart and numbers.is_file() else None
    return figure(caption, chart, picture)


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
    settings = [flatten(run.get("settings", {})) for run in results.runs]
    if not any(settings):
        return ["<p>No settings were stored.</p>"]
    keys = list(dict.fromkeys(key for run in settings for key in run))
    differing = [key for key in keys if len({json.dumps(run.get(key)) for run in settings}) > 1]
    shared = {key: settings[0].get(key) for key in keys if key not in differing}
    parts = [listing(shared)]
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
    manifests = [flatten(run.get("manifest", {})) for run in results.runs]
    keys = list(dict.fromkeys(key for each in manifests for key in each))
    keys = [key for key in keys if key not in ("started", "seed", "data")]
    distinct = {key: sorted({str(each[key]) for each in manifests if key in each}) for key in keys}
    parts = [listing({key: ", ".join(values) for key, values in distinct.items()})]
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


def listing(values: Mapping[str, Any]) -> str:
    """Settings, one a line."""
    text = "\n".join(f"{key} = {value}" for key, value in values.items())
    return f"<pre>{escape(text)}</pre>"
