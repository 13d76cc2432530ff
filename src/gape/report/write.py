"""A report directory: the results themselves, tables, figures, and the page that holds them all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gape.report import catalogue
from gape.report.page import page
from gape.report.results import Results, store
from gape.report.series import NoData
from gape.report.style import matplotlib
from gape.report.tables import Table, accuracy_tables, comparison_table

PAGE = "index.html"


def report(
    results: Results, directory: Path, *, title: str = "Report", say: Callable[[str], None] = lambda message: None
) -> Path:
    """Write everything that can be said of some results; the same results give the same bytes.

    The directory gets `results.jsonl`, `analysis.jsonl` and `runs.jsonl` (so it can be read in place of the runs),
    `tables.md`, `figures/` and `index.html`. Without Matplotlib the page has tables only, and says why.

    Args:
        results: from :func:`gape.report.results.gather`.
        directory: made when missing.
        title: of the page.
        say: is told which figures could not be drawn.

    Returns:
        The page.
    """
    store(results, directory)
    made = tables(results)
    (directory / "tables.md").write_text("\n\n".join(t.markdown() for t in made) + "\n", encoding="utf-8")
    drawn: list[tuple[catalogue.Entry, Path]] = []
    notes = []
    try:
        matplotlib()
    except ImportError as error:
        notes.append(f"No figures: {error}.")
        say(notes[-1])
    else:
        drawn = _figures(results, directory / "figures")
    text = page(title, results, made, drawn, notes)
    (directory / PAGE).write_text(text, encoding="utf-8")
    return directory / PAGE


def tables(results: Results) -> list[Table]:
    """All tables of some results."""
    return [table for table in (*accuracy_tables(results), comparison_table(results)) if table is not None]


def _figures(results: Results, directory: Path) -> list[tuple[catalogue.Entry, Path]]:
    """Draw what the results have data for, the theory's figures left out."""
    drawn = []
    for entry in catalogue.FIGURES.values():
        if entry.measure is None:
            continue
        try:
            paths = catalogue.write(entry, results, directory)
        except NoData:
            continue
        drawn.append((entry, next(path for path in paths if path.suffix == ".png")))
    return drawn
