"""`gape demo`: the needle task on a laptop, from nothing to a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gape.cli.niah import run_and_print
from gape.cli.runs import Overrides

RECIPE = "niah/demo"


def demo(
    out: Annotated[Path, typer.Option(help="Directory of the runs and the report.")] = Path("runs/niah/demo"),
    overrides: Overrides = None,
) -> None:
    """Train p-RoPE with and without gates to find a needle in 128 tokens, then ask for it in up to 1,024."""
    from gape.experiments.recipe import load  # noqa: PLC0415
    from gape.experiments.reporting import write_report  # noqa: PLC0415

    recipe = load(RECIPE, overrides or [])
    run_and_print(recipe, out, "auto")
    page = write_report([out / run.name for run in recipe.runs], out / "report", "The needle task, small")
    faster = recipe.runs[0].train.gate_lr_multiplier
    if faster != 1:
        typer.echo(f"\nGates learn at {faster:g} times the rate of the rest here, which is not the paper's setting:")
        typer.echo("gape demo train.gate_lr_multiplier=1 --out runs/niah/plain is the plain one.")
    typer.echo(f"\nReport: {page}")
