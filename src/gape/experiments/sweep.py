"""Many runs, one after the other or several at once, each in its own directory, none done twice."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch

from gape.distributed import RankError, processes
from gape.experiments.experiment import check, claim, is_finished, is_trained, perform, pick_device
from gape.experiments.open_model import read_run
from gape.experiments.recipe import Recipe
from gape.experiments.run import Run
from gape.train import DiskFullError, Interrupted, StopFlag
from gape.utils import files, launch
from gape.utils.progress import Progress, ProgressTable
from gape.utils.validation import invalid_argument, whole

OUTPUT = "output.log"
POLL_SECONDS = 0.2


@dataclass
class SweepResult:
    """How a sweep went: names of runs done now, done before, and failed (with the reason)."""

    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def run_recipe(recipe: Recipe, directory: Path, *, jobs: int = 1, resume: str = "auto") -> SweepResult:
    """Bring every run of a recipe to its end; a failed one does not keep the others from theirs.

    Args:
        recipe: the runs.
        directory: each run's own lies in it, under its name.
        jobs: runs at once. More than one each get a process and write to `output.log` in their directory.
        resume: "auto" goes on with what is there, "never" refuses directories in which something was trained.

    Raises:
        Interrupted: a signal came; running runs have saved.
        DiskFullError: no run could write either.
        ValueError: jobs below 1, a device that is not here, a directory that holds another run, a `resume` that is
            neither of the two or refuses what is there; nothing was written then.
    """
    runs, progress = recipe.runs, Progress()
    whole("jobs", jobs)
    if jobs > 1 and launch.size() > 1:
        raise invalid_argument("jobs", jobs, "1 under torchrun, whose processes train one run together")
    processes.connect()
    # Before anything is started: neither a missing device nor another run's directory should be found out hours later.
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
        if jobs == 1 or len(waiting) <= 1:
            _in_turn(waiting, directory, resume, stop, progress, result)
        else:
            _at_once(waiting, directory, jobs, resume, stop, progress, result)
    processes.leave()
    if result.failed:
        progress.log(f"{len(result.failed)} of {len(runs)} runs failed: {', '.join(result.failed)}")
    return result


def _in_turn(
    runs: Sequence[Run], directory: Path, resume: str, stop: StopFlag, progress: Progress, result: SweepResult
) -> None:
    for number, run in enumerate(runs, 1):
        if number > 1 and run.model != runs[number - 2].model:
            # Of one function torch keeps eight compiled forms and runs what comes after uncompiled.
            torch.compiler.reset()
        progress.log(f"[{number}/{len(runs)}] {run.name}")
        began = time.monotonic()
        try:
            perform(run, directory / run.name, stop=stop, resume=resume, console=progress.console, log=progress.log)
        except (Interrupted, DiskFullError, RankError):
            raise
        except Exception as error:
            if len(runs) == 1:
                raise
            result.failed[run.name] = f"{type(error).__name__}: {error}"
            progress.log(f"{run.name} failed: {result.failed[run.name]}")
        else:
            result.done.append(run.name)
            progress.log(f"[{number}/{len(runs)}] {run.name} done in {time.monotonic() - began:.0f} s")


def run_directory(directory: Path, resume: str = "auto") -> None:
    """Bring the run that a directory describes to its end: what a sweep starts for each of several at once."""
    run, progress = read_run(directory), Progress()
    _end_with_parent()
    perform(run, directory, stop=StopFlag(), resume=resume, console=progress.console, log=progress.log)


def states(recipe: Recipe, directory: Path) -> dict[Path, str]:
    """Whether each run of a recipe is "done", "trained" or "to do", by its directory."""
    by_directory: dict[Path, str] = {}
    for run in recipe.runs:
        home = directory / run.name
        by_directory[home] = "done" if is_finished(run, home) else "trained" if is_trained(run, home) else "to do"
    return by_directory


def _end_with_parent() -> None:
    """Save and stop when the process that started this one is gone, however it died: its end of the pipe closes."""

    def watch() -> None:
        # Not through sys.stdin: a thread that sleeps in its buffer's lock makes the interpreter abort at exit.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    # A sweep leaves its end of a pipe here; a terminal, a file or nothing at all says nothing of a parent.
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=watch, daemon=True).start()


@dataclass
class _Child:
    run: Run
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    began: float


def _at_once(
    runs: Sequence[Run],
    directory: Path,
    jobs: int,
    resume: str,
    stop: StopFlag,
    progress: Progress,
    result: SweepResult,
) -> None:
    waiting, children = list(runs), list[_Child]()
    try:
        with ProgressTable(progress) as table:
            while (waiting or children) and not stop.requested:
                while waiting and len(children) < jobs:
                    children.append(_start(waiting.pop(0), directory, jobs, resume))
                for child in list(children):
                    table.show(child.run.name, _step(directory / child.run.name), child.run.train.max_steps)
                    if child.process.poll() is not None:
                        children.remove(child)
                        table.remove(child.run.name)
                        _settle(child, directory, len(runs), progress, result)
                time.sleep(POLL_SECONDS)
    finally:
        for child in children:
            child.process.send_signal(signal.SIGTERM)
        for child in children:
            child.process.wait()
            child.output.close()
    stop.check()


def _start(run: Run, directory: Path, jobs: int, resume: str) -> _Child:
    home = directory / run.name
    environment = dict(os.environ)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    output = files.open_append(home / OUTPUT)
    command = [sys.executable, "-m", "gape", run.kind, "run", str(home), "--resume", resume]
    # Apart from the terminal: Ctrl-C reaches the parent alone, which passes one signal on; two would cut a child short.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment, start_new_session=True
    )
    return _Child(run, process, output, time.monotonic())


def _step(home: Path) -> int:
    """The step of the last whole line of a run's log."""
    try:
        with (home / "log.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().split(b"\n")
        return int(json.loads(lines[-2])["step"])
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return 0


def _settle(child: _Child, directory: Path, total: int, progress: Progress, result: SweepResult) -> None:
    child.output.close()
    name, code = child.run.name, child.process.returncode
    if code == 0:
        result.done.append(name)
        count = len(result.done) + len(result.failed)
        progress.log(f"[{count}/{total}] {name} done in {time.monotonic() - child.began:.0f} s")
        return
    text = (directory / name / OUTPUT).read_text(encoding="utf-8", errors="replace").strip()
    result.failed[name] = text.rpartition("\n")[2] or f"exit code {code}"
    progress.log(f"{name} failed with exit code {code}: {result.failed[name]}")
