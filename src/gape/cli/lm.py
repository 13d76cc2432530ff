"""`gape lm`: train language models on a corpus, and measure their perplexity at any context."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from gape.cli.options import INTS, Chunk, Device, Precision, Resume, Split, Stratum, numbers
from gape.cli.runs import Dry, Jobs, Only, Out, Overrides, RecipeName, run_one

if TYPE_CHECKING:
    from gape.data import Corpus
    from gape.experiments.run import LanguageEvaluation, LanguageRun
    from gape.report.tables import Table

app = typer.Typer(help="Language models on a corpus of your own.", no_args_is_help=True, rich_markup_mode=None)
app.command("run", hidden=True)(run_one)

#: Contexts that are tried where none are asked for.
CONTEXTS = tuple(2**n for n in range(9, 18))


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
    from gape.cli import runs  # noqa: PLC0415
    from gape.experiments import recipe as recipes  # noqa: PLC0415

    loaded = recipes.load(recipe, overrides or [], kind="lm").only(only or [])
    directory = out or runs.default_directory(recipe, loaded)
    if dry:
        runs.list_runs(loaded, directory)
        return
    good, failed = runs.sweep_all(loaded, directory, jobs, resume)
    for path in good:
        typer.echo(path)
    if failed:
        raise typer.Exit(1)


@app.command("perplexity")
def measure(
    runs: Annotated[list[Path], typer.Argument(help="Directories of trained runs; the first is compared with.")],
    data: Annotated[Path, typer.Option(help="A corpus of the runs' tokenizer.")],
    contexts: Annotated[
        str | None,
        typer.Option(metavar=INTS, help="Tokens; by default powers of two from 512 to 131072 that a document fills."),
    ] = None,
    protocol: Annotated[str, typer.Option(help="Which tokens count: last-k, strided or non-overlapping.")] = "last-k",
    last: Annotated[int, typer.Option(help="last-k: tokens scored at the end of each window.")] = 512,
    stride: Annotated[int, typer.Option(help="strided: tokens from one window to the next.")] = 512,
    align: Annotated[int, typer.Option(help="last-k: score only tokens behind so many; 0 all.")] = 0,
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
    from gape.experiments import experiment, language  # noqa: PLC0415
    from gape.experiments.run import LanguageEvaluation  # noqa: PLC0415
    from gape.train import StopFlag  # noqa: PLC0415
    from gape.utils.progress import Voice  # noqa: PLC0415

    corpus, voice = open_corpus(data), Voice()
    evaluation = LanguageEvaluation(
        contexts=() if contexts is None else numbers("contexts", contexts, int, "512,1024"), protocol=protocol,
        last=last, stride=stride, align=align, max_windows=max_windows, seed=seed, chunk=chunk,
    )  # fmt: skip
    if contexts is None:
        evaluation = _filled(evaluation, corpus, split, stratum, voice.say)
    where = experiment.pick_device(device)
    low = experiment.asked_precision(precision, where)
    # Every run is asked about before the first is measured.
    asked = [_asked(directory, evaluation, corpus) for directory in runs]
    found = [
        language.measure_perplexity(
            run, directory, corpus, device=where, low=low, stop=StopFlag(), say=voice.say, split=split, stratum=stratum
        )
        for directory, run in zip(runs, asked, strict=True)
    ]
    for table in tables(found):
        typer.echo(f"\n{table.text()}")


def tables(found: list[list[dict[str, Any]]]) -> list[Table]:
    """Perplexity by run and context, and differences from the first run on the same windows; both for each stratum.

    Args:
        found: rows of each run as :func:`gape.experiments.language.measure_perplexity` returns them.
    """
    made = []
    for stratum in dict.fromkeys(row["stratum"] for rows in found for row in rows):
        at = [{row["context"]: row for row in rows if row["stratum"] == stratum} for rows in found]
        where = "all documents" if stratum is None else f"stratum {stratum}"
        made.append(_perplexities(at, where))
        if len(at) > 1:
            made.append(_differences(at, where))
    return made


def _perplexities(at: list[dict[int, dict[str, Any]]], where: str) -> Table:
    """A row per run, a column per context, from each run's rows by context."""
    from gape.report.tables import Table  # noqa: PLC0415

    own = list(at[0].values())
    rows = tuple(
        (next(iter(rows.values()))["run"], *(f"{row['perplexity']:.2f}" for row in rows.values())) for rows in at
    )
    header = ("Run", *(f"{row['context']:,}" for row in own))
    return Table(title=f"Perplexity by context, {own[0]['protocol']}, {where}", header=header, rows=rows)


def _differences(at: list[dict[int, dict[str, Any]]], where: str) -> Table:
    """A row per run but the first and context."""
    from gape.report.lm_tables import interval  # noqa: PLC0415
    from gape.report.tables import Table  # noqa: PLC0415
    from gape.tasks.perplexity_rows import difference  # noqa: PLC0415

    cells = []
    for rows in at[1:]:
        for context, row in rows.items():
            d = difference(row, at[0][context])
            verdict = "one document" if d.low is None else _verdict(d.nll, d.separable)
            cells.append((row["run"], f"{context:,}", f"{d.nll:+.4f}", interval(d.low, d.high), verdict))
    first = next(iter(at[0].values()))["run"]
    header = ("Run", "context", "difference", "95% interval", "verdict")
    return Table(title=f"Nats per token beside {first} on the same windows, {where}", header=header, rows=tuple(cells))


def _verdict(nll: float, separable: bool) -> str:
    return ("worse" if nll > 0 else "better") if separable else "not separable"


def _filled(
    evaluation: LanguageEvaluation, corpus: Corpus, split: str, stratum: str | None, say: Callable[[str], None]
) -> LanguageEvaluation:
    """The evaluation with the contexts that a document fills.

    Raises:
        ValueError: there is none.
    """
    from dataclasses import replace  # noqa: PLC0415

    from gape.tasks.perplexity import fits  # noqa: PLC0415

    kept: list[int] = []
    for context in CONTEXTS:
        try:
            fits(corpus, evaluation.at(context), split=split, stratum=stratum)
        except ValueError as error:
            if not kept:
                raise
            say(f"contexts above {kept[-1]:,} are left out: {error}")
            break
        kept.append(context)
    return replace(evaluation, contexts=tuple(kept))


def _asked(directory: Path, evaluation: LanguageEvaluation, corpus: Corpus) -> LanguageRun:
    """The stored run with these measurements asked for.

    Raises:
        ValueError: no run of a language model is there, or one of another tokenizer.
    """
    from dataclasses import replace  # noqa: PLC0415

    from gape.experiments.experiment import stored  # noqa: PLC0415
    from gape.experiments.language import refuse_tokenizer  # noqa: PLC0415

    run = cast("LanguageRun", stored(directory, "lm"))
    refuse_tokenizer(directory, corpus)
    return replace(run, evaluation=evaluation)
