"""The runs of a recipe one after the other, each in its own directory, none done twice."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gape.distributed import RankError, processes
from gape.experiments.experiment import check, claim, is_finished, is_trained, perform, pick_device
from gape.experiments.recipe import Recipe
from gape.train import DiskFullError, Interrupted, StopFlag
from gape.utils.progress import Progress


@dataclass
class SweepResult:
    """How a sweep went: names of runs done now, done before, and failed (with the reason)."""

    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def run_recipe(recipe: Recipe, directory: Path, *, resume: str = "auto") -> SweepResult:
    """Bring every run of a recipe to its end, each in a directory of its own; a failed one does not keep the others.

    With `resume` "auto" what is there goes on; "never" refuses directories in which something was trained.

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
            claim(run, directory / run.name)
        return [run.name for run in runs if not is_finished(run, directory / run.name)]

    with processes.reported():
        names = processes.from_first(begin)
    waiting = [run for run in runs if run.name in names]
    result = SweepResult(skipped=[run.name for run in runs if run not in waiting])
    if result.skipped:
        progress.log(f"{len(result.skipped)} of {len(runs)} runs are done already")
    with StopFlag() as stop:
        for number, run in enumerate(waiting, 1):
            if number > 1 and run.model != waiting[number - 2].model:
                # Of one function torch keeps eight compiled forms and runs what comes after uncompiled.
                torch.compiler.reset()
            progress.log(f"[{number}/{len(waiting)}] {run.name}")
            began = time.monotonic()
            try:
                perform(run, directory / run.name, stop=stop, resume=resume, console=progress.console, log=progress.log)
            except (Interrupted, DiskFullError, RankError):
                raise
            except Exception as error:
                if len(waiting) == 1:
                    raise
                result.failed[run.name] = f"{type(error).__name__}: {error}"
                progress.log(f"{run.name} failed: {result.failed[run.name]}")
            else:
                result.done.append(run.name)
                progress.log(f"[{number}/{len(waiting)}] {run.name} done in {time.monotonic() - began:.0f} s")
    processes.leave()
    if result.failed:
        progress.log(f"{len(result.failed)} of {len(runs)} runs failed: {', '.join(result.failed)}")
    return result


def states(recipe: Recipe, directory: Path) -> dict[Path, str]:
    """Whether each run of a recipe is "done", "trained" or "to do", by its directory."""
    by_directory: dict[Path, str] = {}
    for run in recipe.runs:
        home = directory / run.name
        by_directory[home] = "done" if is_finished(run, home) else "trained" if is_trained(run, home) else "to do"
    return by_directory
