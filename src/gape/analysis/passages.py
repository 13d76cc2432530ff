"""Passages of a corpus that analyses read: windows of documents, chosen by hashes, the same for every model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gape.data import Corpus, Document, open_corpus
from gape.utils.random import key
from gape.utils.validation import invalid_argument, whole

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Passage:
    """A piece of text: its source, and its tokens, int64 (N,)."""

    id: str
    ids: Ids


class Reader:
    """A source of passages.

    Args:
        data: a directory that `gape data prepare` wrote.
        split, stratum: which of its documents.

    Raises:
        ValueError: no corpus, or one without the split or stratum.
    """

    def __init__(self, data: str | Path, *, split: str = "heldout", stratum: str | None = None) -> None:
        self.corpus: Corpus = open_corpus(data)
        self.name, self.split, self.stratum = Path(data).name, split, stratum
        # Refuses a split or a stratum that is not there.
        self.corpus.documents(split, stratum)

    def passages(self, length: int, count: int, *, seed: int = 0) -> tuple[Passage, ...]:
        """A window of `length` tokens of each of at most `count` documents.

        Raises:
            ValueError: nothing is long enough.
        """
        whole("samples", count)
        items = []
        for document in long_documents(self.corpus, self.split, self.stratum, whole("length", length), seed)[:count]:
            start = number(seed, "start", document.id) % (document.length - length + 1)
            ids = self.corpus.tokens(document, start, start + length).astype(np.int64)
            items.append(Passage(f"{document.id}@{start}", ids))
        return tuple(items)


def long_documents(
    corpus: Corpus, split: str, stratum: str | None, length: int, seed: int = 0, *, called: str = "length"
) -> list[Document]:
    """The documents of at least `length` tokens, in a shuffled order.

    Raises:
        ValueError: there is none; the message names the argument `called`.
    """
    documents = list(corpus.documents(split, stratum))
    enough = {document.id: document for document in documents if document.length >= length}
    if not enough:
        longest = max((document.length for document in documents), default=0)
        which = f"{split} documents" + ("" if stratum is None else f" of stratum {stratum}")
        raise invalid_argument(
            called, length, f"at most {longest} tokens, the longest of the {which} in {corpus.directory}"
        )
    return [enough[name] for name in shuffle(enough, seed)]


def shuffle(items: Iterable[Any], seed: int) -> list[Any]:
    """The items in the order of hashes of their names, which does not depend on the other items."""
    return sorted(items, key=lambda item: number(seed, item))


def number(*parts: Any) -> int:
    """A large whole number that is a function of some names and numbers."""
    return key(*parts, byteorder="big")
