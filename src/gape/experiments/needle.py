"""A run of the needle task: training, evaluation at several lengths, analysis."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from rich.console import Console

from gape.analysis.niah import inspect_model
from gape.experiments.experiment import Log, conditions, pick_device
from gape.experiments.open_model import OpenModel, open_run, read_run
from gape.experiments.recipe import Recipe
from gape.experiments.result_store import ResultStore, matches
from gape.experiments.run import NeedleRun
from gape.models.config import GPTConfig
from gape.models.gpt import GPT
from gape.report.results import pack_hits
from gape.tasks import niah
from gape.train import StopFlag, Trainer
from gape.utils import files, jsonl
from gape.utils.jsonl import Record
from gape.utils.progress import ProgressTable
from gape.utils.validation import invalid_argument

ROWS, ANALYSIS = "eval.jsonl", "analysis.json"


def check(run: NeedleRun, directory: Path) -> None:
    """Refuse a scheme to switch to that cannot take the run's weights; the data are made from the seed."""
    if run.switched is None:
        return
    if run.switched.position == run.model.position:
        raise invalid_argument("switch", run.switched.position, "another scheme than the one trained with")
    with torch.device("meta"):
        with_scheme(GPT(run.model), run.switched)


def train(
    run: NeedleRun, directory: Path, device: torch.device, stop: StopFlag, resume: str, console: Console | None
) -> None:
    """Train to the end, from wherever the directory stands."""
    torch.manual_seed(run.seed)
    model = GPT(run.model).to(device)
    source = niah.NIAHSource(config=run.task, batch_size=run.batch_size, seed=run.seed, device=device)

    def validate(model: GPT, step: int) -> dict[str, float]:
        accuracy = niah.accuracy(
            model, run.task, samples=run.evaluation.validation_samples, seed=run.evaluation.seed, device=device,
            split="validation", check=trainer.job.poll,
        )  # fmt: skip
        return {"accuracy": accuracy}

    extra = {"run": run.name, "variant": run.variant}
    trainer = Trainer(model, run.train, source, directory, validate, stop=stop, extra=extra, console=console)
    trainer.run(resume)


def missing(run: NeedleRun, directory: Path, device: torch.device, step: int) -> bool:
    """Whether a length is not measured or the model not analysed."""
    return bool(_store(directory).missing(_measurements(run, device, step))) or not _has_analysis(run, directory, step)


def measure(run: NeedleRun, directory: Path, device: torch.device, log: Log) -> None:
    """Evaluate at the missing lengths, then analyse the model."""
    with files.locked(directory, "measured"):
        opened = open_run(directory, device, log)
        _evaluate(run, opened, device, log)
        step = opened.identity["step"]
        if not _has_analysis(run, directory, step):
            settings = _analysis(run)
            results = inspect_model(
                opened.model, run.task, factors=settings["factors"], samples=settings["samples"],
                seed=settings["eval_seed"], trace=settings["traces"],
            )  # fmt: skip
            record = run.identity | settings | {"step": step} | results
            files.replace(directory / ANALYSIS, files.to_json(record, indent=None))


def evaluate_runs(
    directories: Sequence[Path],
    *,
    factors: Sequence[int],
    samples: int,
    seed: int,
    position: str | None = None,
    device: str = "auto",
    log: Log = print,
) -> list[Record]:
    """Measure trained runs at several lengths, once all of them are known to be measurable; all rows, old and new.

    `position` is a scheme that the weights are evaluated with as well. Errors are ValueError, or BusyError and
    CheckpointError where another process measures a run, or it has no valid checkpoint.
    """
    target, runs = pick_device(device), {}
    for directory in directories:
        run = cast(NeedleRun, read_run(directory, "niah"))
        switch = {run.model.position: position} if position and position != run.model.position else {}
        evaluation = replace(run.evaluation, factors=tuple(factors), samples=samples, seed=seed, switch=switch)
        runs[directory] = replace(run, evaluation=evaluation)
        check(runs[directory], directory)
    for directory, run in runs.items():
        with files.locked(directory, "measured"):
            _evaluate(run, open_run(directory, target, log), target, log)
    return [row for directory, run in runs.items() for row in _rows_of(run, directory, target)]


def recipe_rows(recipe: Recipe, directory: Path, without: Container[str] = ()) -> list[Record]:
    """The rows of the runs of a recipe, but for some by name, each in a directory of its own."""
    runs = [cast(NeedleRun, run) for run in recipe.runs if run.name not in without]
    return [row for run in runs for row in _rows_of(run, directory / run.name, pick_device(run.device))]


def _rows_of(run: NeedleRun, directory: Path, device: torch.device) -> list[Record]:
    """The rows of the measurements that a run asks for, the latest of each length, of the weights measured last."""
    measurements = _measurements(run, device)
    rows = [row for row in _store(directory).rows() if any(matches(row, values) for values in measurements)]
    newest = [row for row in rows if row.get("step") == rows[-1].get("step")]
    return list({(row["evaluated"], row["factor"]): row for row in newest}.values())


def _evaluate(run: NeedleRun, opened: OpenModel, device: torch.device, log: Log) -> None:
    """Measure what is missing; a row is on the disk before the next measurement begins."""
    store = _store(opened.directory)
    missing = store.missing(_measurements(run, device, opened.identity["step"]))
    for number, values in enumerate(missing):
        evaluated, factor = values["evaluated"], values["factor"]
        config = run.task.at(run.task.length * factor)
        other = run.switched if evaluated != run.model.position else None
        model = opened.model if other is None else with_scheme(opened.model, other)
        low = values["precision"] == "bfloat16"
        with ProgressTable(unit="length") as table, torch.autocast(device.type, torch.bfloat16, enabled=low):
            table.show(f"{run.name} at {config.length:,}", number, len(missing))
            right = niah.hits(model, config, samples=run.evaluation.samples, seed=run.evaluation.seed, device=device)
        accuracy = float(right.double().mean())
        results = {
            "factor": factor, "length": config.length, "needles": config.needles, "samples": len(right),
            "accuracy": accuracy, "hits": pack_hits(right.tolist()),
        }  # fmt: skip
        store.append(run.identity | {"evaluated": evaluated} | results | values)
        under = "" if other is None else f" under {evaluated}"
        log(f"{run.name}{under}: {factor}× ({config.length:,} tokens) accuracy {accuracy:.3f}")


def with_scheme(model: GPT, config: GPTConfig) -> GPT:
    """The same weights under another scheme."""
    other = GPT(config).to(next(model.parameters()).device).eval()
    try:
        other.load_state_dict(model.state_dict())
    except RuntimeError as error:
        raise ValueError(f"switch: {config.position} cannot take the weights of {model.config.position}") from error
    return other


def _store(directory: Path) -> ResultStore:
    return ResultStore(directory / ROWS, needed=("evaluated", "factor"))


def _measurements(run: NeedleRun, device: torch.device, *step: int) -> list[Record]:
    """The values that tell each measurement of a run, of any step or of one, from others; short lengths first."""
    common = {"samples": run.evaluation.samples, "eval_seed": run.evaluation.seed, **conditions(run, device)}
    schemes: list[tuple[str, Record]] = [(run.model.position, {})]
    if run.switched is not None:
        schemes.append((run.switched.position, {"options": files.plain(run.switched.options)}))
    return [
        {"evaluated": scheme, "factor": factor, **common, **options, **({"step": step[0]} if step else {})}
        for scheme, options in schemes
        for factor in sorted(set(run.evaluation.factors))
    ]


def _analysis(run: NeedleRun) -> Record:
    """The values that tell an analysis from others."""
    analysis = run.analysis
    traced = not analysis.seeds or run.seed in analysis.seeds
    return {
        "samples": analysis.samples, "factors": list(analysis.factors), "eval_seed": run.evaluation.seed,
        "traces": traced,
    }  # fmt: skip


def _has_analysis(run: NeedleRun, directory: Path, step: int) -> bool:
    stored = jsonl.read_object(directory / ANALYSIS)
    return run.analysis.samples == 0 or matches(stored, _analysis(run) | {"step": step})
