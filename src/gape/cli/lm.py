"""`gape lm`: train language models on a corpus, and measure their perplexity at any context."""

from __future__ import annotations

import typer

from gape.cli import perplexity
from gape.cli.options import Resume
from gape.cli.runs import Dry, Only, Out, Overrides, RecipeName, chosen

app = typer.Typer(help="Language models on a corpus of your own.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Out = None,
    resume: Resume = "auto",
    only: Only = None,
    dry: Dry = False,
) -> None:
    """Train and measure every run of a recipe, on the corpus data=DIR. Stop it and start it again as you like."""
    from gape.experiments.experiment import run_recipe  # noqa: PLC0415

    loaded, directory = chosen("lm", recipe, overrides, only, out, dry)
    failed = run_recipe(loaded, directory, resume=resume)
    for run in loaded.runs:
        if run.name not in failed:
            typer.echo(directory / run.name)
    if failed:
        raise typer.Exit(1)


perplexity.add_command(app, contexts=None, chunk=16384)
