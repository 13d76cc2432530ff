"""One run of a recipe in its directory, of whatever kind: each part done once, whatever interrupts it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console

from gape.distributed import processes
from gape.experiments.open_model import SETTINGS, SUMMARY
from gape.experiments.run import Run
from gape.train import StopFlag, checkpoint
from gape.train.config import changes
from gape.utils import files
from gape.utils.jsonl import Record, read_object
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


def perform(
    run: Run, directory: Path, *, stop: StopFlag, resume: str = "auto", console: Console | None = None, log: Log = print
) -> None:
    """Bring a run to its end, from wherever its directory stands; what was done is kept.

    Args:
        run, directory: what to do, and where; the directory is made when missing.
        stop: polled in training and validation; a signal ends measurements at once.
        resume: "auto" goes on with what is there, "never" refuses it.
        console, log: where training shows its progress, and measurements their lines.

    Raises:
        ValueError: what :func:`check` refuses. Others are the trainer's.
    """
    own = experiment(run)

    def begin() -> None:
        check(run, directory, resume)
        claim(run, directory)

    def measure() -> None:
        if not is_finished(run, directory):
            # A row is kept as soon as it is measured.
            with stop.at_once():
                own.measure(run, directory, device, log)

    with processes.reported():
        # Of the processes of a job the first decides, and measures by itself.
        processes.from_first(begin)
        device = pick_device(run.device)
        with stop:
            if processes.from_first(lambda: not is_trained(run, directory), stop):
                own.train(run, directory, device, stop, resume, console)
            processes.from_first(measure, stop)


def check(run: Run, directory: Path, resume: str = "auto") -> None:
    """Make sure, before anything is written, that a run can be begun or gone on with; measurements may be added to.

    Raises:
        ValueError: another run is there, and what differs; training, where `resume` is "never"; a `resume` that is
            neither; or what the experiment refuses.
    """
    if resume not in ("auto", "never"):
        raise invalid_argument("resume", resume, "auto or never")
    there = [*checkpoint.available(directory / "checkpoints"), directory / SUMMARY]
    if resume == "never" and there[0].exists():
        raise invalid_argument("resume", resume, f"auto or another --out, since {there[0]} is there already")
    if files.foreign(directory, SETTINGS):
        raise invalid_argument("out", str(directory), "a new or empty directory, or one of this run")
    before = read_object(directory / SETTINGS)
    if before:
        now = run.to_dict()
        try:
            # With the defaults of keys that it was written without.
            before = Run.from_dict(before).to_dict()
        except ValueError as error:
            raise ValueError(f"{directory / SETTINGS}: {error}; give another --out") from error
        lines = [f"train.{line}" for line in changes(before.get("train", {}), now["train"])]
        for key in ("kind", "seed", "batch_size", "task", "recall", "model"):
            if before.get(key) != now.get(key):
                lines.append(f"{key} was {before.get(key)} and is now {now.get(key)}")
        if lines:
            raise ValueError(f"{directory}: holds another run: {'; '.join(lines)}")
    experiment(run).check(run, directory)


def claim(run: Run, directory: Path) -> None:
    """Write `run.json` of a run that was checked."""
    directory.mkdir(parents=True, exist_ok=True)
    files.replace(directory / SETTINGS, files.to_json(run.to_dict()))


def is_trained(run: Run, directory: Path) -> bool:
    """Whether training has come to its end."""
    summary = read_object(directory / SUMMARY)
    return bool(summary) and (summary["status"] == "stopped early" or summary["step"] >= run.train.max_steps)


def is_finished(run: Run, directory: Path) -> bool:
    """Whether nothing is left to do."""
    return is_trained(run, directory) and not experiment(run).missing(run, directory)


def model_step(run: Run, directory: Path) -> int | None:
    """The step whose weights are the run's: the best where they were kept, else the last; None before there is one."""
    summary = read_object(directory / SUMMARY)
    best = summary.get("best") if run.train.patience else None
    step: int | None = best["step"] if best else summary.get("step")
    return step


def conditions(run: Run, device: torch.device) -> Record:
    """How a run is measured on a device: the keys that distinguish rows of another precision or device."""
    return {"precision": "bfloat16" if low_precision(run.train.precision, device) else "float32", "device": device.type}


def identity(run: Run) -> Record:
    """What names a run in rows and analyses."""
    return {
        "run": run.name, "variant": run.variant, "position": run.model.position, "seed": run.seed,
        "train_length": run.task.length,
    }  # fmt: skip


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is a GPU where there is one.

    Raises:
        ValueError: no such device, or none of that kind here.
    """
    device = named_device(name)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise invalid_argument("device", name, "auto, cpu, or a device that is here") from error
    return device


def named_device(name: str) -> torch.device:
    """The device of that name, whether or not it is here.

    Raises:
        ValueError: no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise invalid_argument("device", name, "auto, cpu, or a device that is here") from error


def wants_bfloat16(precision: str, device: torch.device) -> bool:
    """Whether a --precision means bfloat16 autocast on a device.

    Raises:
        ValueError: no such precision; names those there are.
    """
    if precision not in ("auto", "float32", "bfloat16"):
        raise invalid_argument("precision", precision, "auto, float32 or bfloat16")
    return low_precision(precision, device)


def low_precision(precision: str, device: torch.device) -> bool:
    """Whether a `precision` means bfloat16 autocast on a device."""
    return precision == "bfloat16" or (precision == "auto" and device.type == "cuda")
