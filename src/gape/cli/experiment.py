"""One run of a recipe in its directory: train, evaluate, look inside; each part done once, whatever interrupts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from gape.analysis.niah import look_inside
from gape.models.gpt import GPT, GPTConfig
from gape.ops.checks import refuse
from gape.recipes import Run
from gape.report.results import Record, pack_hits, read_lines
from gape.tasks import niah
from gape.train import StopFlag, Trainer, files, load_model
from gape.train.config import changes
from gape.train.log import JSONLines

SETTINGS, SUMMARY, ROWS, LOOKS = "run.json", "summary.json", "eval.jsonl", "analysis.json"

Say = Callable[[str], None]


def perform(
    run: Run, directory: Path, *, stop: StopFlag, resume: str = "auto", console: Console | None = None, say: Say = print
) -> None:
    """Bring a run to its end, from wherever its directory stands.

    Args:
        run: what to do.
        directory: the run's own; made when missing.
        stop: polled in training, validation, evaluation and analysis.
        resume: as :meth:`gape.train.Trainer.run` takes it.
        console: where training shows its progress.
        say: told what was measured.

    Raises:
        Interrupted: a signal came; what was done is kept.
        ValueError: the directory holds another run.
        NonFiniteError, DiskFullError, CheckpointError: as the trainer.
    """
    claim(run, directory)
    device = pick_device(run.device)
    with stop:
        if not trained(run, directory):
            _train(run, directory, device, stop, resume, console)
        if finished(run, directory):
            return
        model: GPT = load_model(directory, device=device, say=say)
        evaluate(run, model, directory, stop=stop, say=say)
        _analyse(run, model, directory, stop)


def claim(run: Run, directory: Path) -> None:
    """Write `run.json`, or make sure that the one there is of the same run; measurements may be added to.

    Raises:
        ValueError: another run is there; names what differs.
    """
    path = directory / SETTINGS
    now = run.to_dict()
    if path.is_file():
        before = _read(path)
        lines = [f"train.{line}" for line in changes(before.get("train", {}), now["train"])]
        for key in ("seed", "batch_size", "task", "model"):
            if before.get(key) != now[key]:
                lines.append(f"{key} was {before.get(key)} and is now {now[key]}")
        if lines:
            raise ValueError(f"{directory}: holds another run: {'; '.join(lines)}")
    directory.mkdir(parents=True, exist_ok=True)
    files.replace(path, files.to_json(now))


def trained(run: Run, directory: Path) -> bool:
    """Whether training has come to its end."""
    summary = _read(directory / SUMMARY)
    return bool(summary) and (summary["status"] == "stopped early" or summary["step"] >= run.train.max_steps)


def finished(run: Run, directory: Path) -> bool:
    """Whether nothing is left to do."""
    if not trained(run, directory):
        return False
    return not list(_missing(run, directory)) and _looked(run, directory)


def evaluate(run: Run, model: GPT, directory: Path, *, stop: StopFlag, say: Say = print) -> None:
    """Measure accuracy at every length that has no row yet; a row is on the disk before the next begins.

    Raises:
        Interrupted: a signal came; the rows so far are kept.
    """
    device = next(model.parameters()).device
    low = run.train.precision == "bfloat16" or (run.train.precision == "auto" and device.type == "cuda")
    step = _read(directory / SUMMARY).get("step")
    for evaluated, factor in list(_missing(run, directory)):
        config = run.task.at(run.task.length * factor)
        asked = model if evaluated == run.model.position else switched(model, run.switched)
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            right = niah.hits(
                asked, config, samples=run.evaluation.samples, seed=run.evaluation.seed, device=device,
                stop=lambda: stop.requested,
            )  # fmt: skip
        if len(right) < run.evaluation.samples:
            stop.check()
        accuracy = float(right.double().mean())
        measured = {
            "factor": factor, "length": config.length, "needles": config.needles, "samples": len(right),
            "accuracy": accuracy, "hits": pack_hits(right.tolist()), "eval_seed": run.evaluation.seed,
            "precision": "bfloat16" if low else "float32", "step": step,
        }  # fmt: skip
        _append(directory / ROWS, identity(run) | {"evaluated": evaluated} | measured)
        under = "" if evaluated == run.model.position else f" under {evaluated}"
        say(f"{run.name}{under}: {factor}× ({config.length:,} tokens) accuracy {accuracy:.3f}")


def switched(model: GPT, config: GPTConfig | None) -> GPT:
    """The same weights under another scheme.

    Raises:
        ValueError: no config, or one whose parameters are others.
    """
    if config is None:
        raise refuse("switch", config, "a scheme for this run's model")
    other = GPT(config).to(next(model.parameters()).device).eval()
    try:
        other.load_state_dict(model.state_dict())
    except RuntimeError as error:
        raise ValueError(f"switch: {config.position} cannot take the weights of {model.config.position}") from error
    return other


def identity(run: Run) -> Record:
    """What names a run in rows and analyses."""
    return {
        "run": run.name, "variant": run.variant, "position": run.model.position, "target": run.task.target,
        "seed": run.seed, "train_length": run.task.length,
    }  # fmt: skip


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is a GPU where there is one.

    Raises:
        ValueError: no such device, or none of that kind here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise refuse("device", name, "auto, cpu, or a device that is here") from error
    return device


def _train(
    run: Run, directory: Path, device: torch.device, stop: StopFlag, resume: str, console: Console | None
) -> None:
    torch.manual_seed(run.seed)
    model = GPT(run.model).to(device)
    source = niah.NIAHSource(config=run.task, batch_size=run.batch_size, seed=run.seed, device=device)

    def validate(model: GPT, step: int) -> dict[str, float]:
        samples = run.evaluation.validation_samples
        right = niah.hits(
            model, run.task, samples=samples, seed=run.evaluation.seed, split="validation", device=device,
            stop=lambda: stop.requested,
        )  # fmt: skip
        if len(right) < samples:
            stop.check()
        return {"accuracy": float(right.double().mean())}

    extra = {"run": run.name, "variant": run.variant}
    trainer = Trainer(model, run.train, source, directory, validate, stop=stop, extra=extra, console=console)
    trainer.run(resume)


def _analyse(run: Run, model: GPT, directory: Path, stop: StopFlag) -> None:
    if _looked(run, directory):
        return
    wanted = run.analysis
    kept = not wanted.seeds or run.seed in wanted.seeds
    found = look_inside(
        model, run.task, factors=wanted.factors, samples=wanted.samples, seed=run.evaluation.seed,
        trace=wanted.traces and kept, map_size=wanted.map_size if kept else 0, check=stop.check,
    )  # fmt: skip
    asked = {"samples": wanted.samples, "factors": list(wanted.factors), "step": _read(directory / SUMMARY).get("step")}
    files.replace(directory / LOOKS, files.to_json(identity(run) | asked | found, indent=None))


def _missing(run: Run, directory: Path) -> Iterator[tuple[str, int]]:
    """(scheme, factor) of the measurements that are still to be made of the trained weights, short lengths first."""
    step = _read(directory / SUMMARY).get("step")
    wanted = run.evaluation
    rows = read_lines(directory / ROWS) if (directory / ROWS).is_file() else []
    done = {
        (row["evaluated"], row["factor"])
        for row in rows
        if (row["samples"], row["eval_seed"], row["step"]) == (wanted.samples, wanted.seed, step)
    }
    others = [] if run.switched is None else [run.switched.position]
    for evaluated in (run.model.position, *others):
        for factor in sorted(wanted.factors):
            if (evaluated, factor) not in done:
                yield evaluated, factor


def _looked(run: Run, directory: Path) -> bool:
    if run.analysis.samples == 0:
        return True
    found = _read(directory / LOOKS)
    step = _read(directory / SUMMARY).get("step")
    asked = (run.analysis.samples, list(run.analysis.factors), step)
    return (found.get("samples"), found.get("factors"), found.get("step")) == asked


def _append(path: Path, row: Record) -> None:
    """Add a line that survives whatever comes next; a line that was cut short before goes first."""
    lines = JSONLines(path)
    try:
        whole = path.read_bytes()
        lines.cut(whole.rfind(b"\n") + 1)
        lines.write(**row)
        lines.settle()
    finally:
        lines.close()


def _read(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is none."""
    if not path.is_file():
        return {}
    try:
        return files.from_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
