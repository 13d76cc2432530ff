"""From documents to a corpus: read in order, tokenise, seal shard by shard, index at the end.

It may end anywhere: what is sealed stays, and the same call goes on behind it to the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gape.data.config import PrepareConfig, choose_dtype
from gape.data.corpus import Corpus, open_corpus
from gape.data.inputs import EMPTY, Fields, Input, Record, find, probe, records
from gape.data.shards import CARD, FORMAT, LISTED, SPLITS, Counts, Cursor, Entry, Parts, finish
from gape.data.tokenizer import Tokenizer, load_tokenizer
from gape.utils import files
from gape.utils.random import key

SETTINGS = "prepare.json"
#: Letters of text that are tokenised together, by all cores where the tokenizer is of the library `tokenizers`.
BATCH = 2**22
#: Records of a batch at most, and before which a fraction of bad ones is not judged.
MANY_RECORDS = 1000


class Progress(NamedTuple):
    """Progress in bytes of the inputs (total 0 where they have no size), and the documents and tokens stored."""

    position: int
    total: int
    documents: int
    tokens: int


class Job(NamedTuple):
    """What stays the same while a corpus is made."""

    config: PrepareConfig
    tokenizer: Tokenizer
    dtype: str
    sources: list[Input]
    directory: Path

    @property
    def end_of_text(self) -> int | None:
        """The id after each document."""
        return self.tokenizer.end_of_text if self.config.end_of_text else None

    @property
    def fields(self) -> Fields:
        """The names of the fields."""
        return Fields(self.config.text_field, self.config.id_field, self.config.title_field)

    def settings(self) -> dict[str, Any]:
        """Everything the shards follow from."""
        return {
            "format": FORMAT,
            "tokenizer": self.tokenizer.identity(),
            "dtype": self.dtype,
            **self.config.shapes(),
            "end_of_text": self.end_of_text is not None,
            "inputs": [source.identity for source in self.sources],
        }


def prepare(
    config: PrepareConfig,
    directory: str | Path,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
    log: Callable[[str], None] = lambda _: None,
) -> Corpus:
    """Make a corpus, or resume one that was stopped; the same settings and inputs give the same bytes.

    Raises:
        ValueError: before any work: an input, a field or the tokenizer that is not there, a vocabulary too large for
            the dtype, a directory that holds something else. Later: more bad lines than `max_bad`, an input that
            breaks off, no document at all.
        DiskFullError: no room; the sealed shards stay and the same call resumes.
        BusyError: another process prepares the same corpus.
    """
    directory = Path(directory)
    tokenizer = load_tokenizer(config.tokenizer)
    dtype = choose_dtype(config.dtype, tokenizer.vocab_size)
    job = Job(config, tokenizer, dtype, find(config), directory)
    probe(job.sources, job.fields)
    claim(directory, job.settings())
    parts = Parts(directory, config.shard_tokens)
    with files.locked(parts.records, "prepared"):
        files.sweep(directory)
        # Checked under the lock: the process that had it a moment ago may have finished the corpus.
        if (directory / CARD).is_file():
            parts.discard()
            log(f"{directory} is prepared already")
            return open_corpus(directory)
        if config.end_of_text and tokenizer.end_of_text is None:
            log("the tokenizer has no end of text; documents are stored without one")
        try:
            counts = _fill(job, parts, progress, log)
        except ValueError:
            if not parts.shards:
                # Nothing was stored, so the directory is free for other inputs.
                parts.discard()
                (directory / SETTINGS).unlink()
            raise
        finish(job.config, job.settings(), directory, parts, counts)
    return open_corpus(directory)


def claim(directory: Path, settings: dict[str, Any]) -> None:
    """Write the settings into a directory; refuses one with other files, or a corpus of other settings."""
    path = directory / SETTINGS
    if path.is_file():
        before, now = json.loads(path.read_bytes()), files.plain(settings)
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if changed:
            lines = [f"{name} was {before.get(name)} and is now {now.get(name)}" for name in changed]
            raise ValueError(f"out: {directory} holds another corpus: {'; '.join(lines)}"[:1000])
        return
    if files.foreign(directory, SETTINGS):
        raise ValueError(f"out: got {str(directory)!r}, expected a new or empty directory, or one of this corpus")
    directory.mkdir(parents=True, exist_ok=True)
    files.replace(path, files.to_json(settings))


def _fill(job: Job, parts: Parts, progress: Callable[[Progress], None], log: Callable[[str], None]) -> Counts:
    """Read, tokenise and seal until the inputs end, or each has given `max_tokens`."""
    cursor, counts, end = parts.sealed()
    if end:
        return counts
    if parts.shards:
        log(f"going on after {len(parts.shards)} sealed shards, {sum(counts.tokens):,} tokens")
    else:
        counts.documents, counts.tokens = [0] * len(job.sources), [0] * len(job.sources)
    full = {source.group for source in job.sources if _full(job, counts, source.group)}
    total = sum(source.size for source in job.sources)
    for source, batch in _batches(job, cursor, full):
        group = job.sources[source].group
        encoded = iter(job.tokenizer.encode_batch([record.text for record in batch if not record.problem]))
        for record in batch:
            if group in full:
                break
            cursor = Cursor(source, record.number)
            _count(job, counts, source, record)
            if not record.problem and _store(job, parts, counts, source, record, next(encoded)):
                parts.seal(cursor, counts, end=False)
            if _full(job, counts, group):
                full.add(group)
        before = sum(each.size for each in job.sources[:source])
        progress(Progress(before + batch[-1].position, total, sum(counts.documents), sum(counts.tokens)))
    _check_counts(job.config, counts, final=True)
    parts.seal(cursor, counts, end=True)
    return counts


def _full(job: Job, counts: Counts, group: int) -> bool:
    """Whether an input has given `max_tokens`."""
    if job.config.max_tokens is None:
        return False
    taken = (n for source, n in zip(job.sources, counts.tokens, strict=True) if source.group == group)
    return sum(taken) >= job.config.max_tokens


def _batches(job: Job, cursor: Cursor, full: set[int]) -> Iterator[tuple[int, list[Record]]]:
    """The records after the cursor in batches, each with the number of its input; no more of an input in `full`."""
    for number in range(cursor.source, len(job.sources)):
        batch: list[Record] = []
        group, size = job.sources[number].group, 0
        skip = cursor.record if number == cursor.source else 0
        for record in records(job.sources[number], job.fields, skip) if group not in full else ():
            batch.append(record)
            size += len(record.text)
            # Records without a text count too: a file of bad lines must not fill the memory.
            if size >= BATCH or len(batch) >= MANY_RECORDS:
                yield number, batch
                batch, size = [], 0
            if group in full:
                break
        if batch:
            yield number, batch


def _count(job: Job, counts: Counts, source: int, record: Record) -> None:
    """Add a record to the counts, and to the list of bad ones where it is bad."""
    counts.read += 1
    if record.problem:
        counts.empty += record.problem == EMPTY
        counts.bad += record.problem != EMPTY
        if len(counts.bad_records) < LISTED:
            counts.bad_records.append([job.sources[source].name, record.number, record.problem])
        _check_counts(job.config, counts, final=False)


def _check_counts(config: PrepareConfig, counts: Counts, *, final: bool) -> None:
    """Stop where there are more bad records than `max_bad`, or at the end no documents at all."""
    bad, limit = counts.empty + counts.bad, config.max_bad
    if 0 < limit < 1:
        if counts.read < MANY_RECORDS and not final:
            return
        limit *= counts.read
    if final and not sum(counts.documents):
        read = f"{counts.read} read, {counts.empty} empty, {counts.bad} bad, {counts.outside} in no stratum"
        raise ValueError(f"inputs: no documents among the records: {read}")
    if bad > limit:
        first = "; ".join(f"{name}, line {number}: {reason}" for name, number, reason in counts.bad_records[:5])
        share = f"{bad} of {counts.read} records are bad or empty"
        raise ValueError(f"max_bad: {share}, expected at most {config.max_bad}: {first}")


def _store(job: Job, parts: Parts, counts: Counts, source: int, record: Record, ids: list[int]) -> bool:
    """Add a document to the shard, unless it fits no stratum; whether the shard is full."""
    if not job.config.stores(len(ids)):
        counts.outside += 1
        return False
    digest = hashlib.sha256(record.text.encode()).hexdigest()[:32]
    # Without an id of its own a document is split by its text: its line number would depend on the order.
    name = record.id if record.named else digest
    below = key("split", job.config.seed, name) < job.config.heldout_fraction * 2**64
    split = job.sources[source].split or ("heldout" if below else "train")
    end = [] if job.end_of_text is None else [job.end_of_text]
    stored = np.array(ids + end, dtype=np.dtype(job.dtype).newbyteorder("<"))
    counts.documents[source] += 1
    counts.tokens[source] += len(stored)
    return parts.add(Entry(record.id, record.title, SPLITS.index(split), len(ids), digest), stored)
