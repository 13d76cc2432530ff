"""RULER: samples written to files, and models scored on them, with their rows kept beside them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gape.data import load_tokenizer
from gape.experiments.experiment import Log
from gape.experiments.open_model import (
    is_transformers,
    model_home,
    open_run,
    read_run,
    run_tokenizer,
    transformers_reader,
)
from gape.experiments.recipe import RUNS
from gape.experiments.result_store import ResultStore
from gape.tasks.ruler import evaluation as scoring
from gape.tasks.ruler.evaluation import Prepared, Settings
from gape.tasks.ruler.generator import LM_EVAL, WORDING, Generator, lm_eval_samples
from gape.tasks.ruler.ingredients import Ingredients
from gape.tasks.ruler.readers import GPTReader, Reader, TransformersReader
from gape.tasks.ruler.sources import Sample, Source
from gape.tasks.ruler.tasks import TASKS, task
from gape.utils import files
from gape.utils.jsonl import Record, read_object
from gape.utils.progress import ProgressTable
from gape.utils.validation import invalid_argument, whole

MANIFEST = "manifest.json"
#: Samples of a file, which are in memory until it is written.
MOST = 10**6


#: By task and length: what the samples are made of, and the samples.
_Tables = dict[tuple[str, int], tuple[dict[str, Any], Iterator[dict[str, Any]]]]


def write(
    directory: Path,
    *,
    tokenizer: str,
    lengths: Sequence[int],
    count: int,
    tasks: Sequence[str] | None = None,
    seed: int = 0,
    haystack: Path | None = None,
    questions: Mapping[str, Path] | None = None,
    wording: str = "own",
    show: Callable[[str, int, int], None] = lambda name, done, total: None,
    log: Log = print,
) -> Iterator[Path]:
    """Write samples, each file at once; files of the same samples that are there stay. See `gape ruler generate`.

    Without `tasks` every task is written that fits into a length; a task that is named has to fit. Refused are also
    missing and broken files, and a folder with other samples.
    """
    if whole("count", count) > MOST:
        raise invalid_argument("count", count, f"a whole number from 1 to {MOST:,}")
    if wording not in ("own", LM_EVAL):
        raise invalid_argument("wording", wording, f"own or {LM_EVAL}")
    pairs = [(name, length) for name in _task_names(tasks) for length in lengths]
    encoder = load_tokenizer(tokenizer)
    tables: _Tables
    if wording == LM_EVAL:
        tables = {pair: ({}, iter(lm_eval_samples(*pair, tokenizer, count, seed))) for pair in pairs}
    else:
        ingredients = Ingredients(haystack, questions)
        generators = [Generator(name, length, encoder, ingredients, seed) for name, length in pairs]
        tables = _tables(generators, count, log if tasks is None else None)
        prose = [name for name, _ in tables if task(name).settings.get("haystack") == "text"]
        if prose and haystack is None:
            log(f"{', '.join(dict.fromkeys(prose))}: no --haystack was given, repeated sentences stand in for prose")
    settings = {
        "tokenizer": encoder.identity(), "seed": seed, "count": count,
        "wording": WORDING if wording == "own" else wording,
    }  # fmt: skip
    yield from _write_tables(directory, settings, tables, show)


def _write_tables(
    directory: Path, settings: Record, tables: _Tables, show: Callable[[str, int, int], None]
) -> Iterator[Path]:
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
            lines = list[str]()
            for row in rows:
                lines.append(json.dumps(row, ensure_ascii=False) + "\n")
                show(target.stem, len(lines), settings["count"])
            data = "".join(lines).encode()
            files.replace(target, data)
            listed[target.name] = {"ingredients": identity, "sha256": files.sha256(data)}
            files.replace(path, files.to_json(settings | {"files": dict(sorted(listed.items()))}))
        yield target


def _tables(generators: Sequence[Generator], count: int, log: Log | None) -> _Tables:
    """Samples of generators whose first one was made already, so that nothing fails for its length later on.

    Generators that cannot make one are left out, which `log` says; without it they are refused.
    """
    tables: _Tables = {}
    for each in generators:
        try:
            each.sample(0)
        except ValueError as error:
            if log is None:
                raise
            log(f"{each.name} at {each.length:,} is left out: {error}")
            continue
        tables[each.name, each.length] = each.ingredients.identity(task(each.name)), each.samples(count)
    if not tables:
        raise invalid_argument("tasks", [each.name for each in generators], "one that can be made")
    return tables


def _task_names(names: Sequence[str] | None) -> tuple[str, ...]:
    """RULER's names of some tasks, each once; all without names."""
    return tuple(TASKS) if names is None else tuple(dict.fromkeys(task(name.strip()).name for name in names))


def choose(samples: Sequence[Sample], tasks: Sequence[str] | None, limit: int | None) -> list[Sample]:
    """Samples of some tasks, the first few of each task and length."""
    names, known = _task_names(tasks), {sample.task for sample in samples}
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


def measure(
    models: Sequence[str],
    samples: Sequence[Sample],
    sources: Sequence[Source],
    settings: Settings,
    *,
    device: torch.device,
    tokenizer: str | None = None,
    name: str | None = None,
    out: Path | None = None,
    log: Log,
) -> list[Record]:
    """Score every model on all samples; a row for each model, task and length. What was scored is not scored again.

    Models that cannot be read and samples that do not fit are refused before any is scored, as far as that is known.
    """
    if (out is not None or name is not None) and len(models) > 1:
        raise ValueError(f"out and name: got them for {len(models)} models, expected one")
    rows, encoded = list[Record](), dict[str, list[Prepared]]()
    homes: set[Path] = set()
    for spec in models:
        reader, identity, home = _open(spec, settings, device, tokenizer, name)
        home = out or home
        if home in homes:
            raise ValueError(f"models: {spec!r} goes by the name of another; score it by itself, with --name")
        homes.add(home)
        known = reader.identity()
        key = str(known["tokenizer"]["sha256"]) + str(reader.limit)
        if key not in encoded:
            encoded[key] = scoring.prepare(
                reader, samples, template=settings.template, max_length=settings.max_length, generate=settings.generate
            )
        question = scoring.question(known, sources, settings)
        question |= {"device": device.type, "samples": [f"{s.source}:{s.number}" for s in samples]}
        about = identity | {
            "key": scoring.key(question), "model": known["size"], "parameters": known["parameters"],
            "precision": settings.precision, "device": device.type, "template": settings.template,
        }  # fmt: skip
        rows += _measure_model(reader, encoded[key], settings, home, question, about, log)
    return rows


def _open(
    spec: str, settings: Settings, device: torch.device, tokenizer: str | None, name: str | None
) -> tuple[Reader, Record, Path]:
    """A model's reader, what names it in rows, and where these go."""
    low, path = settings.precision == "bfloat16", Path(spec)
    reader: GPTReader | TransformersReader
    if path.is_dir() and not is_transformers(path):
        read_run(path, "lm")
        own, opened = run_tokenizer(path, tokenizer), open_run(path, device)
        opened.accept(own.identity())
        reader = GPTReader(opened.model, own, low=low, chunk=settings.chunk)
        identity, home = opened.identity, path
    else:
        place = str(model_home(path)) if path.is_dir() else spec
        reader = transformers_reader(place, device=device, low=low, chunk=settings.chunk)
        called = name or reader.name
        identity = {
            "run": called, "variant": "", "position": name or _position(reader.model.config) or called, "seed": 0,
            "train_length": reader.limit, "step": 0,
        }  # fmt: skip
        home = RUNS / HOME / called
    reader.forgetting = settings.way.apply(reader.model)
    return reader, settings.way.named(identity), home


def _measure_model(
    reader: Reader, items: Sequence[Prepared], settings: Settings, home: Path, question: Record, about: Record, log: Log
) -> list[Record]:
    name, store = str(about["run"]), ResultStore(home / ROWS)
    home.mkdir(parents=True, exist_ok=True)
    with files.locked(home, "measured"), ProgressTable(unit="sample") as table:
        rows = scoring.evaluate(
            reader, items, settings, home / HOME / about["key"], question=question,
            progress=lambda done, total: table.show(name, done, total),
        )  # fmt: skip
        table.remove(name)
        results = [about | row for row in scoring.summarise(rows)]
        store.append(*store.missing(results))
    for row in results:
        match = f", match {100 * row['match']:.1f}%" if "match" in row else ""
        log(
            f"{name}: {row['task']} at {row['length']:,}: NLL {row['nll']:.3f} ({row['nll_low']:.3f} … "
            f"{row['nll_high']:.3f}){match}, {row['samples']} sample{'s' * (row['samples'] != 1)}"
        )
    return results


def _position(config: Any) -> str | None:
    """The scheme of a model with gates of ours; None for others, which do not say it."""
    # A model that gates were put into says it among its gates, ours as one of its sizes.
    settings = getattr(config, "gape", None) or vars(config)
    position = settings.get("position") if config.model_type.startswith("gape_") else None
    return position if isinstance(position, str) else None
