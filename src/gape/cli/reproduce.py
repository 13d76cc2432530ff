"""`gape reproduce`: the figures of the paper by name, from stored results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
