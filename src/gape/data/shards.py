"""Shards, index and card of a corpus while they are written, shard by shard, so that a preparation can resume."""

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

from gape.data.config import PrepareConfig
from gape.utils import files
from gape.utils.files import file_sha256

INDEX, NAMES = "index.bin", "names.jsonl"
#: The card, for programs and for people, and its format.
CARD, TEXT, FORMAT = "card.json", "card.md", 1
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
#: Bad records that the card lists, and sources that the one for people lists.
LISTED, SOURCES = 100, 50


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


def finish(config: PrepareConfig, settings: dict[str, Any], directory: Path, parts: Parts, counts: Counts) -> None:
    """Write index and cards; `card.json` comes last and makes it a corpus."""
    with files.room("the index", directory, 0):
        left_out = _write_index(config, settings["end_of_text"], directory, parts)
    card = _description(config, settings, counts) | {
        "splits": _split_counts(config, directory, settings["end_of_text"]),
        "shards": [shard for shard in parts.shards if shard["file"]],
        "index": _file_entry(directory / INDEX),
        "names": _file_entry(directory / NAMES),
    }
    card["left_out"]["train_documents_also_held_out"] = left_out
    files.replace(directory / TEXT, to_markdown(card).encode())
    files.replace(directory / CARD, files.to_json(card))
    parts.discard()


def _description(config: PrepareConfig, settings: dict[str, Any], counts: Counts) -> dict[str, Any]:
    """What follows from the settings and the records read."""
    sources = zip(settings["inputs"], counts.documents, counts.tokens, strict=True)
    return {
        "format": FORMAT,
        "documents": "whole",
        "tokenizer": settings["tokenizer"],
        "dtype": settings["dtype"],
        "end_of_text": settings["end_of_text"],
        "strata": [str(length) for length in config.strata],
        "split_rule": _split_rule(config),
        "records_read": counts.read,
        "left_out": {"empty": counts.empty, "bad": counts.bad, "outside_strata": counts.outside},
        "bad": [{"input": name, "number": number, "reason": reason} for name, number, reason in counts.bad_records],
        "sources": [{**source, "documents": documents, "tokens": tokens} for source, documents, tokens in sources],
        "settings": settings,
    }


def _write_index(config: PrepareConfig, end_of_text: bool, directory: Path, parts: Parts) -> int:
    """Write the index and the names; returns how many training documents were left out for being held out too."""
    heldout = SPLITS.index("heldout")
    heldout_texts = {entry.sha256 for _, entries in parts.entries() for entry in entries if entry.split == heldout}
    left_out = 0
    with (
        files.replacing(directory / INDEX) as aside, files.replacing(directory / NAMES) as beside,
        files.create(aside) as index, files.create(beside) as names,
    ):  # fmt: skip
        for shard, entries in parts.entries():
            rows, offset = [], 0
            for entry in entries:
                length = entry.tokens + end_of_text
                if entry.split != heldout and entry.sha256 in heldout_texts:
                    left_out += 1
                else:
                    stratum = config.stratum(entry.tokens)
                    rows.append((shard, entry.split, stratum, 0, 0, offset, length, 0, names.tell()))
                    names.write(files.to_json({"id": entry.id, "title": entry.title}, indent=None))
                offset += length
            index.write(np.array(rows, dtype=RECORD).tobytes())
    return left_out


def _split_counts(config: PrepareConfig, directory: Path, end_of_text: bool) -> dict[str, Any]:
    """Documents, tokens and lengths of each split, and of each of its strata. Lengths do not count the end of text."""
    index: Records = np.asarray(np.memmap(directory / INDEX, RECORD, mode="r"))
    counts = {}
    for number, split in enumerate(SPLITS):
        here = index[index["split"] == number]
        strata = {str(length): here[here["stratum"] == at] for at, length in enumerate(config.strata, start=1)}
        each = {name: _statistics(chosen, end_of_text) for name, chosen in strata.items()}
        counts[split] = _statistics(here, end_of_text) | {"strata": each}
    return counts


def _statistics(chosen: Records, end_of_text: bool) -> dict[str, Any]:
    tokens = chosen["length"].astype(np.int64)
    text = tokens - int(end_of_text)
    lengths = None
    if len(text):
        lengths = {"min": int(text.min()), "median": float(np.median(text)), "max": int(text.max())}
    return {"documents": len(chosen), "tokens": int(tokens.sum()), "text_tokens": int(text.sum()), "lengths": lengths}


def _split_rule(config: PrepareConfig) -> str:
    rules = ["held out is what came from the held-out inputs"] if config.heldout else []
    if config.heldout_fraction:
        rules.append(
            f"a document is held out where a hash of its id (seed {config.seed}) is below the fraction "
            f"{config.heldout_fraction:g}, wherever it stands in the input"
        )
    if not rules:
        return "everything is for training"
    return "; ".join([*rules, "a training document whose text is also held out is left out"])


def _file_entry(path: Path) -> dict[str, Any]:
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": file_sha256(path)}


def to_markdown(card: dict[str, Any]) -> str:
    """The card for people."""
    tokenizer, left = card["tokenizer"], card["left_out"]
    strata = f"; a stratum L ({', '.join(card['strata'])}) has those from L up to 2 L tokens" if card["strata"] else ""
    lines = [
        "# Corpus",
        "",
        f"Token shards by `gape data prepare`. Its entries are whole documents{strata}.",
        "",
        f"- tokenizer: {tokenizer['name']} ({tokenizer['kind']}), {tokenizer['vocab_size']:,} ids, stored as "
        f"{card['dtype']}; SHA-256 {tokenizer['sha256']}",
        f"- end of text: {'after each document' if card['end_of_text'] else 'none'}",
        f"- split: {card['split_rule']}",
        f"- read: {card['records_read']:,} records; left out: {left['empty']:,} empty, {left['bad']:,} bad, "
        f"{left['outside_strata']:,} in no stratum, {left['train_documents_also_held_out']:,} in both splits",
        "",
        "| split | stratum | documents | tokens of text | shortest | median | longest |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for split, counts in card["splits"].items():
        rows = {"all": counts} if not card["strata"] else counts["strata"]
        lines += [_row(split, name, count) for name, count in rows.items()]
    lines += ["", "| source | split | documents | identity |", "|---|---|---:|---|"]
    for source in card["sources"][:SOURCES]:
        identity = source.get("sha256") or f"revision {source.get('revision')}"
        lines.append(f"| {source['name']} | {source['split'] or 'by id'} | {source['documents']:,} | {identity} |")
    if len(card["sources"]) > SOURCES:
        lines += ["", f"and {len(card['sources']) - SOURCES:,} more; card.json has them all."]
    if card["bad"]:
        lines += ["", "The first records left out as empty or bad:", ""]
        lines += [f"- {bad['input']}, line {bad['number']}: {bad['reason']}" for bad in card["bad"]]
    return "\n".join(lines) + "\n"


def _row(split: str, stratum: str, counts: dict[str, Any]) -> str:
    lengths = counts["lengths"] or {"min": "", "median": "", "max": ""}
    cells = [split, stratum, counts["documents"], counts["text_tokens"], *lengths.values()]
    return "| " + " | ".join(f"{c:,.0f}" if isinstance(c, (int, float)) else c for c in cells) + " |"
