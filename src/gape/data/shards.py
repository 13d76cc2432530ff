"""Shards and the index of a corpus while they are written: sealed shard by shard, so that a preparation can resume."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gape.utils import files
from gape.utils.files import file_sha256

#: Bad lines that are named in the card; the rest are counted.
LISTED = 100


class Entry(NamedTuple):
    """A document of a shard: id, title, split (in `gape.data.shards.SPLITS`), tokens without the end of text, text."""

    id: str
    title: str | None
    split: int
    tokens: int
    sha256: str


class Cursor(NamedTuple):
    """The last record that is done with: the number of its input from 0, its own number from 1."""

    source: int = 0
    record: int = 0


@dataclass
class Tally:
    """What has been read so far.

    Attributes:
        read: records.
        empty, bad: those without a text, those that could not be understood.
        outside: documents that fit no stratum.
        documents, tokens: kept so far, for each file or dataset.
        listed: input, number and reason of the first bad ones.
    """

    read: int = 0
    empty: int = 0
    bad: int = 0
    outside: int = 0
    documents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    listed: list[list[Any]] = field(default_factory=list)


class Sealed(NamedTuple):
    """Where to go on: the last record that is done with, what was read up to there, whether that was all."""

    cursor: Cursor
    tally: Tally
    end: bool


class Parts:
    """The sealed shards of a directory, and the one being filled.

    A shard is closed by the document that makes it reach `shard_tokens`, so where shards end follows from the input
    and the settings alone. What is in memory is one shard; what a death costs is one shard.

    Args:
        directory: of the corpus.
        shard_tokens: tokens at which a shard is closed.

    Attributes:
        records: where the records of sealed shards are until there is an index.
        shards: a line for each sealed shard: file (None for an empty last one), bytes, tokens, sha256.
    """

    def __init__(self, directory: Path, shard_tokens: int) -> None:
        self._directory, self._limit = directory, shard_tokens
        self.records = directory / "parts"
        self.records.mkdir(exist_ok=True)
        self.shards: list[dict[str, Any]] = []
        self._held = 0
        self._data: list[bytes] = []
        self._entries: list[Entry] = []

    def sealed(self) -> Sealed:
        """Check what is there and throw away what a death left after it."""
        self.shards = []
        cursor, tally, end = Cursor(), Tally(), False
        while not end and (part := self._valid(len(self.shards))) is not None:
            self.shards.append(part["shard"])
            cursor, tally, end = Cursor(*part["cursor"]), Tally(**part["tally"]), part["end"]
        for path in [*self.records.glob("*.json"), *self._directory.glob("tokens-*.bin")]:
            if int(path.stem.removeprefix("tokens-")) >= len(self.shards):
                path.unlink()
        return Sealed(cursor, tally, end)

    def add(self, entry: Entry, tokens: npt.NDArray[Any]) -> bool:
        """Put a document into the shard; True when that has filled it, and it wants to be sealed."""
        self._entries.append(entry)
        self._data.append(tokens.tobytes())
        self._held += len(tokens)
        return self._held >= self._limit

    def seal(self, cursor: Cursor, tally: Tally, *, end: bool) -> None:
        """Write the shard, then the record that makes it count.

        Raises:
            DiskFullError: there is no room; what was sealed before stays.
        """
        data, number = b"".join(self._data), len(self.shards)
        name = f"tokens-{number:05d}.bin" if data else None
        if name:
            files.replace(self._directory / name, data)
        digest = hashlib.sha256(data).hexdigest()
        shard = {"file": name, "bytes": len(data), "tokens": self._held, "sha256": digest}
        part = {"shard": shard, "cursor": cursor, "tally": asdict(tally), "end": end, "documents": self._entries}
        files.replace(self.records / f"{number:05d}.json", files.to_json(part, indent=None))
        self.shards.append(shard)
        self._data, self._entries, self._held = [], [], 0

    def entries(self) -> Iterator[tuple[int, list[Entry]]]:
        """The documents of each sealed shard, with its number."""
        for number in range(len(self.shards)):
            part = json.loads((self.records / f"{number:05d}.json").read_bytes())
            yield number, [Entry(*entry) for entry in part["documents"]]

    def discard(self) -> None:
        """Remove the records, which the index has taken the place of."""
        shutil.rmtree(self.records, ignore_errors=True)

    def _valid(self, number: int) -> dict[str, Any] | None:
        """The record of a shard that is whole, or None."""
        try:
            part: dict[str, Any] = json.loads((self.records / f"{number:05d}.json").read_bytes())
            shard = part["shard"]
        except (OSError, ValueError, KeyError):
            return None
        path = self._directory / (shard["file"] or "")
        whole = shard["file"] is None or (path.is_file() and file_sha256(path) == shard["sha256"])
        return part if whole else None


def with_end(tokens: npt.NDArray[Any], end_of_text: int | None) -> npt.NDArray[Any]:
    """The tokens of a document with the end of text after them, where there is one."""
    return tokens if end_of_text is None else np.append(tokens, tokens.dtype.type(end_of_text))


INDEX, NAMES = "index.bin", "names.jsonl"
SPLITS = ("train", "heldout")

#: Where a document lies. split counts in SPLITS; stratum in the card's list from 1 on, 0 is none; offset and length
#: are tokens in the shard; start is where an excerpt begins in its document; name is the place of its line in NAMES.
RECORD = np.dtype(
    [
        ("shard", "<u4"),
        ("split", "u1"),
        ("stratum", "u1"),
        ("excerpt", "u1"),
        ("unused", "u1"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("start", "<u8"),
        ("name", "<u8"),
    ]
)

_PACKED = struct.Struct("<I4B4Q")

Records = npt.NDArray[np.void]


class Piece(NamedTuple):
    """A part of a document that is one entry of the index: a stratum (0: none), a place and a number of tokens."""

    stratum: int
    start: int
    length: int


class Summed:
    """A new file that knows its SHA-256 and its size when it is closed; it gets its name only then."""

    def __init__(self, path: Path) -> None:
        self._path, self._aside = path, path.with_name(f".tmp-{path.name}-{os.getpid()}")
        self._file = files.create(self._aside)
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        """Add bytes."""
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    @property
    def sha256(self) -> str:
        """Of what was written so far, in hex."""
        return self._hash.hexdigest()

    def __enter__(self) -> Summed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if error is None:
            self._aside.replace(self._path)
        else:
            self._aside.unlink(missing_ok=True)


def records(
    *, shard: int, split: int, offset: int, name: int, length: int, pieces: list[Piece], whole: bool
) -> Iterator[bytes]:
    """The records of one document of `length` tokens: itself when `whole`, else each of its pieces."""
    entries = [Piece(pieces[0].stratum if pieces else 0, 0, length)] if whole else pieces
    for stratum, start, tokens in entries:
        yield _PACKED.pack(shard, split, stratum, not whole, 0, offset + start, tokens, start, name)


def name_line(identifier: str, title: str | None) -> bytes:
    """The line of a document in NAMES."""
    return json.dumps({"id": identifier, "title": title}, ensure_ascii=False).encode() + b"\n"


class Names:
    """The lines of NAMES by their places."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as f:
            self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)

    def at(self, place: int) -> tuple[str, str | None]:
        """The id and the title that begin at a place."""
        line: dict[str, Any] = json.loads(self._map[place : self._map.find(b"\n", place)])
        return line["id"], line["title"]
