"""`gape niah`: train a recipe on the needle task, and evaluate what was trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gape.cli.options import INTS, Device, Resume, numbers
from gape.cli.runs import Dry, Only, Out, Overrides, RecipeName, chosen

if TYPE_CHECKING:
    from gape.experiments.recipe import Recipe

app = typer.Typer(help="The needle-in-a-haystack task.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Out = None,
    resume: Resume = "auto",
    only: Only = None,
    dry: Dry = False,
) -> None:
    """Train, evaluate and analyse every run of a recipe. Stop it and start it again as you like."""
    run_and_print(*chosen("niah", recipe, overrides, only, out, dry), resume)


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
    from gape.experiments.needle import evaluate_runs  # noqa: PLC0415
    from gape.utils.progress import Progress  # noqa: PLC0415

    multiples = numbers("factors", factors, int, "1,2,4")
    rows = evaluate_runs(
        runs, factors=multiples, samples=samples, seed=seed, position=position, device=device, log=Progress().log
    )
    _print_tables(rows)


def run_and_print(recipe: Recipe, directory: Path, resume: str) -> None:
    """Run a recipe and print its tables."""
    from gape.experiments.experiment import run_recipe  # noqa: PLC0415
    from gape.experiments.needle import recipe_rows  # noqa: PLC0415

    failed = run_recipe(recipe, directory, resume=resume)
    if len(failed) < len(recipe.runs):
        _print_tables(recipe_rows(recipe, directory, without=failed))
    if failed:
        raise typer.Exit(1)


def _print_tables(rows: Sequence[dict[str, Any]]) -> None:
    from gape.report.results import needle_results  # noqa: PLC0415
    from gape.report.write import tables  # noqa: PLC0415

    for table in tables(needle_results(rows)):
        typer.echo(f"\n{table.text()}")
