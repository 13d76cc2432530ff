"""`gape niah` and `gape demo`: train a recipe on the needle task, and evaluate what was trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gape.cli import lm
from gape.cli.options import INTS, Device, numbers

if TYPE_CHECKING:
    from gape.experiments.recipe import Recipe

app = typer.Typer(help="The needle-in-a-haystack task.", no_args_is_help=True, rich_markup_mode=None)


def show(recipe: Recipe, directory: Path, failed: dict[str, str]) -> None:
    """Print the tables of runs in a directory, but for failed ones."""
    from gape.experiments.needle import recipe_rows  # noqa: PLC0415

    if len(failed) < len(recipe.runs):
        _print_tables(recipe_rows(recipe, directory, without=failed))


lm.add_train(
    app, "niah", "Train, evaluate and analyse every run of a recipe. Stop it and start it again as you like.", show
)


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


def _print_tables(rows: Sequence[dict[str, Any]]) -> None:
    from gape.report.page import tables  # noqa: PLC0415
    from gape.report.results import needle_results  # noqa: PLC0415

    for table in tables(needle_results(rows)):
        typer.echo(f"\n{table.text()}")


def demo(
    out: Annotated[Path, typer.Option(help="Directory of the runs and the report.")] = Path("runs/niah/demo"),
    overrides: lm.Overrides = None,
) -> None:
    """Train p-RoPE with and without gates to find a needle in 128 tokens, then ask for it in up to 1,024."""
    from gape.experiments.experiment import run_recipe  # noqa: PLC0415
    from gape.experiments.recipe import load  # noqa: PLC0415
    from gape.experiments.reporting import write_report  # noqa: PLC0415

    recipe = load("niah/demo", overrides or [])
    failed = run_recipe(recipe, out)
    show(recipe, out, failed)
    if failed:
        raise typer.Exit(1)
    page = write_report([out / run.name for run in recipe.runs], out / "report", "The needle task, small")
    faster = recipe.runs[0].train.gate_lr_multiplier
    if faster != 1:
        typer.echo(f"\nGates learn at {faster:g} times the rate of the rest here, which is not the paper's setting:")
        typer.echo("gape demo train.gate_lr_multiplier=1 --out runs/niah/plain is the plain one.")
    typer.echo(f"\nReport: {page}")
