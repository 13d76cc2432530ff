"""`gape reproduce`: the figures of the paper by name, from committed results or from a run of the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gape.cli.niah import run_and_print


def reproduce(
    name: Annotated[str | None, typer.Argument(help="Name of a figure; without one they are listed.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="Only list the figures and where their results lie.")] = False,
    results: Annotated[Path, typer.Option(help="Directory of stored results.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="Directory of the figure.")] = Path("figures"),
    run: Annotated[bool, typer.Option("--run", help="Run the recipe first; days on a CPU, hours on a GPU.")] = False,
    jobs: Annotated[int, typer.Option(help="With --run: runs at once.")] = 1,
    runs: Annotated[
        Path | None, typer.Option(help="With --run: directory of the runs; runs/RECIPE by default.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Draw it from the results of another recipe, such as lm/paper.")
    ] = None,
) -> None:
    """Draw a figure of the paper: NAME.png, NAME.pdf and NAME.json with its numbers."""
    from gape.experiments import reporting  # noqa: PLC0415
    from gape.experiments.recipe import RUNS, load  # noqa: PLC0415

    if listing or name is None:
        for line in reporting.figure_lines(results):
            typer.echo(line)
        return
    entry = reporting.figure(name, recipe)
    directory = None
    if run and entry.measure is not None:
        reporting.refuse_run(entry)
        directory = runs or RUNS / entry.recipe
        run_and_print(load(entry.recipe), directory, jobs, "auto")
    for path in reporting.draw_figure(entry, out, results, directory):
        typer.echo(path)
