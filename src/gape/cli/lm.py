"""`gape lm`: train language models on a corpus, and measure their perplexity at any context."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gape.cli import perplexity, runs

if TYPE_CHECKING:
    from gape.experiments.recipe import Recipe

app = typer.Typer(help="Language models on a corpus of your own.", no_args_is_help=True, rich_markup_mode=None)


def _show(recipe: Recipe, directory: Path, failed: dict[str, str]) -> None:
    for run in recipe.runs:
        if run.name not in failed:
            typer.echo(directory / run.name)


runs.add_command(
    app,
    "lm",
    "Train and measure every run of a recipe, on the corpus data=DIR. Stop it and start it again as you like.",
    _show,
)
perplexity.add_command(app, contexts=None, chunk=16384)
