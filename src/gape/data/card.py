"""The last step of a preparation: the index, and the card that describes the corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gape.data.config import PrepareConfig
from gape.data.corpus import CARD, FORMAT
from gape.data.shards import INDEX, NAMES, RECORD, SPLITS, Counts, Parts, Records
from gape.utils import files
from gape.utils.files import file_sha256

TEXT = "card.md"
#: Sources that the card for people lists.
ROWS = 50


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
    for source in card["sources"][:ROWS]:
        identity = source.get("sha256") or f"revision {source.get('revision')}"
        lines.append(f"| {source['name']} | {source['split'] or 'by id'} | {source['documents']:,} | {identity} |")
    if len(card["sources"]) > ROWS:
        lines += ["", f"and {len(card['sources']) - ROWS:,} more; card.json has them all."]
    if card["bad"]:
        lines += ["", "The first records left out as empty or bad:", ""]
        lines += [f"- {bad['input']}, line {bad['number']}: {bad['reason']}" for bad in card["bad"]]
    return "\n".join(lines) + "\n"


def _row(split: str, stratum: str, counts: dict[str, Any]) -> str:
    lengths = counts["lengths"] or {"min": "", "median": "", "max": ""}
    cells = [split, stratum, counts["documents"], counts["text_tokens"], *lengths.values()]
    return "| " + " | ".join(f"{c:,.0f}" if isinstance(c, (int, float)) else c for c in cells) + " |"
