"""`gape reproduce`: the figures of the paper by name, from committed results or from a run of the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gape.report.catalogue import Entry
    from gape.report.results import Results


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
    from dataclasses import replace  # noqa: PLC0415

    from gape.report import catalogue  # noqa: PLC0415
    from gape.report.series import NoData  # noqa: PLC0415
    from gape.utils.stored_rows import usable  # noqa: PLC0415

    if listing or name is None:
        for entry in catalogue.FIGURES.values():
            where = "drawn from the theory" if entry.measure is None else str(home(entry, results))
            state = "" if entry.measure is None or _there(home(entry, results)) else " (no results yet)"
            typer.echo(f"{entry.name:16} {entry.paper or 'our own':30} {where}{state}")
        return
    entry = catalogue.figure(name)
    entry = replace(entry, recipe=recipe or entry.recipe)
    found = None
    if entry.measure is not None:
        found = _run(entry, runs, jobs) if run else _committed(entry, results)
    try:
        with usable([home(entry, results)]):
            paths = catalogue.write(entry, found, out)
    except NoData as error:
        train = f"gape {entry.command}" if entry.command else f"gape niah train {entry.recipe}"
        how = entry.made_by or f"{train} and then gape report runs/{entry.recipe} --out {home(entry, results)}"
        raise ValueError(f"{entry.name}: {error}; {how} make them") from error
    for path in paths:
        typer.echo(path)


def home(entry: Entry, results: Path) -> Path:
    """Where the committed results of a figure's recipe lie."""
    return results / entry.recipe


def _there(path: Path) -> bool:
    return (path / "runs.jsonl").is_file() or (path / "results.jsonl").is_file()


def _committed(entry: Entry, results: Path) -> Results:
    from gape.report.lm_results import gather  # noqa: PLC0415

    path = home(entry, results)
    if not _there(path) and entry.made_by:
        raise ValueError(f"{entry.name}: there are no results in {path}; {entry.made_by} make them")
    if not _there(path) and entry.command:
        measure = "" if entry.command == "lm train" else f", gape {entry.command} runs/{entry.recipe}/* --data DIR"
        raise ValueError(
            f"{entry.name}: there are no results in {path}; gape lm train {entry.recipe} data=DIR{measure} and then "
            f"gape report runs/{entry.recipe} --out {path} make them"
        )
    if not _there(path):
        raise ValueError(
            f"{entry.name}: there are no results in {path}; gape reproduce {entry.name} --run makes them, or "
            f"gape niah train {entry.recipe} and then gape report runs/{entry.recipe} --out {path}"
        )
    return gather([path])


def _run(entry: Entry, runs: Path | None, jobs: int) -> Results:
    from gape.cli.niah import run_all  # noqa: PLC0415
    from gape.experiments import recipe as recipes  # noqa: PLC0415
    from gape.report.results import gather  # noqa: PLC0415

    if entry.command:
        raise ValueError(f"--run: got {entry.name}, expected a figure of the needle task; gape lm train needs data=DIR")
    recipe = recipes.load(entry.recipe)
    directory = runs or recipes.RUNS / entry.recipe
    run_all(recipe, directory, jobs, "auto")
    return gather([directory])
