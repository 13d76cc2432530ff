"""The runs of a recipe, of whatever kind, each in its own directory: each part done once, whatever interrupts it."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console

from gape.distributed import RankError, processes
from gape.experiments.open_model import SETTINGS, SUMMARY
from gape.experiments.recipe import Recipe
from gape.experiments.run import Run
from gape.train import DiskFullError, Interrupted, StopFlag, checkpoint
from gape.train.config import changes
from gape.utils import files
from gape.utils.jsonl import Record, read_object
from gape.utils.progress import Progress
from gape.utils.validation import invalid_argument

Log = Callable[[str], None]

#: The module of each kind of run.
_MODULES = {"niah": "gape.experiments.needle", "lm": "gape.experiments.language"}


def experiment(run: Run) -> ModuleType:
    """The module with what a kind of run adds: functions `check`, `train`, `missing` and `measure`.

    `check` refuses, before anything is started, data that are missing or do not fit. `train` polls `stop`. `missing`
    says whether `measure` has anything left to do.
    """
    return import_module(_MODULES[run.kind])


def run_recipe(recipe: Recipe, directory: Path, *, resume: str = "auto") -> dict[str, str]:
    """Bring every run of a recipe to its end, each in a directory of its own; the names of failed ones, and why.

    A failed run does not keep the others. With `resume` "auto" what is there goes on; "never" refuses directories in
    which something was trained.

    Raises:
        Interrupted, DiskFullError: a signal came and the running run has saved; or no run could write.
        ValueError: whatever can be refused before anything is written.
    """
    runs, progress = recipe.runs, Progress()
    processes.connect()
    # Before anything is started: neither a missing device nor another run's directory should show hours later.
    for device in {run.device for run in runs}:
        pick_device(device)

    def begin() -> list[str]:
        for run in runs:
            check(run, directory / run.name, resume)
        for run in runs:
            (directory / run.name).mkdir(parents=True, exist_ok=True)
            files.replace(directory / run.name / SETTINGS, files.to_json(run.to_dict()))
        return [run.name for run in runs if not is_finished(run, directory / run.name)]

    with processes.reported():
        names = processes.from_first(begin)
    waiting, failed = [run for run in runs if run.name in names], dict[str, str]()
    if len(waiting) < len(runs):
        progress.log(f"{len(runs) - len(waiting)} of {len(runs)} runs are done already")
    with StopFlag() as stop:
        for number, run in enumerate(waiting, 1):
            if number > 1 and run.model != waiting[number - 2].model:
                # Of one function torch keeps eight compiled forms and runs what comes after uncompiled.
                torch.compiler.reset()
            label, began = f"[{number}/{len(waiting)}] {run.name}", time.monotonic()
            progress.log(label)
            try:
                perform(run, directory / run.name, stop=stop, resume=resume, console=progress.console, log=progress.log)
            except (Interrupted, DiskFullError, RankError):
                raise
            except Exception as error:
                if len(waiting) == 1:
                    raise
                failed[run.name] = f"{type(error).__name__}: {error}"
                progress.log(f"{run.name} failed: {failed[run.name]}")
            else:
                progress.log(f"{label} done in {time.monotonic() - began:.0f} s")
    processes.leave()
    if failed:
        progress.log(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}")
    return failed


def states(recipe: Recipe, directory: Path) -> dict[Path, str]:
    """Whether each run of a recipe is "done", "trained" or "to do", by its directory."""
    by_directory: dict[Path, str] = {}
    for run in recipe.runs:
        home = directory / run.name
        by_directory[home] = "done" if is_finished(run, home) else "trained" if _is_trained(run, home) else "to do"
    return by_directory


def perform(
    run: Run, directory: Path, *, stop: StopFlag, resume: str = "auto", console: Console | None = None, log: Log = print
) -> None:
    """Bring a checked run to its end, from wherever its directory stands; what was done is kept.

    `stop` is polled in training and validation; a signal ends measurements at once. `console` and `log` are where
    training shows its progress, and measurements their lines.
    """
    own, device = experiment(run), pick_device(run.device)

    def measure() -> None:
        if not is_finished(run, directory):
            # A row is kept as soon as it is measured.
            with stop.at_once():
                own.measure(run, directory, device, log)

    # Of the processes of a job the first decides, and measures by itself.
    with processes.reported():
        if processes.from_first(lambda: not _is_trained(run, directory), stop):
            own.train(run, directory, device, stop, resume, console)
        processes.from_first(measure, stop)


def check(run: Run, directory: Path, resume: str = "auto") -> None:
    """Make sure, before anything is written, that a run can be begun or gone on with; measurements may be added to."""
    if resume not in ("auto", "never"):
        raise invalid_argument("resume", resume, "auto or never")
    there = [*checkpoint.available(directory / "checkpoints"), directory / SUMMARY]
    if resume == "never" and there[0].exists():
        raise invalid_argument("resume", resume, f"auto or another --out, since {there[0]} is there already")
    if files.foreign(directory, SETTINGS):
        raise invalid_argument("out", str(directory), "a new or empty directory, or one of this run")
    before, now = read_object(directory / SETTINGS), run.to_dict()
    if before:
        try:
            # With the defaults of keys that it was written without.
            before = Run.from_dict(before).to_dict()
        except ValueError as error:
            raise ValueError(f"{directory / SETTINGS}: {error}; give another --out") from error
        lines = [f"train.{line}" for line in changes(before["train"], now["train"])]
        for key in ("kind", "seed", "batch_size", "task", "recall", "model"):
            if before.get(key) != now.get(key):
                lines.append(f"{key} was {before.get(key)} and is now {now.get(key)}")
        if lines:
            raise ValueError(f"{directory}: holds another run: {'; '.join(lines)}")
    experiment(run).check(run, directory)


def _is_trained(run: Run, directory: Path) -> bool:
    """Whether training has come to its end."""
    summary = read_object(directory / SUMMARY)
    return bool(summary) and (summary["status"] == "stopped early" or summary["step"] >= run.train.max_steps)


def is_finished(run: Run, directory: Path) -> bool:
    """Whether nothing is left to do."""
    if not _is_trained(run, directory):
        return False
    summary = read_object(directory / SUMMARY)
    # The best weights where they were kept, else the last.
    best = summary.get("best") if run.train.patience else None
    return not experiment(run).missing(run, directory, _device(run.device), (best or summary)["step"])


def conditions(run: Run, device: torch.device) -> Record:
    """How a run is measured on a device: the keys that distinguish rows of another precision or device."""
    return {"precision": "bfloat16" if run.train.low(device.type) else "float32", "device": device.type}


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is a GPU where there is one. A ValueError where it is not here.

    "cuda" is a GPU of its own in each process of a job.
    """
    device = _device(name)
    if device.type == "cuda":
        processes.take_gpu()
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise invalid_argument("device", name, "auto, cpu, or a device that is here") from error
    return device


def _device(name: str) -> torch.device:
    """The device of that name, whether or not it is here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise invalid_argument("device", name, "auto, cpu, or a device that is here") from error


def wants_bfloat16(precision: str, device: torch.device) -> bool:
    """Whether a --precision means bfloat16 autocast on a device."""
    if precision not in ("auto", "float32", "bfloat16"):
        raise invalid_argument("precision", precision, "auto, float32 or bfloat16")
    return precision == "bfloat16" or (precision == "auto" and device.type == "cuda")
