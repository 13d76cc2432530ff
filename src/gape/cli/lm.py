"""`gape lm`: train language models on a corpus, and measure their perplexity at any context.

:func:`add_train` and :func:`add_perplexity` put the same commands into `gape niah` and `gape hf`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gape.cli.options import INTS, Bounds, Device, ForgetEps, Precision, Resume, SkipEps, Split, Stratum, numbers
from gape.utils.recipe_files import find

if TYPE_CHECKING:
    from gape.experiments.recipe import Recipe

app = typer.Typer(help="Language models on a corpus of your own.", no_args_is_help=True, rich_markup_mode=None)


def _known(recipe: str) -> str:
    """The name of a recipe, refused before torch is imported where there is none."""
    find(recipe)
    return recipe


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that win over the recipe's, such as train.max_steps=400."),
]


def add_train(app: typer.Typer, kind: str, text: str, show: Callable[[Recipe, Path, dict[str, str]], None]) -> None:
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


def add_perplexity(app: typer.Typer, contexts: str | None, chunk: int) -> None:
    """Add the command `perplexity`, with the contexts and the chunk that are its defaults."""

    @app.command("perplexity")
    def measure(
        models: Annotated[
            list[Path],
            typer.Argument(help="Runs, or models of transformers; the first is compared with."),
        ],
        data: Annotated[Path, typer.Option(help="A corpus of the models' tokenizer.")],
        contexts: Annotated[
            str | None,
            typer.Option(metavar=INTS, help="Tokens; else powers of two from 512 to 131072 that a document fills."),
        ] = contexts,
        last: Annotated[int, typer.Option(help="Tokens scored at the end of each window.")] = 512,
        align: Annotated[int, typer.Option(help="Score only tokens behind so many; 0 all.")] = 0,
        split: Split = "heldout",
        stratum: Stratum = None,
        max_windows: Annotated[int, typer.Option(help="Windows per context at most.")] = 8000,
        seed: Annotated[int, typer.Option(help="Which windows, where there are more than --max-windows.")] = 0,
        chunk: Annotated[
            int, typer.Option(help="Tokens that go through the model at once; longer texts take a cache.")
        ] = chunk,
        skip_eps: SkipEps = 0.0,
        forget_eps: ForgetEps = 0.0,
        bounds: Bounds = "weights",
        attention: Annotated[
            str | None, typer.Option(help="attn_implementation of models of transformers, such as gape_triton.")
        ] = None,
        device: Device = "auto",
        precision: Precision = "auto",
    ) -> None:
        """Measure models at several contexts: perplexity.jsonl in each. What is there is not measured again."""
        from gape.data import open_corpus  # noqa: PLC0415
        from gape.experiments import perplexity  # noqa: PLC0415
        from gape.experiments.experiment import pick_device, wants_bfloat16  # noqa: PLC0415
        from gape.experiments.run import LanguageEvaluation  # noqa: PLC0415
        from gape.tasks.ways import Way  # noqa: PLC0415
        from gape.utils.progress import Progress  # noqa: PLC0415

        evaluation = LanguageEvaluation(
            contexts=() if contexts is None else numbers("contexts", contexts, int, "512,1024"), last=last, align=align,
            max_windows=max_windows, seed=seed, chunk=chunk,
        )  # fmt: skip
        target = pick_device(device)
        settings = perplexity.Settings(
            corpus=open_corpus(data), evaluation=evaluation, device=target, low=wants_bfloat16(precision, target),
            split=split, stratum=stratum, way=Way(skip_eps=skip_eps, forget_eps=forget_eps, bounds=bounds),
            attention=attention,
        )  # fmt: skip
        for table in perplexity.tables(perplexity.measure_models(models, settings, log=Progress().log)):
            typer.echo(f"\n{table.text()}")


def _show(recipe: Recipe, directory: Path, failed: dict[str, str]) -> None:
    for run in recipe.runs:
        if run.name not in failed:
            typer.echo(directory / run.name)


add_train(
    app,
    "lm",
    "Train and measure every run of a recipe, on the corpus data=DIR. Stop it and start it again as you like.",
    _show,
)
add_perplexity(app, contexts=None, chunk=16384)
