"""RULER: samples written to files, and models scored on them, with their rows kept beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gape.data import load_tokenizer
from gape.experiments import RUNS, experiment
from gape.experiments.experiment import Record, Say
from gape.report.results import read_rows
from gape.tasks.ruler import evaluation, generator, opening, prompts
from gape.tasks.ruler.evaluation import Settings
from gape.tasks.ruler.generator import WORDING, Generator
from gape.tasks.ruler.ingredients import Ingredients
from gape.tasks.ruler.prompts import Prepared
from gape.tasks.ruler.readers import GPTReader, Reader, TransformersReader
from gape.tasks.ruler.sources import Sample, Source
from gape.tasks.ruler.tasks import task
from gape.utils import files, locks
from gape.utils.jsonl import append, read_object
from gape.utils.progress import Board, Voice
from gape.utils.validation import invalid_argument, whole

MANIFEST = "manifest.json"
#: Samples of a file, which are in memory until it is written.
MOST = 10**6


@dataclass(frozen=True, kw_only=True)
class Order:
    """What samples are asked for; see the options of `gape ruler generate`. named: whether tasks were named."""

    tokenizer: str
    lengths: tuple[int, ...]
    tasks: tuple[str, ...]
    named: bool
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


def write(
    order: Order,
    directory: Path,
    *,
    show: Callable[[str, int, int], None] = lambda name, done, total: None,
    say: Callable[[str], None] = print,
) -> Iterator[Path]:
    """Write the samples of an order, each file at once; files of the same order that are there stay.

    Raises:
        ValueError: a task does not fit into a length, a file is missing or broken, or the folder holds other samples.
    """
    made = _exact(order) if order.wording == generator.LM_EVAL else _own(order, say)
    settings = {
        "tokenizer": load_tokenizer(order.tokenizer).identity(), "seed": order.seed, "count": order.count,
        "wording": WORDING if order.wording == "own" else order.wording,
    }  # fmt: skip
    path = directory / MANIFEST
    before = read_object(path)
    if before and {key: before.get(key) for key in settings} != files.plain(settings):
        raise invalid_argument("out", str(directory), "an empty folder: this one holds samples of other settings")
    directory.mkdir(parents=True, exist_ok=True)
    listed: dict[str, Any] = dict(before.get("files", {}))
    for (name, length), (identity, rows) in made.items():
        target = directory / f"{name}_{length}.jsonl"
        known = listed.get(target.name, {})
        intact = target.is_file() and files.sha256(target.read_bytes()) == known.get("sha256")
        if not (intact and known.get("ingredients") == files.plain(identity)):
            data = _lines(rows, partial(show, target.stem), order.count)
            files.replace(target, data)
            listed[target.name] = {"ingredients": identity, "sha256": files.sha256(data)}
            files.replace(path, files.to_json(settings | {"files": dict(sorted(listed.items()))}))
        yield target


#: By task and length: what the samples are made of, and the samples.
_Made = dict[tuple[str, int], tuple[dict[str, Any], Iterator[dict[str, Any]]]]


def _own(order: Order, say: Callable[[str], None]) -> _Made:
    """Generators whose first sample was made already, so that nothing fails for its length later on."""
    tokenizer, ingredients = load_tokenizer(order.tokenizer), Ingredients(order.haystack, order.questions)
    made: _Made = {}
    for name in order.tasks:
        for length in order.lengths:
            generator = Generator(name, length, tokenizer, ingredients, order.seed)
            try:
                generator.sample(0)
            except ValueError as error:
                if order.named:
                    raise
                say(f"{name} at {length:,} is left out: {error}")
                continue
            made[name, length] = ingredients.identity(task(name)), generator.samples(order.count)
    prose = [name for name, _ in made if task(name).settings.get("haystack") == "text"]
    if prose and order.haystack is None:
        say(f"{', '.join(dict.fromkeys(prose))}: no --haystack was given, repeated sentences stand in for prose")
    if not made:
        raise invalid_argument("tasks", order.tasks, "one that can be made")
    return made


def _exact(order: Order) -> _Made:
    return {
        (name, length): ({}, iter(generator.samples(name, length, order.tokenizer, order.count, order.seed)))
        for name in order.tasks
        for length in order.lengths
    }


def _lines(rows: Iterator[dict[str, Any]], show: Callable[[int, int], None], total: int) -> bytes:
    lines = list[str]()
    for row in rows:
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        show(len(lines), total)
    return "".join(lines).encode()


ROWS, HOME = "ruler.jsonl", "ruler"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What models are asked; see the options of `gape ruler eval`."""

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


def measure(models: Sequence[str], asked: Asked, *, say: Say) -> list[Record]:
    """Score every model on all samples; what was scored before is not scored again.

    Returns:
        A row for each model, task and length.

    Raises:
        ValueError: a model that cannot be read, samples that do not fit; before any is scored, as far as that can be
            known.
    """
    if (asked.out is not None or asked.name is not None) and len(models) > 1:
        raise ValueError(f"out and name: got them for {len(models)} models, expected one")
    found: list[Record] = []
    encoded: dict[str, list[Prepared]] = {}
    homes: set[Path] = set()
    for spec in models:
        opened = _open(spec, asked)
        if opened.home in homes:
            raise ValueError(f"models: {spec!r} goes by the name of another; score it by itself, with --name")
        homes.add(opened.home)
        tokenizer = str(opened.known["tokenizer"]["sha256"]) + str(opened.reader.limit)
        if tokenizer not in encoded:
            encoded[tokenizer] = prompts.prepare(
                opened.reader, asked.samples, template=asked.settings.template, overlength=asked.settings.overlength,
                max_length=asked.settings.max_length, generate=asked.settings.generate,
            )  # fmt: skip
        found += _measured(opened, encoded[tokenizer], asked, say)
    return found


def _open(spec: str, asked: Asked) -> _Opened:
    low, chunk = asked.settings.precision == "bfloat16", asked.settings.chunk
    if opening.is_ours(spec):
        reader, step = opening.open_run(spec, asked.tokenizer, device=asked.device, low=low, chunk=chunk)
        run = experiment.stored(Path(spec), "lm")
        told = experiment.identity(run) | {"step": step}
        return _Opened(reader, reader.identity(), _read_so(reader, told, asked), asked.out or Path(spec))
    if Path(spec).is_dir() and not (Path(spec) / "config.json").is_file():
        raise ValueError(f"model: got {spec!r}, expected a run of gape lm train or a folder of transformers")
    other = opening.open_transformers(spec, device=asked.device, low=low, chunk=chunk)
    name = asked.name or other.name
    identity: Record = {
        "run": name, "variant": "", "position": asked.name or _position(other) or name, "seed": 0,
        "train_length": other.limit, "step": 0,
    }  # fmt: skip
    return _Opened(other, other.identity(), _read_so(other, identity, asked), asked.out or RUNS / HOME / name)


def _read_so(reader: GPTReader | TransformersReader, identity: Record, asked: Asked) -> Record:
    """Let a reader read as asked; what names it in rows: another variant than the same model read densely."""
    way = asked.settings.way
    way.apply(reader)
    words = way.words()
    if not words:
        return identity
    variant = " ".join(filter(None, (str(identity.get("variant") or ""), words)))
    return identity | {"run": f"{identity['run']}, {words}", "variant": variant} | way.settings()


def _measured(opened: _Opened, items: Sequence[Prepared], asked: Asked, say: Say) -> list[Record]:
    question = evaluation.question(opened.known, asked.sources, asked.settings)
    question |= {"device": asked.device.type, "samples": [f"{i.sample.source}:{i.sample.number}" for i in items]}
    key, name, path = evaluation.key(question), str(opened.identity["run"]), opened.home / ROWS
    about = opened.identity | {
        "key": key, "model": opened.known["size"], "parameters": opened.known["parameters"],
        "precision": asked.settings.precision, "device": asked.device.type, "template": asked.settings.template,
        "overlength": asked.settings.overlength,
    }  # fmt: skip
    opened.home.mkdir(parents=True, exist_ok=True)
    with locks.locked(opened.home, "measured"), Board(Voice(), "sample") as board:
        rows = evaluation.evaluate(
            opened.reader, items, asked.settings, opened.home / HOME / key, asked=question,
            progress=lambda done, total: board.show(name, done, total),
        )  # fmt: skip
        board.drop(name)
        made = [about | row for row in evaluation.summarise(rows)]
        known = read_rows(path) if path.is_file() else []
        append(path, *(row for row in made if row not in known))
    _tell(name, made, say)
    return [row for row in made if row["samples"]]


def _position(reader: TransformersReader) -> str | None:
    """The scheme of a model with gates of ours; None for others, which do not say it."""
    config = reader.model.config
    # A model that gates were put into says it among its gates, ours as one of its sizes.
    told = getattr(config, "gape", None) or vars(config)
    found = told.get("position") if config.model_type.startswith("gape_") else None
    return found if isinstance(found, str) else None


def _tell(name: str, rows: Sequence[Record], say: Say) -> None:
    for row in rows:
        where = f"{name}: {row['task']} at {row['length']:,}"
        odd = ", ".join(f"{row[what]} {what}" for what in ("skipped", "truncated") if row[what])
        if not row["samples"]:
            say(f"{where}: {odd}")
            continue
        match = f", match {100 * row['match']:.1f}%" if "match" in row else ""
        say(
            f"{where}: NLL {row['nll']:.3f} ({row['nll_low']:.3f} … {row['nll_high']:.3f}){match}, "
            f"{row['samples']} sample{'s' * (row['samples'] != 1)}" + (f", {odd}" if odd else "")
        )
