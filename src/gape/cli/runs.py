"""What `gape niah train` and `gape lm train` share: options, and the list of a recipe's runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gape.utils.recipe_files import find

if TYPE_CHECKING:
    from gape.experiments.recipe import Recipe


def _known(recipe: str) -> str:
    """The name of a recipe, refused before torch is imported where there is none."""
    find(recipe)
    return recipe


RecipeName = Annotated[
    str,
    typer.Argument(help="A TOML file, or the name of one that ships, such as niah/demo or lm/toy.", callback=_known),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that win over the recipe's, such as train.max_steps=400."),
]
Out = Annotated[Path | None, typer.Option(help="Directory of the runs; runs/RECIPE by default.")]
Only = Annotated[
    list[str] | None, typer.Option(help="Only runs of this name or pattern, such as 'rope*'; may be repeated.")
]
Dry = Annotated[bool, typer.Option("--list", help="Only list the runs and what is left to do.")]


def chosen(
    kind: str, recipe: str, overrides: list[str] | None, only: list[str] | None, out: Path | None, dry: bool
) -> tuple[Recipe, Path]:
    """The recipe with the runs that were asked for, and their directory."""
    from gape.experiments.experiment import states  # noqa: PLC0415
    from gape.experiments.recipe import default_directory, load  # noqa: PLC0415

    loaded = load(recipe, overrides or [], kind=kind).only(only or [])
    directory = out or default_directory(recipe, loaded)
    if dry:
        for home, state in states(loaded, directory).items():
            typer.echo(f"{state:8} {home}")
        raise typer.Exit
    return loaded, directory
