"""A report directory: the results themselves, tables, figures, and the page that holds them all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gape.report import catalogue, forgetting, recall, ruler
from gape.report.page import page
from gape.report.results import Results, store
from gape.report.series import NoData
from gape.report.style import matplotlib
from gape.report.tables import Table, hf_differences, language_tables, needle_tables
from gape.utils import files

PAGE = "index.html"


def report(
    results: Results, directory: Path, *, title: str = "Report", log: Callable[[str], None] = lambda message: None
) -> Path:
    """Write everything that can be said of some results; the same results give the same bytes.

    The directory gets `results.jsonl`, `analysis.jsonl` and `runs.jsonl` (so it can be read in place of the runs),
    `tables.md`, `figures/` and `index.html`. Without Matplotlib the page has tables only, and says why.

    Args:
        results: from :func:`gape.report.results.gather`.
        directory: made when missing.
        title: of the page.
        log: called with the reason where no figure can be drawn.

    Returns:
        The page.
    """
    all_tables = tables(results)
    store(results, directory)
    files.replace(directory / "tables.md", ("\n\n".join(t.markdown() for t in all_tables) + "\n").encode())
    drawn: list[tuple[catalogue.Entry, Path]] = []
    notes = []
    try:
        matplotlib()
    except ImportError as error:
        notes.append(f"No figures: {error}.")
        log(notes[-1])
    else:
        drawn = _figures(results, directory / "figures")
    text = page(title, results, all_tables, drawn, notes)
    files.replace(directory / PAGE, text.encode())
    return directory / PAGE


def tables(results: Results) -> list[Table]:
    """All tables of some results."""
    kinds = (needle_tables, language_tables, hf_differences, recall.tables, ruler.tables, forgetting.tables)
    return [table for tables_of in kinds for table in tables_of(results)]


def _figures(results: Results, directory: Path) -> list[tuple[catalogue.Entry, Path]]:
    """Draw what the results have data for, the theory's figures left out."""
    drawn = []
    for entry in catalogue.FIGURES.values():
        if entry.measure is not None:
            with suppress(NoData):
                _, png, _ = catalogue.write(entry, results, directory)
                drawn.append((entry, png))
    return drawn
