"""Reports and figures from stored results: what `gape report`, `gape reproduce` and `gape ruler table` do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gape.report import catalogue, page, ruler
from gape.report.results import gather, store
from gape.report.series import NoData
from gape.report.tables import FORMATS
from gape.utils import files
from gape.utils.progress import Progress, ProgressTable
from gape.utils.stored_rows import usable
from gape.utils.validation import invalid_argument

#: Files of RULER's tables by format.
RULER_TABLES = {"markdown": "tables.md", "latex": "tables.tex"}


def write_report(runs: Sequence[Path], out: Path, title: str | None = None, without: Sequence[str] = ()) -> Path:
    """Gather runs and write their report, but for some kinds of measurements; the page's path.

    Refused are a path without results, and a kind that there is not.
    """
    progress = Progress()
    with ProgressTable(progress, "page") as table, usable(runs):
        table.show(str(out), 0, 1)
        results = gather(list(runs)).without(without)
        heading = title or ("Needle in a haystack" if results.of("needle") else "Language models")
        return page.report(results, out, title=heading, log=progress.log)


def figure_lines(results: Path) -> list[str]:
    """A line for each figure of the paper: its name, what it is there, and where its results lie."""
    lines = []
    for entry in catalogue.FIGURES.values():
        place = "drawn from the theory" if entry.measure is None else str(results / entry.recipe)
        state = "" if entry.measure is None or _has_results(results / entry.recipe) else " (no results yet)"
        lines.append(f"{entry.name:16} {entry.paper or 'our own':30} {place}{state}")
    return lines


def draw(name: str, results: Path, out: Path, recipe: str | None = None) -> list[Path]:
    """Draw a figure of the paper from a directory of results, or from those of another recipe, into `out`.

    A ValueError where there is no such figure; without results for it, it says which commands make them.
    """
    entry = catalogue.figure(name)
    entry = replace(entry, recipe=recipe or entry.recipe)
    home, gathered = results / entry.recipe, None
    if entry.measure is not None:
        if not _has_results(home):
            raise ValueError(f"{name}: there are no results in {home}; {entry.how} make them")
        gathered = gather([home])
    try:
        with usable([home]):
            return list(catalogue.write(entry, gathered, out))
    except NoData as error:
        raise ValueError(f"{name}: {error}; {entry.how} make them") from error


def _has_results(path: Path) -> bool:
    return (path / "runs.jsonl").is_file() or (path / "results.jsonl").is_file()


def ruler_text(
    paths: Sequence[Path],
    *,
    ablation: bool = False,
    full: str = "p-rope+gape",
    precision: str | None = None,
    form: str = "text",
    out: Path | None = None,
) -> str:
    """The paper's RULER table from stored results, as a text; rows and tables also go to `out`.

    With `ablation` it is the change of NLL against the model `full`, POSITION or POSITION:VARIANT. Refused are unknown
    formats and precisions, and results without such rows.
    """
    if form not in FORMATS:
        raise invalid_argument("format", form, f"one of {', '.join(FORMATS)}")
    if precision not in (None, "float32", "bfloat16"):
        raise invalid_argument("precision", precision, "float32 or bfloat16")
    results = gather(list(paths))
    rows = tuple(row for row in results.of("ruler") if precision in (None, row.get("precision")))
    if not rows:
        kind = "no rows of gape ruler eval" if precision is None else f"no rows of gape ruler eval in {precision}"
        raise ValueError(f"results: {', '.join(map(str, paths))} hold {kind}")
    results = results.only(ruler=rows)
    position, _, variant = full.partition(":")
    with usable(paths):
        tables = ruler.ablation_tables(results, (position, variant)) if ablation else ruler.tables(results)
    texts = {name: "\n\n".join(write_table(one) for one in tables) for name, write_table in FORMATS.items()}
    if out is not None:
        store(results, out)
        for name, file in RULER_TABLES.items():
            files.replace(out / file, f"{texts[name]}\n".encode())
    return texts[form]
