"""`gape report` and `gape reproduce`: pages and figures out of stored results; nothing is run."""

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


def reproduce(
    name: Annotated[str | None, typer.Argument(help="Name of a figure; without one they are listed.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="Only list the figures and where their results lie.")] = False,
    results: Annotated[Path, typer.Option(help="Directory of stored results.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="Directory of the figure.")] = Path("figures"),
    recipe: Annotated[
        str | None, typer.Option(help="Draw it from the results of another recipe, such as lm/paper.")
    ] = None,
) -> None:
    """Draw a figure of the paper: NAME.png, NAME.pdf and NAME.json with its numbers."""
    from gape.experiments import reporting  # noqa: PLC0415

    lines = reporting.figure_lines(results) if listing or name is None else reporting.draw(name, results, out, recipe)
    for line in lines:
        typer.echo(line)
