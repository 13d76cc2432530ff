"""Many runs, one after the other or several at once, each in its own directory, none done twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch

from gape.experiments.experiment import check, claim, finished, perform, pick_device
from gape.experiments.recipes import Run
from gape.train import DiskFullError, Interrupted, StopFlag
from gape.utils import files
from gape.utils.progress import Board, Voice
from gape.utils.validation import whole

OUTPUT = "output.log"
POLL_SECONDS = 0.2


@dataclass
class Tally:
    """How a sweep went: names of runs done now, done before, and failed (with the reason)."""

    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def sweep(runs: Sequence[Run], directory: Path, *, jobs: int = 1, resume: str = "auto", voice: Voice) -> Tally:
    """Bring every run to its end; a failed one does not keep the others from theirs.

    Args:
        runs: of a recipe.
        directory: each run's own lies in it, under its name.
        jobs: runs at once. More than one each get a process and write to `output.log` in their directory.
        resume: "auto" goes on with what is there, "never" refuses directories in which something was trained.
        voice: is told of progress.

    Raises:
        Interrupted: a signal came; running runs have saved.
        DiskFullError: no run could write either.
        ValueError: jobs below 1, a device that is not here, a directory that holds another run, a `resume` that is
            neither of the two or refuses what is there; nothing was written then.
    """
    whole("jobs", jobs)
    # Before anything is started: neither a missing device nor another run's directory should be found out hours later.
    for device in {run.device for run in runs}:
        pick_device(device)
    for run in runs:
        check(run, directory / run.name, resume)
    for run in runs:
        claim(run, directory / run.name)
    waiting = [run for run in runs if not finished(run, directory / run.name)]
    tally = Tally(skipped=[run.name for run in runs if run not in waiting])
    if tally.skipped:
        voice.say(f"{len(tally.skipped)} of {len(runs)} runs are done already")
    with StopFlag() as stop:
        if jobs == 1 or len(waiting) <= 1:
            _in_turn(waiting, directory, resume, stop, voice, tally)
        else:
            _at_once(waiting, directory, jobs, resume, stop, voice, tally)
    return tally


def _in_turn(runs: Sequence[Run], directory: Path, resume: str, stop: StopFlag, voice: Voice, tally: Tally) -> None:
    for number, run in enumerate(runs, 1):
        if number > 1 and run.model != runs[number - 2].model:
            # Of one function torch keeps eight compiled forms and runs what comes after uncompiled.
            torch.compiler.reset()
        voice.say(f"[{number}/{len(runs)}] {run.name}")
        began = time.monotonic()
        try:
            perform(run, directory / run.name, stop=stop, resume=resume, console=voice.console, say=voice.say)
        except (Interrupted, DiskFullError):
            raise
        except Exception as error:
            if len(runs) == 1:
                raise
            tally.failed[run.name] = f"{type(error).__name__}: {error}"
            voice.say(f"{run.name} failed: {tally.failed[run.name]}")
        else:
            tally.done.append(run.name)
            voice.say(f"[{number}/{len(runs)}] {run.name} done in {time.monotonic() - began:.0f} s")


@dataclass
class _Child:
    run: Run
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    began: float


def _at_once(
    runs: Sequence[Run], directory: Path, jobs: int, resume: str, stop: StopFlag, voice: Voice, tally: Tally
) -> None:
    waiting, children = list(runs), list[_Child]()
    try:
        with Board(voice) as board:
            while (waiting or children) and not stop.requested:
                while waiting and len(children) < jobs:
                    children.append(_start(waiting.pop(0), directory, jobs, resume))
                for child in list(children):
                    board.show(child.run.name, _step(directory / child.run.name), child.run.train.max_steps)
                    if child.process.poll() is not None:
                        children.remove(child)
                        board.drop(child.run.name)
                        _settle(child, directory, len(runs), voice, tally)
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


def _settle(child: _Child, directory: Path, total: int, voice: Voice, tally: Tally) -> None:
    child.output.close()
    name, code = child.run.name, child.process.returncode
    if code == 0:
        tally.done.append(name)
        count = len(tally.done) + len(tally.failed)
        voice.say(f"[{count}/{total}] {name} done in {time.monotonic() - child.began:.0f} s")
        return
    text = (directory / name / OUTPUT).read_text(encoding="utf-8", errors="replace").strip()
    tally.failed[name] = text.rpartition("\n")[2] or f"exit code {code}"
    voice.say(f"{name} failed with exit code {code}: {tally.failed[name]}")
