"""Questions about documents: files as SQuAD and HotpotQA write them."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gape.utils.files import sha256


class Question(NamedTuple):
    """question: what is asked; answers: references; gold: numbers of the documents that an answer needs."""

    question: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Questions and the documents they and others are about.

    Attributes:
        name: the file's.
        digest: its SHA-256.
        documents: all of them, each once, sorted.
        items: the questions.
    """

    name: str
    digest: str
    documents: tuple[str, ...]
    items: tuple[Question, ...]


def read_questions(path: Path, kind: str) -> Questions:
    """Questions of a file, also `.gz` and `.xz`.

    Args:
        path: JSON, or JSON lines with context, question and answer (or answers).
        kind: "squad" or "hotpotqa".

    Raises:
        ValueError: the file is not of that format, or has no question with an answer.
    """
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    with openers.get(path.suffix, open)(path, "rb") as file:
        data: bytes = file.read()
    try:
        found = list(_READERS[kind](_parsed(data)))
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{kind}: {path} is no {kind} file, {_FORMATS[kind]}: {type(error).__name__} {error}"
        ) from error
    documents = sorted({document for _, _, gold, others in found for document in (*gold, *others)})
    number = {document: place for place, document in enumerate(documents)}
    items = tuple(
        Question(question, answers, tuple(number[document] for document in dict.fromkeys(gold)))
        for question, answers, gold, _ in found
        if answers
    )
    if not items:
        raise ValueError(f"{kind}: {path} has no question with an answer")
    return Questions(name=path.name, digest=sha256(data), documents=tuple(documents), items=items)


#: question, answers, documents that are needed, other documents.
_Found = tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except json.JSONDecodeError:
        return [json.loads(line) for line in data.splitlines() if line.strip()]


def _squad(value: Any) -> Iterable[_Found]:
    """The tree of SQuAD, or a list of triples; an answer is part of its paragraph."""
    if isinstance(value, list):
        for row in value:
            yield row["question"].strip(), _texts(row), (row["context"].strip(),), ()
        return
    for article in value["data"]:
        for paragraph in article["paragraphs"]:
            context = paragraph["context"].strip()
            for asked in paragraph["qas"]:
                if not asked.get("is_impossible"):
                    yield asked["question"].strip(), _texts(asked), (context,), ()


def _texts(row: Any) -> tuple[str, ...]:
    answers = row["answers"] if "answers" in row else [row["answer"]]
    if isinstance(answers, dict):
        answers = answers["text"]
    texts = (answer["text"] if isinstance(answer, dict) else answer for answer in answers)
    return tuple(dict.fromkeys(text.strip() for text in texts if text.strip()))


def _hotpotqa(value: Any) -> Iterable[_Found]:
    """Paragraphs with titles; those of the supporting facts are needed, or all where a file does not name them."""
    for row in value:
        titled = {title: f"{title}\n{''.join(text).strip()}" for title, text in row["context"]}
        named = [title for title, *_ in row.get("supporting_facts") or [] if title in titled]
        gold = tuple(dict.fromkeys(titled[title] for title in named or titled))
        yield row["question"].strip(), (row["answer"].strip(),), gold, tuple(titled.values())


_READERS: dict[str, Callable[[Any], Iterable[_Found]]] = {"squad": _squad, "hotpotqa": _hotpotqa}
_FORMATS = {
    "squad": "a tree of data, paragraphs and qas, or lines with context, question and answer",
    "hotpotqa": "a list of objects with question, answer and context (pairs of a title and sentences)",
}
