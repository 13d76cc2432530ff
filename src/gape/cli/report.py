"""`gape report`: tables, figures and one page out of stored runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs, sweeps, or earlier reports.")],
    out: Annotated[Path, typer.Option(help="Directory of the report.")] = Path("report"),
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    without: Annotated[
        str | None, typer.Option(help="Kinds of measurements to leave out, such as ruler,forgetting.")
    ] = None,
) -> None:
    """Write results, tables, figures and a self-contained page from what runs left behind; nothing is run."""
    from gape.experiments.reporting import write_report  # noqa: PLC0415

    kinds = () if without is None else without.split(",")
    typer.echo(f"Report: {write_report(runs, out, title, kinds)}")
