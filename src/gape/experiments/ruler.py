"""RULER: samples written to files, and models scored on them, with their rows kept beside them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gape.data import load_tokenizer
from gape.experiments import experiment
from gape.experiments.experiment import Log
from gape.experiments.open_model import read_run
from gape.experiments.open_reader import is_ours, run_reader, transformers_reader
from gape.experiments.recipe import RUNS
from gape.experiments.result_store import ResultStore
from gape.tasks.ruler import evaluation as scoring
from gape.tasks.ruler import generator
from gape.tasks.ruler.evaluation import Prepared, Settings
from gape.tasks.ruler.generator import WORDING, Generator
from gape.tasks.ruler.ingredients import Ingredients
from gape.tasks.ruler.readers import Reader, TransformersReader
from gape.tasks.ruler.sources import Sample, Source
from gape.tasks.ruler.tasks import TASKS, task
from gape.utils import files, locks
from gape.utils.jsonl import Record, read_object
from gape.utils.progress import ProgressTable
from gape.utils.validation import invalid_argument, whole

MANIFEST = "manifest.json"
#: Samples of a file, which are in memory until it is written.
MOST = 10**6


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Which samples to write; see the options of `gape ruler generate`.

    Without `tasks` every task is written that fits into a length; a task that is named has to fit.
    """

    tokenizer: str
    lengths: tuple[int, ...]
    tasks: tuple[str, ...] | None
    count: int
    seed: int
    haystack: Path | None
    questions: Mapping[str, Path]
    wording: str

    def __post_init__(self) -> None:
        if whole("count", self.count) > MOST:
            raise invalid_argument("count", self.count, f"a whole number from 1 to {MOST:,}")
        if self.wording not in ("own", generator.LM_EVAL):
            raise invalid_argument("wording", self.wording, f"own or {generator.LM_EVAL}")

    @property
    def names(self) -> tuple[str, ...]:
        """The tasks, by name."""
        return task_names(self.tasks)


def write(
    samples: Samples,
    directory: Path,
    *,
    show: Callable[[str, int, int], None] = lambda name, done, total: None,
    log: Log = print,
) -> Iterator[Path]:
    """Write the samples of an order, each file at once; files of the same order that are there stay.

    Raises:
        ValueError: a task does not fit into a length, a file is missing or broken, or the folder holds other samples.
    """
    tables = _exact(samples) if samples.wording == generator.LM_EVAL else _own(samples, log)
    settings = {
        "tokenizer": load_tokenizer(samples.tokenizer).identity(), "seed": samples.seed, "count": samples.count,
        "wording": WORDING if samples.wording == "own" else samples.wording,
    }  # fmt: skip
    path = directory / MANIFEST
    before = read_object(path)
    if before and {key: before.get(key) for key in settings} != files.plain(settings):
        raise invalid_argument("out", str(directory), "an empty folder: this one holds samples of other settings")
    directory.mkdir(parents=True, exist_ok=True)
    listed: dict[str, Any] = dict(before.get("files", {}))
    for (name, length), (identity, rows) in tables.items():
        target = directory / f"{name}_{length}.jsonl"
        known = listed.get(target.name, {})
        intact = target.is_file() and files.sha256(target.read_bytes()) == known.get("sha256")
        if not (intact and known.get("ingredients") == files.plain(identity)):
            data = _lines(rows, partial(show, target.stem), samples.count)
            files.replace(target, data)
            listed[target.name] = {"ingredients": identity, "sha256": files.sha256(data)}
            files.replace(path, files.to_json(settings | {"files": dict(sorted(listed.items()))}))
        yield target


#: By task and length: what the samples are made of, and the samples.
_Tables = dict[tuple[str, int], tuple[dict[str, Any], Iterator[dict[str, Any]]]]


def _own(samples: Samples, log: Log) -> _Tables:
    """Generators whose first sample was made already, so that nothing fails for its length later on."""
    tokenizer, ingredients = load_tokenizer(samples.tokenizer), Ingredients(samples.haystack, samples.questions)
    tables: _Tables = {}
    for name in samples.names:
        for length in samples.lengths:
            generator = Generator(name, length, tokenizer, ingredients, samples.seed)
            try:
                generator.sample(0)
            except ValueError as error:
                if samples.tasks is not None:
                    raise
                log(f"{name} at {length:,} is left out: {error}")
                continue
            tables[name, length] = ingredients.identity(task(name)), generator.samples(samples.count)
    prose = [name for name, _ in tables if task(name).settings.get("haystack") == "text"]
    if prose and samples.haystack is None:
        log(f"{', '.join(dict.fromkeys(prose))}: no --haystack was given, repeated sentences stand in for prose")
    if not tables:
        raise invalid_argument("tasks", samples.names, "one that can be made")
    return tables


def _exact(samples: Samples) -> _Tables:
    return {
        (name, length): ({}, iter(generator.samples(name, length, samples.tokenizer, samples.count, samples.seed)))
        for name in samples.names
        for length in samples.lengths
    }


def _lines(rows: Iterator[dict[str, Any]], show: Callable[[int, int], None], total: int) -> bytes:
    lines = list[str]()
    for row in rows:
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        show(len(lines), total)
    return "".join(lines).encode()


def task_names(names: Sequence[str] | None) -> tuple[str, ...]:
    """RULER's names of some tasks, each once; all without names.

    Raises:
        ValueError: there is no such task.
    """
    return tuple(TASKS) if names is None else tuple(dict.fromkeys(task(name.strip()).name for name in names))


def choose(samples: Sequence[Sample], tasks: Sequence[str] | None, limit: int | None) -> list[Sample]:
    """Samples of some tasks, the first few of each task and length.

    Raises:
        ValueError: there is none of a task.
    """
    names, known = task_names(tasks), {sample.task for sample in samples}
    missing = [name for name in names if tasks is not None and name not in known]
    if missing:
        raise ValueError(f"tasks: the data have no samples of {', '.join(missing)}")
    counts = Counter[tuple[str, int]]()
    chosen = []
    for sample in samples:
        counts[sample.task, sample.length] += 1
        first = limit is None or counts[sample.task, sample.length] <= whole("limit", limit)
        if sample.task in names and first:
            chosen.append(sample)
    return chosen


ROWS, HOME = "ruler.jsonl", "ruler"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What models are scored on, and how; see the options of `gape ruler eval`."""

    samples: Sequence[Sample]
    sources: Sequence[Source]
    settings: Settings
    tokenizer: str | None
    device: torch.device
    name: str | None
    out: Path | None


class _Opened(NamedTuple):
    """A model: its reader, what identifies it, what names it in rows, and where these go."""

    reader: Reader
    known: Record
    identity: Record
    home: Path


def measure(models: Sequence[str], evaluation: Evaluation, *, log: Log) -> list[Record]:
    """Score every model on all samples; a row for each model, task and length. What was scored is not scored again.

    Raises:
        ValueError: a model that cannot be read, or samples that do not fit; before any is scored, as far as that can be
            known.
    """
    if (evaluation.out is not None or evaluation.name is not None) and len(models) > 1:
        raise ValueError(f"out and name: got them for {len(models)} models, expected one")
    settings, rows = evaluation.settings, list[Record]()
    encoded: dict[str, list[Prepared]] = {}
    homes: set[Path] = set()
    for spec in models:
        opened = _open(spec, evaluation)
        if opened.home in homes:
            raise ValueError(f"models: {spec!r} goes by the name of another; score it by itself, with --name")
        homes.add(opened.home)
        tokenizer = str(opened.known["tokenizer"]["sha256"]) + str(opened.reader.limit)
        if tokenizer not in encoded:
            encoded[tokenizer] = evaluation.prepare(
                opened.reader, evaluation.samples, template=settings.template, max_length=settings.max_length,
                generate=settings.generate,
            )  # fmt: skip
        rows += _measure_model(opened, encoded[tokenizer], evaluation, log)
    return rows


def _open(spec: str, evaluation: Evaluation) -> _Opened:
    low, chunk = evaluation.settings.precision == "bfloat16", evaluation.settings.chunk
    if is_ours(spec):
        reader, step = run_reader(Path(spec), evaluation.tokenizer, device=evaluation.device, low=low, chunk=chunk)
        run = read_run(Path(spec), "lm")
        identity = _apply_way(reader, experiment.identity(run) | {"step": step}, evaluation)
        return _Opened(reader, reader.identity(), identity, evaluation.out or Path(spec))
    if Path(spec).is_dir() and not (Path(spec) / "config.json").is_file():
        raise ValueError(f"model: got {spec!r}, expected a run of gape lm train or a folder of transformers")
    other = transformers_reader(spec, device=evaluation.device, low=low, chunk=chunk)
    name = evaluation.name or other.name
    about: Record = {
        "run": name, "variant": "", "position": evaluation.name or _position(other) or name, "seed": 0,
        "train_length": other.limit, "step": 0,
    }  # fmt: skip
    return _Opened(other, other.identity(), _apply_way(other, about, evaluation), evaluation.out or RUNS / HOME / name)


def _apply_way(reader: Reader, identity: Record, evaluation: Evaluation) -> Record:
    """Let a reader read as evaluation; what names it in rows."""
    way = evaluation.settings.way
    reader.forgetting = way.apply(reader.model)
    return way.named(identity)


def _measure_model(opened: _Opened, items: Sequence[Prepared], evaluation: Evaluation, log: Log) -> list[Record]:
    settings = evaluation.settings
    question = scoring.question(opened.known, evaluation.sources, settings)
    question |= {"device": evaluation.device.type, "samples": [f"{i.sample.source}:{i.sample.number}" for i in items]}
    key, name, store = scoring.key(question), str(opened.identity["run"]), ResultStore(opened.home / ROWS)
    about = opened.identity | {
        "key": key, "model": opened.known["size"], "parameters": opened.known["parameters"],
        "precision": settings.precision, "device": evaluation.device.type, "template": settings.template,
    }  # fmt: skip
    opened.home.mkdir(parents=True, exist_ok=True)
    with locks.locked(opened.home, "measured"), ProgressTable(unit="sample") as table:
        rows = scoring.evaluate(
            opened.reader, items, settings, opened.home / HOME / key, question=question,
            progress=lambda done, total: table.show(name, done, total),
        )  # fmt: skip
        table.remove(name)
        results = [about | row for row in scoring.summarise(rows)]
        store.append(*store.missing(results))
    _log_rows(name, results, log)
    return results


def _position(reader: TransformersReader) -> str | None:
    """The scheme of a model with gates of ours; None for others, which do not say it."""
    config = reader.model.config
    # A model that gates were put into says it among its gates, ours as one of its sizes.
    settings = getattr(config, "gape", None) or vars(config)
    position = settings.get("position") if config.model_type.startswith("gape_") else None
    return position if isinstance(position, str) else None


def _log_rows(name: str, rows: Sequence[Record], log: Log) -> None:
    for row in rows:
        place = f"{name}: {row['task']} at {row['length']:,}"
        match = f", match {100 * row['match']:.1f}%" if "match" in row else ""
        log(
            f"{place}: NLL {row['nll']:.3f} ({row['nll_low']:.3f} … {row['nll_high']:.3f}){match}, "
            f"{row['samples']} sample{'s' * (row['samples'] != 1)}"
        )
