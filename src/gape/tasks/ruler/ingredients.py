"""Ingredients of RULER's samples: word lists, haystacks, and questions from files of SQuAD and HotpotQA."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from gape.tasks.ruler.tasks import Task
from gape.utils.files import open_decompressed, sha256

NOISE = "Rain fell on the roof. A door stood open. The clock struck nine. Somebody laughed far away. Then it was quiet."
_END = re.compile(r"[.!?][\"')\]]*$")


class Text:
    """Running text as words, one at least, begun anew where it ends, with the places between its sentences."""

    def __init__(self, text: str, name: str = "noise", digest: str | None = None) -> None:
        self.words = text.split()
        if not self.words:
            raise ValueError(f"haystack: got {name}, which has no words, expected a text")
        self.name, self.digest = name, digest or sha256(text.encode())
        ends = [place for place, word in enumerate(self.words, 1) if _END.search(word)]
        # Without recognisable sentences, any word may end one: all lines would come first otherwise.
        self.ends = ends or list(range(1, len(self.words) + 1))

    def start(self, rng: Random) -> int:
        """A place at which some sentence begins."""
        return rng.choice(self.ends) % len(self.words)

    def passage(self, start: int, count: int) -> list[str]:
        """So many words from a place on."""
        whole, rest = divmod(start + count, len(self.words))
        if not whole:
            return self.words[start:rest]
        return self.words[start:] + self.words * (whole - 1) + self.words[:rest]

    def boundary(self, start: int, place: int) -> int:
        """The last end of a sentence that comes at most `place` words after `start`, as words from there; or 0."""
        turns, at = divmod(start + place, len(self.words))
        index = bisect_right(self.ends, at)
        end = self.ends[index - 1] if index else self.ends[-1] - len(self.words)
        return max(0, turns * len(self.words) + end - start)

    def hide(self, start: int, count: int, lines: Sequence[str], depths: Sequence[float]) -> str:
        """A passage with each line put between sentences, at its depth from 0 to 1 of the passage."""
        words = self.passage(start, count)
        places = [self.boundary(start, round(depth * count)) for depth in depths]
        parts, before = [], 0
        for place, line in sorted(zip(places, lines, strict=True), key=lambda pair: pair[0]):
            parts += [*words[before:place], line]
            before = place
        return " ".join(parts + words[before:])


def _read_bytes(path: Path) -> bytes:
    with open_decompressed(path) as file:
        return file.read()


class Question(NamedTuple):
    """question: its text; answers: references; gold: numbers of the documents that an answer needs."""

    question: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]


class Questions(NamedTuple):
    """Questions, and all documents they and others are about, each once, sorted; of a file of that name and SHA-256."""

    name: str
    digest: str
    documents: tuple[str, ...]
    items: tuple[Question, ...]


#: question, answers, documents that are needed, other documents.
_Entry = tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]


def _squad(value: Any) -> Iterable[_Entry]:
    """The tree of SQuAD, or a list of triples; an answer is part of its paragraph."""
    if isinstance(value, list):
        for row in value:
            yield row["question"].strip(), _texts(row), (row["context"].strip(),), ()
        return
    for article in value["data"]:
        for paragraph in article["paragraphs"]:
            context = paragraph["context"].strip()
            for row in paragraph["qas"]:
                if not row.get("is_impossible"):
                    yield row["question"].strip(), _texts(row), (context,), ()


def _texts(row: Any) -> tuple[str, ...]:
    answers = row["answers"] if "answers" in row else [row["answer"]]
    if isinstance(answers, dict):
        answers = answers["text"]
    texts = (answer["text"] if isinstance(answer, dict) else answer for answer in answers)
    return tuple(dict.fromkeys(text.strip() for text in texts if text.strip()))


def _hotpotqa(value: Any) -> Iterable[_Entry]:
    """Paragraphs with titles; those of the supporting facts are needed, or all where a file does not name them."""
    for row in value:
        titled = {title: f"{title}\n{''.join(text).strip()}" for title, text in row["context"]}
        named = [title for title, *_ in row.get("supporting_facts") or [] if title in titled]
        gold = tuple(dict.fromkeys(titled[title] for title in named or titled))
        yield row["question"].strip(), (row["answer"].strip(),), gold, tuple(titled.values())


#: By kind of file: what reads it, and what it should be.
_FORMATS: dict[str, tuple[Callable[[Any], Iterable[_Entry]], str]] = {
    "squad": (_squad, "a tree of data, paragraphs and qas, or lines with context, question and answer"),
    "hotpotqa": (_hotpotqa, "a list of objects with question, answer and context (pairs of a title and sentences)"),
}


def _read_questions(path: Path, kind: str) -> Questions:
    """Questions of a file of JSON or JSON lines, also `.gz` and `.xz`."""
    read, expected = _FORMATS[kind]
    data = _read_bytes(path)
    try:
        try:
            value = json.loads(data)
        except json.JSONDecodeError:
            value = [json.loads(line) for line in data.splitlines() if line.strip()]
        entries = list(read(value))
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{kind}: {path} is no {kind} file, {expected}: {type(error).__name__} {error}") from error
    documents = sorted({document for _, _, gold, others in entries for document in (*gold, *others)})
    number = {document: place for place, document in enumerate(documents)}
    items = tuple(
        Question(question, answers, tuple(number[document] for document in dict.fromkeys(gold)))
        for question, answers, gold, _ in entries
        if answers
    )
    if not items:
        raise ValueError(f"{kind}: {path} has no question with an answer")
    return Questions(name=path.name, digest=sha256(data), documents=tuple(documents), items=items)


class Names(NamedTuple):
    """Word lists and what identifies them."""

    nouns: Sequence[str]
    adjectives: Sequence[str]
    verbs: Sequence[str]
    digest: str

    def key(self, number: int) -> str:
        """A name of an adjective and a noun; numbers from 0 to `keys` − 1 give different ones."""
        adjective, noun = divmod(number, len(self.nouns))
        return f"{self.adjectives[adjective]}-{self.nouns[noun]}"

    @property
    def keys(self) -> int:
        """How many names there are."""
        return len(self.nouns) * len(self.adjectives)


class Ingredients:
    """The texts, word lists and questions that samples are made of, each read when a task first needs it.

    `text` is a file for the tasks that hide needles in prose, repeated sentences where None; `questions` are files by
    what they are: "squad" and "hotpotqa".
    """

    def __init__(self, text: Path | None = None, questions: Mapping[str, Path] | None = None) -> None:
        self._text, self._files = text, dict(questions or {})
        self._questions: dict[str, Questions] = {}

    @cached_property
    def names(self) -> Names:
        """The word lists of the package `wonderwords`, those RULER uses; read as files, with no private name of it.

        An ImportError says how to install it.
        """
        try:
            folder = resources.files("wonderwords") / "assets"
        except ImportError as error:
            raise ImportError("word lists need the package wonderwords: pip install 'gape[ruler]'") from error
        data = [(folder / f"{kind}list.txt").read_bytes() for kind in ("noun", "adjective", "verb")]
        # A word with spaces in it would not be one entry of a list.
        nouns, adjectives, verbs = (
            sorted({word for line in part.decode().splitlines() if (word := line.strip()).isalpha()}) for part in data
        )
        return Names(nouns, adjectives, verbs, sha256(b"\n".join(data)))

    @cached_property
    def words(self) -> list[str]:
        """All words, each once."""
        return sorted({*self.names.nouns, *self.names.adjectives, *self.names.verbs})

    @cached_property
    def noise(self) -> Text:
        """Repeated sentences."""
        return Text(NOISE)

    @cached_property
    def text(self) -> Text:
        """Prose: that of a text file, also `.gz` and `.xz`, or repeated sentences."""
        if self._text is None:
            return self.noise
        data = _read_bytes(self._text)
        try:
            return Text(data.decode("utf-8"), self._text.name, sha256(data))
        except UnicodeDecodeError as error:
            raise ValueError(f"haystack: {self._text} is no UTF-8 text: {error}") from error

    def questions(self, kind: str) -> Questions:
        """Questions of a kind; a ValueError where no file of them was given, or it is not what it should be."""
        if kind not in self._files:
            raise ValueError(f"{kind}: got no file, expected one of that format for tasks that ask questions")
        if kind not in self._questions:
            self._questions[kind] = _read_questions(self._files[kind], kind)
        return self._questions[kind]

    def identity(self, task: Task) -> dict[str, Any]:
        """Names and hashes of what a task is made of, for a manifest."""
        settings = task.settings
        parts: dict[str, Any] = {}
        if task.family in ("needles", "common"):
            parts["wonderwords"] = self.names.digest
        if task.family in ("needles", "variables"):
            text = self.text if settings.get("haystack") == "text" else self.noise
            parts["haystack"] = {"name": text.name, "sha256": text.digest}
        if task.family == "questions":
            source = self.questions(settings["questions"])
            parts["questions"] = {"name": source.name, "sha256": source.digest, "questions": len(source.items)}
        return parts
