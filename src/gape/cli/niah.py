"""`gape niah`: train a recipe on the needle task, and evaluate what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from gape.cli.options import INTS, Device, Resume, numbers
from gape.cli.runs import Dry, Jobs, Only, Out, Overrides, RecipeName, run_one

if TYPE_CHECKING:
    from gape.experiments.recipe import Recipe
    from gape.experiments.run import NeedleRun

app = typer.Typer(help="The needle-in-a-haystack task.", no_args_is_help=True, rich_markup_mode=None)
app.command("run", hidden=True)(run_one)


@app.command()
def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Out = None,
    jobs: Jobs = 1,
    resume: Resume = "auto",
    only: Only = None,
    dry: Dry = False,
) -> None:
    """Train, evaluate and look into every run of a recipe. Stop it and start it again as you like."""
    from gape.cli import runs  # noqa: PLC0415
    from gape.experiments import recipe as recipes  # noqa: PLC0415

    loaded = recipes.load(recipe, overrides or [], kind="niah").only(only or [])
    directory = out or runs.default_directory(recipe, loaded)
    if dry:
        runs.list_runs(loaded, directory)
        return
    run_all(loaded, directory, jobs, resume)


@app.command("eval")
def evaluate(
    runs: Annotated[list[Path], typer.Argument(help="Directories of trained runs.")],
    factors: Annotated[str, typer.Option(metavar=INTS, help="Multiples of the training length.")] = "1,2,4,8,16",
    samples: Annotated[int, typer.Option(help="Sequences per length.")] = 1000,
    seed: Annotated[int, typer.Option(help="Which sequences.")] = 0,
    position: Annotated[str | None, typer.Option(help="Also evaluate the weights under this scheme.")] = None,
    device: Device = "auto",
) -> None:
    """Measure trained runs at several lengths. What was measured before is not measured again."""
    from gape.experiments import needle  # noqa: PLC0415
    from gape.experiments.experiment import pick_device  # noqa: PLC0415
    from gape.train import StopFlag  # noqa: PLC0415
    from gape.utils.progress import Voice  # noqa: PLC0415

    voice, where = Voice(), pick_device(device)
    # Every run is asked about before the first is measured.
    asked = {directory: _asked(directory, factors, samples, seed, position) for directory in runs}
    for directory, run in asked.items():
        needle.evaluate(run, directory, where, stop=StopFlag(), say=voice.say)
    print_tables([row for directory, run in asked.items() for row in needle.answered(run, directory, where)])


def run_all(recipe: Recipe, directory: Path, jobs: int, resume: str) -> None:
    """Run a recipe and print its tables.

    Raises:
        typer.Exit: with code 1 when a run failed.
    """
    from gape.cli.runs import sweep_all  # noqa: PLC0415
    from gape.experiments.experiment import pick_device  # noqa: PLC0415
    from gape.experiments.needle import answered  # noqa: PLC0415

    good, failed = sweep_all(recipe, directory, jobs, resume)
    runs = [cast("NeedleRun", run) for run in recipe.runs if directory / run.name in good]
    if runs:
        print_tables([row for run in runs for row in answered(run, directory / run.name, pick_device(run.device))])
    if failed:
        raise typer.Exit(1)


def print_tables(rows: list[dict[str, Any]]) -> None:
    """Print rows of measurements as tables, on standard output.

    Raises:
        ValueError: some would be averaged as seeds of one scheme and are not.
    """
    from gape.report.results import arranged  # noqa: PLC0415
    from gape.report.write import tables  # noqa: PLC0415

    for table in tables(arranged(rows)):
        typer.echo(f"\n{table.text()}")


def _asked(directory: Path, factors: str, samples: int, seed: int, position: str | None) -> NeedleRun:
    """The stored run with these measurements asked for.

    Raises:
        ValueError: no run of the needle task is there, or one that cannot be measured so.
    """
    from dataclasses import replace  # noqa: PLC0415

    from gape.experiments.experiment import stored  # noqa: PLC0415
    from gape.experiments.needle import check  # noqa: PLC0415

    run = cast("NeedleRun", stored(directory, "niah"))
    multiples = numbers("factors", factors, int, "1,2,4")
    switch = {run.model.position: position} if position and position != run.model.position else {}
    evaluation = replace(run.evaluation, factors=multiples, samples=samples, seed=seed, switch=switch)
    asked = replace(run, evaluation=evaluation)
    check(asked, directory)
    return asked
