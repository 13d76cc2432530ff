"""Samples to files: checked before anything is written, a file of a task and length at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gape.data import load_tokenizer
from gape.tasks.ruler import exact
from gape.tasks.ruler.generator import WORDING, Generator
from gape.tasks.ruler.ingredients import Ingredients
from gape.tasks.ruler.tasks import task
from gape.utils import files
from gape.utils.jsonl import read_object
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
        if self.wording not in ("own", exact.WORDING):
            raise invalid_argument("wording", self.wording, f"own or {exact.WORDING}")


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
    made = _exact(order) if order.wording == exact.WORDING else _own(order, say)
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
        (name, length): ({}, iter(exact.samples(name, length, order.tokenizer, order.count, order.seed)))
        for name in order.tasks
        for length in order.lengths
    }


def _lines(rows: Iterator[dict[str, Any]], show: Callable[[int, int], None], total: int) -> bytes:
    lines = list[str]()
    for row in rows:
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        show(len(lines), total)
    return "".join(lines).encode()
