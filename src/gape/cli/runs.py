"""What `gape niah` and `gape lm` share: a recipe's runs listed, started, and brought to their ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gape.cli.options import Resume
from gape.experiments.recipe import RUNS

if TYPE_CHECKING:
    from gape.experiments.recipe import Recipe
    from gape.train import StopFlag

RecipeName = Annotated[
    str, typer.Argument(help="A TOML file, or the name of one that ships, such as niah/demo or lm/toy.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that win over the recipe's, such as train.max_steps=400."),
]
Out = Annotated[Path | None, typer.Option(help="Directory of the runs; runs/RECIPE by default.")]
Jobs = Annotated[int, typer.Option(help="Runs at once, each in a process of its own.")]
Only = Annotated[
    list[str] | None, typer.Option(help="Only runs of this name or pattern, such as 'rope*'; may be repeated.")
]
Dry = Annotated[bool, typer.Option("--list", help="Only list the runs and what is left to do.")]


def run_one(
    directory: Annotated[Path, typer.Argument(help="A directory with run.json.")], resume: Resume = "auto"
) -> None:
    """Bring one run to its end: what a sweep starts for each of several at once."""
    from gape.experiments.experiment import described, perform  # noqa: PLC0415
    from gape.train import StopFlag  # noqa: PLC0415
    from gape.utils.progress import Voice  # noqa: PLC0415

    run, voice, stop = described(directory), Voice(), StopFlag()
    _end_with_parent(stop)
    perform(run, directory, stop=stop, resume=resume, console=voice.console, say=voice.say)


def sweep_all(recipe: Recipe, directory: Path, jobs: int, resume: str) -> tuple[list[Path], dict[str, str]]:
    """Run a recipe; the directories of the runs that are done, and why others failed, by name."""
    from gape.experiments.sweep import sweep  # noqa: PLC0415
    from gape.utils.progress import Voice  # noqa: PLC0415

    voice = Voice()
    tally = sweep(recipe.runs, directory, jobs=jobs, resume=resume, voice=voice)
    if tally.failed:
        voice.say(f"{len(tally.failed)} of {len(recipe.runs)} runs failed: {', '.join(tally.failed)}")
    return [directory / run.name for run in recipe.runs if run.name not in tally.failed], tally.failed


def default_directory(name: str, recipe: Recipe) -> Path:
    """runs/niah/demo for the recipe niah/demo, runs/NAME for a file elsewhere."""
    from gape.experiments import recipe as recipes  # noqa: PLC0415

    known = {file: short for short, file in recipes.available().items()}
    return RUNS / known.get(recipes.find(name).resolve(), recipe.name)


def list_runs(recipe: Recipe, directory: Path) -> None:
    """Print the state and the directory of every run."""
    from gape.experiments.experiment import finished, trained  # noqa: PLC0415

    for run in recipe.runs:
        home = directory / run.name
        state = "done" if finished(run, home) else "trained" if trained(run, home) else "to do"
        typer.echo(f"{state:8} {home}")


def _end_with_parent(stop: StopFlag) -> None:
    """Save and stop when the process that started this one is gone, however it died: its end of the pipe closes."""

    def watch() -> None:
        # Not through sys.stdin: a thread that sleeps in its buffer's lock makes the interpreter abort at exit.
        while os.read(0, 4096):
            pass
        stop.request(signal.SIGTERM)

    if not sys.stdin.isatty():
        threading.Thread(target=watch, daemon=True).start()
