"""`gape lm`: train language models on a corpus, and measure their perplexity at any context."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gape.cli import forgetting
from gape.cli.options import INTS, Chunk, Device, Precision, Resume, Split, Stratum, numbers
from gape.cli.runs import Dry, Jobs, Only, Out, Overrides, RecipeName, chosen, run_one

app = typer.Typer(help="Language models on a corpus of your own.", no_args_is_help=True, rich_markup_mode=None)
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
    """Train and measure every run of a recipe, on the corpus data=DIR. Stop it and start it again as you like."""
    from gape.experiments.sweep import run_recipe  # noqa: PLC0415

    loaded, directory = chosen("lm", recipe, overrides, only, out, dry)
    result = run_recipe(loaded, directory, jobs=jobs, resume=resume)
    for run in loaded.runs:
        if run.name not in result.failed:
            typer.echo(directory / run.name)
    if result.failed:
        raise typer.Exit(1)


@app.command("perplexity")
def measure(
    runs: Annotated[list[Path], typer.Argument(help="Directories of trained runs; the first is compared with.")],
    data: Annotated[Path, typer.Option(help="A corpus of the runs' tokenizer.")],
    contexts: Annotated[
        str | None,
        typer.Option(metavar=INTS, help="Tokens; by default powers of two from 512 to 131072 that a document fills."),
    ] = None,
    last: Annotated[int, typer.Option(help="Tokens scored at the end of each window.")] = 512,
    align: Annotated[int, typer.Option(help="Score only tokens behind so many; 0 all.")] = 0,
    split: Split = "heldout",
    stratum: Stratum = None,
    max_windows: Annotated[int, typer.Option(help="Windows per context at most.")] = 8000,
    seed: Annotated[int, typer.Option(help="Which windows, where there are more than --max-windows.")] = 0,
    chunk: Chunk = 16384,
    device: Device = "auto",
    precision: Precision = "auto",
) -> None:
    """Measure trained runs at several contexts. What was measured before is not measured again."""
    from gape.data import open_corpus  # noqa: PLC0415
    from gape.experiments import perplexity  # noqa: PLC0415
    from gape.experiments.run import LanguageEvaluation  # noqa: PLC0415
    from gape.utils.progress import Progress  # noqa: PLC0415

    evaluation = LanguageEvaluation(
        contexts=() if contexts is None else numbers("contexts", contexts, int, "512,1024"), last=last, align=align,
        max_windows=max_windows, seed=seed, chunk=chunk,
    )  # fmt: skip
    settings = perplexity.Settings.of(
        open_corpus(data), evaluation, device=device, precision=precision, split=split, stratum=stratum
    )
    for table in perplexity.tables(perplexity.measure_runs(runs, settings, log=Progress().log)):
        typer.echo(f"\n{table.text()}")


app.command("forgetting")(forgetting.language)
