"""`gape niah`: train a recipe on the needle task, and evaluate what was trained."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gape.recipes import Recipe, Run
    from gape.train import StopFlag

app = typer.Typer(help="The needle-in-a-haystack task.", no_args_is_help=True, rich_markup_mode=None)

RUNS = Path("runs")


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A TOML file, or a name such as niah/paper.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that win over the recipe's.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where the runs go; runs/RECIPE by default.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs at once, each in a process of its own.")] = 1,
    resume: Annotated[str, typer.Option(help="auto goes on with what is there, never refuses it.")] = "auto",
    dry: Annotated[bool, typer.Option("--list", help="Only list the runs and what is left to do.")] = False,
) -> None:
    """Train, evaluate and look into every run of a recipe. Stop it and start it again as you like."""
    from gape import recipes  # noqa: PLC0415

    loaded = recipes.load(recipe, overrides or [])
    directory = out or default_directory(recipe, loaded)
    if dry:
        _list(loaded, directory)
        return
    run_all(loaded, directory, jobs, resume)


@app.command("eval")
def evaluate(
    runs: Annotated[list[Path], typer.Argument(help="Directories of trained runs.")],
    factors: Annotated[str, typer.Option(help="Multiples of the training length, with commas.")] = "1,2,4,8,16",
    samples: Annotated[int, typer.Option(help="Sequences per length.")] = 1000,
    seed: Annotated[int, typer.Option(help="Which sequences.")] = 0,
    position: Annotated[str | None, typer.Option(help="Also evaluate the weights under this scheme.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
) -> None:
    """Measure trained runs at several lengths. What was measured before is not measured again."""
    from gape.cli import experiment  # noqa: PLC0415
    from gape.cli.console import Voice  # noqa: PLC0415
    from gape.train import StopFlag, load_model  # noqa: PLC0415

    voice = Voice()
    with StopFlag() as stop:
        for directory in runs:
            run = _asked(directory, factors, samples, seed, position)
            model = load_model(directory, device=experiment.pick_device(device), say=voice.say)
            experiment.evaluate(run, model, directory, stop=stop, say=voice.say)
    print_tables(list(runs))


@app.command("run", hidden=True)
def run_one(
    directory: Annotated[Path, typer.Argument(help="A directory with run.json.")],
    resume: Annotated[str, typer.Option(help="As for train.")] = "auto",
) -> None:
    """Bring one run to its end: what a sweep starts for each of several at once."""
    from gape.cli.console import Voice  # noqa: PLC0415
    from gape.cli.experiment import perform  # noqa: PLC0415
    from gape.train import StopFlag  # noqa: PLC0415

    voice = Voice()
    stop = StopFlag()
    _end_with_parent(stop)
    perform(_stored(directory), directory, stop=stop, resume=resume, console=voice.console, say=voice.say)


def run_all(recipe: Recipe, directory: Path, jobs: int, resume: str) -> None:
    """Run a recipe and print its tables.

    Raises:
        typer.Exit: with code 1 when a run failed.
    """
    from gape.cli.console import Voice  # noqa: PLC0415
    from gape.cli.sweep import sweep  # noqa: PLC0415

    voice = Voice()
    tally = sweep(recipe.runs, directory, jobs=jobs, resume=resume, voice=voice)
    good = [directory / run.name for run in recipe.runs if run.name not in tally.failed]
    if good:
        print_tables(good)
    if tally.failed:
        voice.say(f"{len(tally.failed)} of {len(recipe.runs)} runs failed: {', '.join(tally.failed)}")
        raise typer.Exit(1)


def print_tables(paths: list[Path]) -> None:
    """Print what runs were measured at, on standard output."""
    from gape.report.results import gather  # noqa: PLC0415
    from gape.report.write import tables  # noqa: PLC0415

    for table in tables(gather(paths)):
        typer.echo(f"\n{table.text()}")


def default_directory(name: str, recipe: Recipe) -> Path:
    """runs/niah/demo for the recipe niah/demo, runs/NAME for a file elsewhere."""
    from gape import recipes  # noqa: PLC0415

    known = {file: short for short, file in recipes.available().items()}
    return RUNS / known.get(recipes.find(name).resolve(), recipe.name)


def _list(recipe: Recipe, directory: Path) -> None:
    from gape.cli.experiment import finished, trained  # noqa: PLC0415

    for run in recipe.runs:
        home = directory / run.name
        state = "done" if finished(run, home) else "trained" if trained(run, home) else "to do"
        typer.echo(f"{state:8} {home}")


def _stored(directory: Path) -> Run:
    import json  # noqa: PLC0415

    from gape.recipes import Run  # noqa: PLC0415

    path = directory / "run.json"
    if not path.is_file():
        raise ValueError(f"run: got {str(directory)!r}, expected a directory with run.json, as gape niah train makes")
    return Run.from_dict(json.loads(path.read_text(encoding="utf-8")))


def _asked(directory: Path, factors: str, samples: int, seed: int, position: str | None) -> Run:
    """The stored run with these measurements asked for."""
    from dataclasses import replace  # noqa: PLC0415

    run = _stored(directory)
    try:
        multiples = tuple(int(part) for part in factors.split(","))
    except ValueError as error:
        raise ValueError(f"factors: got {factors!r}, expected whole numbers with commas, such as 1,2,4") from error
    switch = {run.model.position: position} if position else {}
    asked = replace(run.evaluation, factors=multiples, samples=samples, seed=seed, switch=switch)
    return replace(run, evaluation=asked)


def _end_with_parent(stop: StopFlag) -> None:
    """Save and stop when the process that started this one is gone, however it died: its end of the pipe closes."""

    def watch() -> None:
        # Not through sys.stdin: a thread that sleeps in its buffer's lock makes the interpreter abort at exit.
        while os.read(0, 4096):
            pass
        stop.request(signal.SIGTERM)

    if not sys.stdin.isatty():
        threading.Thread(target=watch, daemon=True).start()
