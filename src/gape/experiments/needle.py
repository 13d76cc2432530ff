"""A run of the needle task: training, evaluation at several lengths, analysis."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from gape.analysis.niah import inspect_model
from gape.experiments.experiment import Record, Say, answers, how, model_step, named_device
from gape.experiments.recipes import NeedleRun
from gape.models.config import GPTConfig
from gape.models.gpt import GPT
from gape.report.results import pack_hits, read_rows
from gape.tasks import niah
from gape.train import StopFlag, Trainer, checkpoint
from gape.train.load import model_of
from gape.utils import files, jsonl, locks
from gape.utils.progress import Board, Voice
from gape.utils.validation import invalid_argument

ROWS, LOOKS = "eval.jsonl", "analysis.json"


def check(run: NeedleRun, directory: Path) -> None:
    """Refuse a scheme to switch to that cannot take the run's weights; the data are made from the seed.

    Raises:
        ValueError: names both schemes.
    """
    if run.switched is None:
        return
    if run.switched.position == run.model.position:
        raise invalid_argument("switch", run.switched.position, "another scheme than the one trained with")
    with torch.device("meta"):
        own, other = (GPT(config).state_dict() for config in (run.model, run.switched))
    if {name: x.shape for name, x in own.items()} != {name: x.shape for name, x in other.items()}:
        raise _unfit(run.model.position, run.switched.position)


def train(
    run: NeedleRun, directory: Path, device: torch.device, stop: StopFlag, resume: str, console: Console | None
) -> None:
    """Train to the end, from wherever the directory stands."""
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


def missing(run: NeedleRun, directory: Path) -> bool:
    """Whether a length is not measured or the model not looked into."""
    step = model_step(run, directory)
    return bool(_missing(run, directory, named_device(run.device), step)) or not _looked(run, directory, step)


def measure(run: NeedleRun, directory: Path, device: torch.device, stop: StopFlag, say: Say) -> None:
    """Evaluate at the missing lengths, then look inside.

    Raises:
        BusyError: another process trains or measures the run.
    """
    with locks.locked(directory, "measured"):
        chosen = checkpoint.resolve(directory, say)
        model: GPT = model_of(chosen, device=device)
        _evaluate(run, model, directory, chosen.step, stop, say)
        _analyse(run, model, directory, chosen.step, stop)


def evaluate(run: NeedleRun, directory: Path, device: torch.device, *, stop: StopFlag, say: Say = print) -> None:
    """Measure accuracy at every length that has no row of the newest weights yet, measured as asked.

    Raises:
        Interrupted: a signal came; the rows so far are kept.
        BusyError: another process trains or measures the run.
        CheckpointError: the run has no valid checkpoint.
    """
    with locks.locked(directory, "measured"):
        chosen = checkpoint.resolve(directory, say)
        if _missing(run, directory, device, chosen.step):
            _evaluate(run, model_of(chosen, device=device), directory, chosen.step, stop, say)


def answered(run: NeedleRun, directory: Path, device: torch.device) -> list[Record]:
    """The rows that were measured as a run asks for, the latest of each length, of the weights measured last."""
    wanted = {(scheme, factor) for scheme in _schemes(run) for factor in run.evaluation.factors}
    rows = [row for row in _rows(directory) if (row["evaluated"], row["factor"]) in wanted]
    fitting = [row for row in rows if answers(row, _asked(run, row["evaluated"], device))]
    newest = [row for row in fitting if row.get("step") == fitting[-1].get("step")]
    return list({(row["evaluated"], row["factor"]): row for row in newest}.values())


def _evaluate(run: NeedleRun, model: GPT, directory: Path, step: int, stop: StopFlag, say: Say) -> None:
    """Measure what is missing; a row is on the disk before the next measurement begins."""
    device = next(model.parameters()).device
    missing = _missing(run, directory, device, step)
    for number, (evaluated, factor) in enumerate(missing):
        asked = _asked(run, evaluated, device)
        config = run.task.at(run.task.length * factor)
        reader = model if evaluated == run.model.position else switched(model, run.switched)
        low = asked["precision"] == "bfloat16"
        with Board(Voice(), "length") as board, torch.autocast(device.type, torch.bfloat16, enabled=low):
            board.show(f"{run.name} at {config.length:,}", number, len(missing))
            right = niah.hits(
                reader, config, samples=run.evaluation.samples, seed=run.evaluation.seed, device=device,
                stop=lambda: stop.requested,
            )  # fmt: skip
        if len(right) < run.evaluation.samples:
            stop.check()
        accuracy = float(right.double().mean())
        measured = {
            "factor": factor, "length": config.length, "needles": config.needles, "samples": len(right),
            "accuracy": accuracy, "hits": pack_hits(right.tolist()),
        }  # fmt: skip
        jsonl.append(directory / ROWS, identity(run) | {"evaluated": evaluated} | measured | asked | {"step": step})
        under = "" if evaluated == run.model.position else f" under {evaluated}"
        say(f"{run.name}{under}: {factor}× ({config.length:,} tokens) accuracy {accuracy:.3f}")


def switched(model: GPT, config: GPTConfig | None) -> GPT:
    """The same weights under another scheme.

    Raises:
        ValueError: no config, or one whose parameters are others.
    """
    if config is None:
        raise invalid_argument("switch", config, "a scheme for this run's model")
    other = GPT(config).to(next(model.parameters()).device).eval()
    try:
        other.load_state_dict(model.state_dict())
    except RuntimeError as error:
        raise _unfit(model.config.position, config.position) from error
    return other


def identity(run: NeedleRun) -> Record:
    """What names a run in rows and analyses."""
    return {
        "run": run.name, "variant": run.variant, "position": run.model.position, "target": run.task.target,
        "seed": run.seed, "train_length": run.task.length,
    }  # fmt: skip


def _analyse(run: NeedleRun, model: GPT, directory: Path, step: int, stop: StopFlag) -> None:
    if _looked(run, directory, step):
        return
    asked = _look(run)
    found = inspect_model(
        model, run.task, factors=asked["factors"], samples=asked["samples"], seed=asked["eval_seed"],
        trace=asked["traces"], map_size=asked["map_size"], check=stop.check,
    )  # fmt: skip
    files.replace(directory / LOOKS, files.to_json(identity(run) | asked | {"step": step} | found, indent=None))


def _missing(run: NeedleRun, directory: Path, device: torch.device, step: int | None) -> list[tuple[str, int]]:
    """(scheme, factor) of the measurements that are still to be made of a step's weights, short lengths first."""
    rows = [row for row in _rows(directory) if row.get("step") == step]
    done = {(row["evaluated"], row["factor"]) for row in rows if answers(row, _asked(run, row["evaluated"], device))}
    wanted = [(scheme, factor) for scheme in _schemes(run) for factor in sorted(set(run.evaluation.factors))]
    return [measurement for measurement in wanted if measurement not in done]


def _asked(run: NeedleRun, evaluated: str, device: torch.device) -> Record:
    """What tells a measurement of a scheme at some length from others; rows with these values answer it."""
    asked: Record = {"samples": run.evaluation.samples, "eval_seed": run.evaluation.seed, **how(run, device)}
    if run.switched is not None and evaluated == run.switched.position:
        asked["options"] = files.plain(run.switched.options)
    return asked


def _schemes(run: NeedleRun) -> list[str]:
    """The schemes that the weights are measured with, their own first."""
    return [run.model.position, *([] if run.switched is None else [run.switched.position])]


def _rows(directory: Path) -> list[Record]:
    return read_rows(directory / ROWS, ("evaluated", "factor")) if (directory / ROWS).is_file() else []


def _look(run: NeedleRun) -> Record:
    """What tells a look inside from others."""
    wanted = run.analysis
    kept = not wanted.seeds or run.seed in wanted.seeds
    return {
        "samples": wanted.samples, "factors": list(wanted.factors), "eval_seed": run.evaluation.seed,
        "traces": wanted.traces and kept, "map_size": wanted.map_size if kept else 0,
    }  # fmt: skip


def _looked(run: NeedleRun, directory: Path, step: int | None) -> bool:
    return run.analysis.samples == 0 or answers(jsonl.read_object(directory / LOOKS), _look(run) | {"step": step})


def _unfit(own: str, other: str) -> ValueError:
    return ValueError(f"switch: {other} cannot take the weights of {own}")
