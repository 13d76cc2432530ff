"""The index of a corpus: a fixed-size record for each document, and a line with its id and title."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gape.utils import files

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
