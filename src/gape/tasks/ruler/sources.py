"""Samples from files of RULER and related benchmarks."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gape.tasks.ruler.tasks import CALLED, task
from gape.utils.files import open_decompressed

#: Names of fields in public files, in the order tried.
_PROMPTS, _OUTPUTS = ("input", "prompt", "context"), ("outputs", "output", "answers", "answer")
_PREFIXES = ("answer_prefix", "gen_prefix", "answer_start")
_LENGTHS, _BUDGETS = ("max_seq_length", "max_length"), ("budget", "max_new_tokens", "tokens_to_generate")
#: Sizes in names such as cwe_4k and 4096_cwe; smaller numbers are something else.
_SIZE, _SMALLEST = re.compile(r"(?<![a-z0-9])(\d+)(k?)(?![a-z0-9])"), 256


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt and its answers.

    Attributes:
        task, length: one of RULER's, and the nominal length that names its column, such as 4096.
        input, prefix: what is read, and how the answer begins; empty where there is none.
        outputs, budget: references, and tokens that the answer may have.
        source, number: name of the file, and the place there, from 1.
    """

    task: str
    length: int
    input: str
    prefix: str
    outputs: tuple[str, ...]
    budget: int
    source: str
    number: int

    @property
    def answer(self) -> str:
        """The references as the one text whose likelihood is measured."""
        return task(self.task).join(self.outputs)


class Source(NamedTuple):
    """Where samples came from: its name, a hash of its content, and how many."""

    name: str
    sha256: str
    samples: int


def read(specs: Iterable[str]) -> tuple[list[Sample], list[Source]]:
    """All samples of some files of JSON lines, also `.gz` and `.xz`, and folders of them.

    Refused are lines that are no samples, with their place, paths with nothing there, and two sources of one name.
    """
    samples: list[Sample] = []
    sources: list[Source] = []
    for path in map(Path, specs):
        files = sorted(path.rglob("*.jsonl*")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise ValueError(f"data: got {str(path)!r}, expected a file of JSON lines, or a folder of them")
        for file in files:
            loaded, source = _file(file, file.relative_to(path).as_posix() if path.is_dir() else file.name)
            if source.name in (other.name for other in sources):
                raise ValueError(f"data: two sources are called {source.name}; give them other names")
            samples += loaded
            sources.append(source)
    return samples, sources


def _file(path: Path, name: str) -> tuple[list[Sample], Source]:
    digest = hashlib.sha256()
    samples = []
    # RULER writes niah_single_1/validation.jsonl, others niah_single_1.jsonl.
    named = [path.name.partition(".")[0], path.resolve().parent.name]
    with open_decompressed(path) as file:
        for number, line in enumerate(file, 1):
            digest.update(line)
            if not line.strip():
                continue
            place = f"{path}: line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place} is not JSON: {error}") from error
            samples.append(sample(record, place=place, source=name, number=number, named=named))
    if not samples:
        raise ValueError(f"data: {path} has no samples")
    return samples, Source(name, digest.hexdigest(), len(samples))


def sample(record: Any, *, place: str, source: str, number: int, named: Sequence[str] = ()) -> Sample:
    """A sample from a record of RULER's fields or those of its relatives: text, answers, task, length, budget.

    `place` is file and line, for errors, which say what is missing or of another type; `named` has names of files and
    folders that may say the task and the length.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{place} is not a JSON object")
    name, nominal = _task_and_length(record, named, place)
    outputs = _outputs(record, place)
    budget = _first(record, _BUDGETS, int)
    prefix = _first(record, _PREFIXES, str) or ""
    text = _prompt(record, place)
    if prefix and not prefix[0].isspace() and not text[-1].isspace():
        # Files of other harnesses have it stripped.
        prefix = f" {prefix}"
    try:
        "".join((text, prefix, *outputs)).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place} has half a character, which no tokenizer takes: {error}") from error
    return Sample(
        task=name, length=nominal, input=text, prefix=prefix, outputs=outputs, source=source, number=number,
        budget=budget or task(name).budget,
    )  # fmt: skip


def _first(record: Mapping[str, Any], fields: Iterable[str], kind: type[Any]) -> Any:
    """The value of the first field of that type, None where there is none."""
    return next((record[field] for field in fields if isinstance(record.get(field), kind)), None)


def _prompt(record: Mapping[str, Any], place: str) -> str:
    text, question = _first(record, _PROMPTS, str), record.get("question")
    if text is None or not text.strip():
        raise ValueError(f"{place} has no text in {', '.join(_PROMPTS[:-1])} or {_PROMPTS[-1]}")
    if isinstance(question, str) and question.strip() and question.strip() not in text:
        text += ("" if text[-1].isspace() else "\n") + question
    return str(text)


def _outputs(record: Mapping[str, Any], place: str) -> tuple[str, ...]:
    field = next((key for key in _OUTPUTS if record.get(key) is not None), None)
    if field is None:
        raise ValueError(f"{place} has none of the fields {', '.join(_OUTPUTS)}")
    value = record[field]
    outputs = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else ()
    if not outputs or not all(isinstance(output, str) and output.strip() for output in outputs):
        raise ValueError(f"{place} has {field} {value!r}, expected one or more texts that are not empty")
    return outputs


def _task_and_length(record: Mapping[str, Any], named: Sequence[str], place: str) -> tuple[str, int]:
    """The task and the nominal length of a record."""
    own = record.get("task")
    if own is not None and (not isinstance(own, str) or _parse(own) is None):
        raise ValueError(f"{place} is of task {own!r}, which is none of RULER's")
    names = named if own is None else (own, *named)
    parsed = [pair for name in names if (pair := _parse(name)) is not None]
    if not parsed:
        raise ValueError(f"{place} names no task, and neither does its file; call it TASK_LENGTH.jsonl")
    nominal = _first(record, _LENGTHS, int) or next((size for _, size in parsed if size), None)
    if nominal is None and isinstance(record.get("length"), int):
        # Samples stop short of the length they were made for, which is a power of two.
        nominal = 2 ** (max(record["length"], 1) - 1).bit_length()
    if nominal is None:
        raise ValueError(f"{place} says no length, and neither does its file; call it TASK_LENGTH.jsonl")
    return parsed[0][0], nominal


def _parse(name: str) -> tuple[str, int | None] | None:
    """Task and length of a name such as cwe_4k, 4096_cwe or vt; None where no task is in it."""
    # An underscore is a separator here, and part of a name there.
    text = name.lower().replace("-", "_")
    called = max((c for c in CALLED if f"_{c}_" in f"_{text}_"), key=len, default=None)
    if called is None:
        return None
    rest = f"_{text}_".replace(f"_{called}_", " ", 1).replace("_", " ")
    sizes = [int(number) * (1024 if kilo else 1) for number, kilo in _SIZE.findall(rest)]
    return task(called).name, next((size for size in sizes if size >= _SMALLEST), None)
