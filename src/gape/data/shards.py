"""Shards and the index of a corpus while they are written: sealed shard by shard, so that a preparation can resume."""

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

from gape.utils import files
from gape.utils.files import file_sha256

INDEX, NAMES = "index.bin", "names.jsonl"
SPLITS = ("train", "heldout")
#: A document of the index. split counts in SPLITS; stratum in the card's list from 1 on, 0 is none; offset and length
#: are tokens in the shard; excerpt, unused and start are 0; name is the offset of its line in NAMES.
RECORD = np.dtype(
    [
        ("shard", "<u4"), ("split", "u1"), ("stratum", "u1"), ("excerpt", "u1"), ("unused", "u1"),
        ("offset", "<u8"), ("length", "<u8"), ("start", "<u8"), ("name", "<u8"),
    ]
)  # fmt: skip
Records = npt.NDArray[np.void]
#: Bad records that the card lists; the others are only counted.
LISTED = 100


class Entry(NamedTuple):
    """A document of a shard: id, title, index in SPLITS, tokens without the end of text, and a hash of its text."""

    id: str
    title: str | None
    split: int
    tokens: int
    sha256: str


class Cursor(NamedTuple):
    """The last record that was processed: the number of its input from 0, its own number from 1."""

    source: int = 0
    record: int = 0


@dataclass
class Counts:
    """What was read so far: records, those empty, bad or in no stratum, and what is stored of each input."""

    read: int = 0
    empty: int = 0
    bad: int = 0
    outside: int = 0
    documents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    bad_records: list[list[Any]] = field(default_factory=list)


class Parts:
    """The sealed shards of a directory, and the one being filled.

    A shard is closed by the document that makes it reach `shard_tokens`; it is in memory until then. `records` is the
    folder with a record of each sealed shard until there is an index, `shards` has an entry for each: file (None for an
    empty last one), bytes, tokens, sha256.
    """

    def __init__(self, directory: Path, shard_tokens: int) -> None:
        self._directory, self._limit = directory, shard_tokens
        self.records = directory / "parts"
        self.records.mkdir(exist_ok=True)
        self.shards: list[dict[str, Any]] = []
        self._tokens = 0
        self._data: list[bytes] = []
        self._entries: list[Entry] = []

    def sealed(self) -> tuple[Cursor, Counts, bool]:
        """The last record of the sealed shards, the counts up to there, and whether that was all.

        Shards are checked; what a killed process left behind them is deleted.
        """
        cursor, counts, end = Cursor(), Counts(), False
        while not end and (part := self._valid(len(self.shards))) is not None:
            self.shards.append(part["shard"])
            cursor, counts, end = Cursor(*part["cursor"]), Counts(**part["counts"]), part["end"]
        for path in [*self.records.glob("*.json"), *self._directory.glob("tokens-*.bin")]:
            if int(path.stem.removeprefix("tokens-")) >= len(self.shards):
                path.unlink()
        return cursor, counts, end

    def add(self, entry: Entry, tokens: npt.NDArray[Any]) -> bool:
        """Put a document into the shard; True when it is full and must be sealed."""
        self._entries.append(entry)
        self._data.append(tokens.tobytes())
        self._tokens += len(tokens)
        return self._tokens >= self._limit

    def seal(self, cursor: Cursor, counts: Counts, *, end: bool) -> None:
        """Write the shard, then the record that makes it count; what was sealed before stays if the disk is full."""
        data, number = b"".join(self._data), len(self.shards)
        name = f"tokens-{number:05d}.bin" if data else None
        if name:
            files.replace(self._directory / name, data)
        digest = hashlib.sha256(data).hexdigest()
        shard = {"file": name, "bytes": len(data), "tokens": self._tokens, "sha256": digest}
        part = {"shard": shard, "cursor": cursor, "counts": asdict(counts), "end": end, "documents": self._entries}
        files.replace(self.records / f"{number:05d}.json", files.to_json(part, indent=None))
        self.shards.append(shard)
        self._data, self._entries, self._tokens = [], [], 0

    def entries(self) -> Iterator[tuple[int, list[Entry]]]:
        """The documents of each sealed shard, with its number."""
        for number in range(len(self.shards)):
            yield number, [Entry(*entry) for entry in self._part(number)["documents"]]

    def discard(self) -> None:
        """Remove the records, which the index replaces."""
        shutil.rmtree(self.records, ignore_errors=True)

    def _part(self, number: int) -> dict[str, Any]:
        part: dict[str, Any] = json.loads((self.records / f"{number:05d}.json").read_bytes())
        return part

    def _valid(self, number: int) -> dict[str, Any] | None:
        """The record of a shard that is complete, or None."""
        try:
            part = self._part(number)
            shard, _ = part["shard"], part["counts"]
        except (OSError, ValueError, KeyError):
            return None
        path = self._directory / (shard["file"] or "")
        complete = shard["file"] is None or (path.is_file() and file_sha256(path) == shard["sha256"])
        return part if complete else None
