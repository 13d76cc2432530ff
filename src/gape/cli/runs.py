"""The command `train` of `gape niah` and `gape lm`: runs of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gape.cli.options import Resume
from gape.utils.recipe_files import find

if TYPE_CHECKING:
    from gape.experiments.recipe import Recipe


def _known(recipe: str) -> str:
    """The name of a recipe, refused before torch is imported where there is none."""
    find(recipe)
    return recipe


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that win over the recipe's, such as train.max_steps=400."),
]


def add_command(app: typer.Typer, kind: str, text: str, show: Callable[[Recipe, Path, dict[str, str]], None]) -> None:
    """Add the command `train` for recipes of a kind; `show` prints what the runs gave, but for failed ones."""

    @app.command("train", help=text)
    def train(
        recipe: Annotated[
            str,
            typer.Argument(
                help="A TOML file, or the name of one that ships, such as niah/demo or lm/toy.", callback=_known
            ),
        ],
        overrides: Overrides = None,
        out: Annotated[Path | None, typer.Option(help="Directory of the runs; runs/RECIPE by default.")] = None,
        resume: Resume = "auto",
        only: Annotated[
            list[str] | None, typer.Option(help="Only runs of this name or pattern, such as 'rope*'; may be repeated.")
        ] = None,
        dry: Annotated[bool, typer.Option("--list", help="Only list the runs and what is left to do.")] = False,
    ) -> None:
        from gape.experiments.experiment import run_recipe, states  # noqa: PLC0415
        from gape.experiments.recipe import default_directory, load  # noqa: PLC0415

        loaded = load(recipe, overrides or [], kind=kind).only(only or [])
        directory = out or default_directory(recipe, loaded)
        if dry:
            for home, state in states(loaded, directory).items():
                typer.echo(f"{state:8} {home}")
            return
        failed = run_recipe(loaded, directory, resume=resume)
        show(loaded, directory, failed)
        if failed:
            raise typer.Exit(1)
