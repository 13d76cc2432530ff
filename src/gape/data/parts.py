"""Shards as they are made: each is sealed by a record of what went into it and how far the reading was."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gape.data.corpus import file_sha256
from gape.utils import files

#: Bad lines that are named in the card; the rest are counted.
LISTED = 100


class Entry(NamedTuple):
    """A document of a shard: id, title, split (in `gape.data.index.SPLITS`), tokens without the end of text, text."""

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
