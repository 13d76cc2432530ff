"""`gape report`: tables, figures and one page out of stored runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs, sweeps, or earlier reports.")],
    out: Annotated[Path, typer.Option(help="Directory of the report.")] = Path("report"),
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
) -> None:
    """Write results, tables, figures and a self-contained page from what runs left behind; nothing is run."""
    typer.echo(f"Report: {write_report(runs, out, title)}")


def write_report(runs: list[Path], out: Path, title: str | None = None) -> Path:
    """Gather runs and write their report; the page's path.

    Raises:
        ValueError: a path without results.
    """
    from gape.cli.console import Voice  # noqa: PLC0415
    from gape.report import write  # noqa: PLC0415
    from gape.report.lm_results import gather  # noqa: PLC0415

    results = gather(runs)
    heading = title or ("Needle in a haystack" if results.rows else "Language models")
    return write.report(results, out, title=heading, say=Voice().say)
