"""A prepared corpus as it lies on disk: documents by split and stratum, their tokens mapped, nothing read ahead."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from gape.data.config import DTYPES
from gape.data.shards import CARD, FORMAT, INDEX, NAMES, RECORD, SPLITS, Records
from gape.utils.files import file_sha256

Tokens = npt.NDArray[Any]


@dataclass(frozen=True)
class Document:
    """A document: its number in the corpus, its id and title as the input had them.

    `split` is "train" or "heldout", `stratum` the length it stands for, such as "8192", None where the corpus has no
    strata, and `length` its tokens, the end of text among them.
    """

    index: int
    id: str
    split: str
    stratum: str | None
    length: int
    title: str | None


class Documents(Sequence[Document]):
    """Documents in the order of the input, made when they are accessed."""

    def __init__(self, corpus: Corpus, rows: npt.NDArray[np.int64]) -> None:
        self._corpus, self._rows = corpus, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> Document: ...
    @overload
    def __getitem__(self, at: slice) -> Documents: ...
    def __getitem__(self, at: int | slice) -> Document | Documents:
        if isinstance(at, slice):
            return Documents(self._corpus, self._rows[at])
        return self._corpus.document(int(self._rows[at]))


class Corpus:
    """What `gape data prepare` wrote; made by :func:`open_corpus`.

    Attributes:
        directory: of its files.
        card: what it is: sources, tokenizer, counts, split rule, hashes.
        vocab_size: ids are below this.
        end_of_text: the id after each document; None where there is none.
        tokenizer: kind, name, vocab_size, end_of_text, sha256.
        strata: their names, such as ("8192", "16384"); empty where there are none.
    """

    def __init__(self, directory: Path, card: dict[str, Any]) -> None:
        self.directory, self.card = directory, card
        self.tokenizer: dict[str, Any] = card["tokenizer"]
        self.vocab_size: int = self.tokenizer["vocab_size"]
        self.end_of_text: int | None = self.tokenizer["end_of_text"] if card["end_of_text"] else None
        self.strata: tuple[str, ...] = tuple(card["strata"])
        self._dtype = np.dtype(card["dtype"]).newbyteorder("<")
        self._compare([card["index"], card["names"]], _known_sha256)
        self._records: Records = np.asarray(np.memmap(directory / INDEX, RECORD, mode="r"))
        self._check_index()
        with (directory / NAMES).open("rb") as names:
            self._names = mmap.mmap(names.fileno(), 0, access=mmap.ACCESS_READ)
        self._shards: dict[int, Tokens] = {}

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that have documents."""
        return tuple(split for split in SPLITS if self.card["splits"][split]["documents"])

    def documents(self, split: str, stratum: str | int | None = None) -> Documents:
        """The documents of a split, or of one stratum of it, in the order of the input; a ValueError without such."""
        return Documents(self, self.rows(split, stratum))

    def document(self, index: int) -> Document:
        """The document with a number, below that of all documents."""
        record = self.record(index)
        begin = int(record["name"])
        name = json.loads(self._names[begin : self._names.find(b"\n", begin)])
        stratum = self.strata[record["stratum"] - 1] if record["stratum"] else None
        return Document(int(index), name["id"], SPLITS[record["split"]], stratum, int(record["length"]), name["title"])

    def tokens(self, document: Document, start: int = 0, stop: int | None = None) -> Tokens:
        """Tokens start … stop − 1 of a document: uint16 or uint32 (stop − start,), read-only, mapped and not copied."""
        record = self.record(document.index)
        length = int(record["length"])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise ValueError(f"start, stop: got {start} and {stop}, expected places in {length} tokens of a document")
        offset = int(record["offset"])
        return self.shard(int(record["shard"]))[offset + start : offset + stop]

    def fingerprint(self) -> str:
        """A hash of the shards and the index, from the hashes in the card."""
        sums = [shard["sha256"] for shard in self.card["shards"]]
        text = "\n".join([*sums, self.card["index"]["sha256"], self.card["names"]["sha256"]])
        return hashlib.sha256(text.encode()).hexdigest()

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Read everything and compare it with the card, file by file; a ValueError names each that differs."""
        entries, done = _files(self.card), itertools.count()

        def digest(path: Path) -> str:
            progress(next(done), len(entries))
            return file_sha256(path)

        self._compare(entries, digest)

    def rows(self, split: str, stratum: str | int | None = None) -> npt.NDArray[np.int64]:
        """Numbers of the documents of a split and stratum, int64."""
        if split not in self.splits:
            raise ValueError(f"split: got {split!r}, expected one that {self.directory} has: {', '.join(self.splits)}")
        chosen = self._records["split"] == SPLITS.index(split)
        if stratum is not None:
            if str(stratum) not in self.strata:
                there = f"one of {', '.join(self.strata)}" if self.strata else "None, for the corpus has no strata"
                raise ValueError(f"stratum: got {stratum!r}, expected {there}")
            chosen &= self._records["stratum"] == self.strata.index(str(stratum)) + 1
        return np.flatnonzero(chosen).astype(np.int64)

    def record(self, index: int | npt.NDArray[np.int64]) -> Any:
        """The records of documents by number, as `gape.data.shards.RECORD`."""
        if np.min(index, initial=0) < 0 or np.max(index, initial=0) >= len(self._records):
            raise ValueError(f"document: got number {index}, expected 0 to {len(self._records) - 1}")
        return self._records[index]

    def shard(self, number: int) -> Tokens:
        """The tokens of a shard, compared with its hash and mapped when first used."""
        if number not in self._shards:
            entry = self.card["shards"][number]
            self._compare([entry], _known_sha256)
            path = self.directory / entry["file"]
            # A plain view of the map: slicing it costs a fifth of what slicing a memmap does.
            self._shards[number] = np.asarray(np.memmap(path, self._dtype, mode="r"))
        return self._shards[number]

    def _compare(self, entries: list[dict[str, Any]], digest: Callable[[Path], str]) -> None:
        """Refuse files whose hashes are not the card's; names each."""
        broken = [entry["file"] for entry in entries if digest(self.directory / entry["file"]) != entry["sha256"]]
        if broken:
            raise ValueError(f"{self.directory}: changed since it was prepared: {', '.join(broken)}")

    def _check_index(self) -> None:
        """Refuse an index that points anywhere but into the corpus."""
        records = self._records
        sizes = np.array([entry["bytes"] // self._dtype.itemsize for entry in self.card["shards"]], dtype=np.uint64)
        room = sizes[np.minimum(records["shard"], len(sizes) - 1)]
        inside = (records["shard"] < len(sizes)) & (records["split"] < len(SPLITS))
        inside &= (records["stratum"] <= len(self.strata)) & (records["name"] < self.card["names"]["bytes"])
        # Unsigned numbers: a sum of two could pass their end and look small.
        inside &= (records["offset"] <= room) & (records["length"] <= room - np.minimum(records["offset"], room))
        # Earlier versions could cut excerpts.
        inside &= records["excerpt"] == 0
        if not inside.all():
            place = f"{self.directory / INDEX}: document {int(np.argmin(inside))}"
            raise ValueError(f"corpus: {place} is outside the shards; prepare the corpus again")


def open_corpus(directory: str | Path) -> Corpus:
    """Open what `gape data prepare` wrote.

    Raises:
        ValueError: no corpus is there, its preparation was not finished, its card is not one of a corpus, files are
            missing or of another size, or the index changed or points outside the shards.
    """
    directory = Path(directory)
    path = directory / CARD
    if not path.is_file():
        unfinished = (directory / "prepare.json").is_file()
        why = "its preparation was not finished; run the same command again" if unfinished else "there is no card.json"
        raise ValueError(f"corpus: got {str(directory)!r}, expected a directory that gape data prepare wrote: {why}")
    try:
        card = json.loads(path.read_bytes())
        version = card["format"]
        sizes = [(entry["file"], entry["bytes"]) for entry in _files(card)]
        problem = _problem(card)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"corpus: {path} is no card of a corpus: {error!r}") from error
    if version != FORMAT:
        raise ValueError(f"corpus: {directory} is of format {version}, expected {FORMAT}; prepare it again")
    if problem:
        raise ValueError(f"corpus: {path}: {problem}; prepare the corpus again")
    for name, size in sizes:
        file = directory / name
        if not file.is_file() or file.stat().st_size != size:
            has = f"has {file.stat().st_size} bytes" if file.is_file() else "is missing"
            raise ValueError(f"corpus: {file} {has}, expected {size} bytes; prepare the corpus again")
    return Corpus(directory, card)


def _known_sha256(path: Path) -> str:
    """SHA-256 of a file in hex, computed once as long as its size and times stay."""
    facts = path.stat()
    return _computed_once(path.resolve(), facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


@functools.cache
def _computed_once(path: Path, *_: int) -> str:
    return file_sha256(path)


def _problem(card: dict[str, Any]) -> str | None:
    """The first thing in a card that no corpus has, or None."""
    names = [f"tokens-{number:05d}.bin" for number in range(len(card["shards"]))]
    sizes = [entry["bytes"] for entry in _files(card)]
    vocab_size, end = card["tokenizer"]["vocab_size"], card["tokenizer"]["end_of_text"]
    expected = {
        "shards: expected at least one": card["shards"],
        f"dtype: got {card['dtype']!r}, expected {' or '.join(DTYPES)}": card["dtype"] in DTYPES,
        "file: expected the names that gape data prepare gives": [e["file"] for e in _files(card)]
        == [*names, INDEX, NAMES],
        "bytes: expected whole numbers above 0": all(type(size) is int and size > 0 for size in sizes),
        "index: expected whole records": card["index"]["bytes"] % RECORD.itemsize == 0,
        "vocab_size: expected a whole number": type(vocab_size) is int,
        "end_of_text: expected an id or null": end is None or (type(end) is int and 0 <= end < vocab_size),
        "strata: expected a list of names": all(type(name) is str for name in card["strata"]),
        "splits: expected counts of documents": all(type(card["splits"][s]["documents"]) is int for s in SPLITS),
        "sha256: expected hashes": all(type(entry["sha256"]) is str for entry in _files(card)),
    }
    return next((what for what, fine in expected.items() if not fine), None)


def _files(card: dict[str, Any]) -> list[dict[str, Any]]:
    """Name, size and hash of every file but the card's own."""
    return [*card["shards"], card["index"], card["names"]]
