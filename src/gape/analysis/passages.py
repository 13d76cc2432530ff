"""Passages of text that analyses read, as tokens: from documents of a corpus, a text file, or prompts in JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gape.data import Corpus, Document, load_tokenizer, open_corpus
from gape.utils.files import file_sha256, open_decompressed
from gape.utils.random import key
from gape.utils.validation import invalid_argument, whole

Ids = npt.NDArray[np.int64]

#: Fields that hold a prompt, in the order tried.
PROMPT_FIELDS = ("input", "prompt", "text")


@dataclass(frozen=True)
class Passage:
    """A piece of text: its source, and its tokens, int64 (N,)."""

    id: str
    ids: Ids


@dataclass(frozen=True, kw_only=True)
class Passages:
    """Passages of a source, with its name and a hash of it; all of so many tokens, or None where they differ."""

    data: str
    fingerprint: str
    length: int | None
    items: tuple[Passage, ...]


class Reader:
    """A source of passages: documents of a corpus, or a file.

    Args:
        data: a directory that `gape data prepare` wrote, a file of JSON lines (`.jsonl`, also `.gz` and `.xz`) whose
            objects have a field input, prompt or text (an answer_prefix is put after it), or any other file as text.
        tokenizer: as `gape.data.load_tokenizer` takes it; needed for files, not for a corpus.
        split, stratum: which documents of a corpus.

    Raises:
        ValueError: no such path, a file without a tokenizer, or a corpus without the split or stratum.
    """

    def __init__(
        self, data: str | Path, *, tokenizer: str | None = None, split: str = "heldout", stratum: str | None = None
    ) -> None:
        self.path, self.split, self.stratum = Path(data), split, stratum
        self.corpus: Corpus | None = None
        if self.path.is_dir():
            self.corpus = open_corpus(self.path)
            self.tokenizer = self.corpus.tokenizer
            # Refuses a split or a stratum that is not there.
            self.corpus.documents(split, stratum)
            return
        if not self.path.is_file():
            raise ValueError(f"data: got {str(data)!r}, expected a corpus, a text file or a file of JSON lines")
        if tokenizer is None:
            expected = f"the one that is to read {self.path}, such as bytes or a folder"
            raise ValueError(f"tokenizer: got nothing, expected {expected}")
        loaded = load_tokenizer(tokenizer)
        self.tokenizer, self._encode = loaded.identity(), loaded.encode

    @property
    def prompts(self) -> bool:
        """Whether the passages are prompts, which are read whole."""
        return self.corpus is None and ".jsonl" in self.path.suffixes[-2:]

    def passages(self, length: int | None, count: int, *, seed: int = 0) -> Passages:
        """At most so many passages, chosen by a hash of the seed and their names; refused where nothing is long enough.

        `length` is the tokens of each: a window of a document, consecutive ones of a text; None for prompts.
        """
        whole("samples", count)
        if self.prompts and length is not None:
            raise invalid_argument("length", length, "none for prompts, which are read whole")
        if self.corpus is not None:
            items = _windows(self.corpus, self.split, self.stratum, length, count, seed)
        elif self.prompts:
            items = self._prompts(count, seed)
        else:
            items = self._text(length, count)
        fingerprint = file_sha256(self.path) if self.corpus is None else self.corpus.fingerprint()
        return Passages(data=self.path.name, fingerprint=fingerprint, length=length, items=tuple(items))

    def _text(self, length: int | None, count: int) -> list[Passage]:
        with open_decompressed(self.path) as file:
            ids = np.array(self._encode(file.read().decode("utf-8")), dtype=np.int64)
        span = len(ids) if length is None else whole("length", length)
        if span < 1 or len(ids) < span:
            raise invalid_argument("length", length, f"at most the {len(ids)} tokens of {self.path}")
        return [
            Passage(f"{self.path.name}:{start}-{start + span}", ids[start : start + span])
            for start in range(0, len(ids) - span + 1, span)
        ][:count]

    def _prompts(self, count: int, seed: int) -> list[Passage]:
        rows = {number: text for number, text in enumerate(_rows(self.path), 1) if text}
        if not rows:
            raise ValueError(f"data: got {self.path}, expected prompts that are not empty")
        return [
            Passage(f"{self.path.name}:{number}", np.array(self._encode(rows[number]), dtype=np.int64))
            for number in shuffle(rows, seed)[:count]
        ]


def long_documents(
    corpus: Corpus, split: str, stratum: str | None, length: int, seed: int = 0, *, called: str = "length"
) -> list[Document]:
    """The documents of at least `length` tokens, shuffled; without any a ValueError names the argument `called`."""
    documents = list(corpus.documents(split, stratum))
    enough = [document for document in documents if document.length >= length]
    if not enough:
        longest = max((document.length for document in documents), default=0)
        which = f"{split} documents" + ("" if stratum is None else f" of stratum {stratum}")
        expected = f"at most {longest} tokens, the longest of the {which} in {corpus.directory}"
        raise invalid_argument(called, length, expected)
    by_id = {document.id: document for document in enough}
    return [by_id[name] for name in shuffle(by_id, seed)]


def shuffle(items: Iterable[Any], seed: int) -> list[Any]:
    """The items in the order of hashes of their names, which does not depend on the other items."""
    return sorted(items, key=lambda item: number(seed, item))


def number(*parts: Any) -> int:
    """A large whole number that is a function of some names and numbers."""
    return key(*parts, byteorder="big")


def _windows(
    corpus: Corpus, split: str, stratum: str | None, length: int | None, count: int, seed: int
) -> list[Passage]:
    passages = []
    least = 1 if length is None else whole("length", length)
    for document in long_documents(corpus, split, stratum, least, seed)[:count]:
        span = document.length if length is None else length
        start = number(seed, "start", document.id) % (document.length - span + 1)
        ids = corpus.tokens(document, start, start + span).astype(np.int64)
        passages.append(Passage(f"{document.id}@{start}", ids))
    return passages


def _rows(path: Path) -> Iterable[str]:
    """The prompts of a file, answer prefix included."""
    with open_decompressed(path) as file:
        for place, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}: line {place} is not JSON: {error}") from error
            prompts = [row[name] for name in PROMPT_FIELDS if isinstance(row, dict) and isinstance(row.get(name), str)]
            if not prompts:
                raise ValueError(f"{path}: line {place} has none of the fields {', '.join(PROMPT_FIELDS)}")
            yield prompts[0] + str(row.get("answer_prefix") or "")
