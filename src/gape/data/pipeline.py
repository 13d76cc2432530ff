"""From documents to a corpus: read in order, tokenise in parallel, seal shard by shard, index at the end."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from gape.data import card
from gape.data.config import PrepareConfig, choose_dtype
from gape.data.corpus import CARD, FORMAT, Corpus, open_corpus
from gape.data.inputs import find, probe, records
from gape.data.readers import EMPTY, Fields, Input, Record
from gape.data.shards import LISTED, SPLITS, Counts, Cursor, Entry, Parts, with_end
from gape.data.tokenizer import Tokenizer, load_tokenizer
from gape.data.worker import Encoded, Pool
from gape.utils import files, locks
from gape.utils.random import key
from gape.utils.signals import StopFlag
from gape.utils.validation import invalid_argument, whole

SETTINGS = "prepare.json"
#: Bytes of text after which a request is sent; a longer document is sent alone.
REQUEST = 2**18
#: Requests under way for each process: one it works on, one that waits for it.
AHEAD = 2
#: Processes for each core at most.
MAX_PER_CORE = 8
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
        inputs = [source.identity for source in self.sources]
        return {
            "format": FORMAT,
            "tokenizer": self.tokenizer.identity(),
            "dtype": self.dtype,
            **self.config.shapes(),
            "end_of_text": self.end_of_text is not None,
            "inputs": inputs,
        }


class Batch(NamedTuple):
    """Records of one input that are tokenised together, those with a problem among them."""

    source: int
    records: list[Record]
    hashes: list[str]
    encoded: Future[Encoded]


def prepare(
    config: PrepareConfig,
    directory: str | Path,
    *,
    workers: int | None = None,
    stop: StopFlag | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    log: Callable[[str], None] = lambda _: None,
) -> Corpus:
    """Make a corpus, or resume one that was stopped; the same settings and inputs give the same bytes.

    Args:
        config: the settings.
        directory: of the corpus; made when missing.
        workers: processes that tokenise, up to 8 for each core; None means one for each core, 0 tokenises in this
            process.
        stop: polled between documents.
        progress: called now and then.
        log: called with messages.

    Raises:
        ValueError: before any work: an input, a field or the tokenizer that is not there, a vocabulary too large for
            the dtype, a directory that holds something else. Later: more bad lines than `max_bad`, an input that
            breaks off, no document at all.
        Interrupted: after a signal; the sealed shards stay and the same call resumes.
        DiskFullError: no room; likewise.
        BusyError: another process prepares the same corpus.
    """
    stop = stop or StopFlag()
    directory = Path(directory)
    workers = _cores() if workers is None else whole("workers", workers, 0)
    if workers > MAX_PER_CORE * _cores():
        raise invalid_argument("workers", workers, f"at most {MAX_PER_CORE * _cores()}, {MAX_PER_CORE} for each core")
    with stop:
        tokenizer = load_tokenizer(config.tokenizer)
        dtype = choose_dtype(config.dtype, tokenizer.vocab_size)
        job = Job(config, tokenizer, dtype, find(config, stop.check), directory)
        probe(job.sources, job.fields, stop.check)
        claim(directory, job.settings())
        parts = Parts(directory, config.shard_tokens)
        with locks.locked(parts.records, "prepared"):
            files.sweep(directory)
            # Checked under the lock: the process that had it a moment ago may have finished the corpus.
            if (directory / CARD).is_file():
                parts.discard()
                log(f"{directory} is prepared already")
                return open_corpus(directory)
            if config.end_of_text and tokenizer.end_of_text is None:
                log("the tokenizer has no end of text; documents are stored without one")
            try:
                counts = _fill(job, parts, workers, stop, progress, log)
            except ValueError:
                if not parts.shards:
                    # Nothing was stored, so the directory is free for other inputs.
                    parts.discard()
                    (directory / SETTINGS).unlink()
                raise
            card.finish(job.config, job.settings(), directory, parts, counts)
    return open_corpus(directory)


def _cores() -> int:
    """Cores this process may use; not every system says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def claim(directory: Path, settings: dict[str, Any]) -> None:
    """Write the settings into a directory, or check that they are those of the corpus in it.

    Raises:
        ValueError: it holds a corpus of other settings, or other files.
    """
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


def _fill(
    job: Job,
    parts: Parts,
    workers: int,
    stop: StopFlag,
    progress: Callable[[Progress], None],
    log: Callable[[str], None],
) -> Counts:
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
    with Pool(job.tokenizer, job.config.tokenizer, job.dtype, workers) as pool:
        for batch in _in_order(_batches(job, cursor, pool, full, stop.check), max(1, workers * AHEAD)):
            group = job.sources[batch.source].group
            documents = iter(zip(batch.hashes, batch.encoded.result(), strict=True))
            for record in batch.records:
                stop.check()
                if group in full:
                    break
                cursor = Cursor(batch.source, record.number)
                _count(job, counts, batch.source, record)
                if not record.problem and _store(job, parts, counts, batch.source, record, *next(documents)):
                    parts.seal(cursor, counts, end=False)
                if _full(job, counts, group):
                    full.add(group)
            before = sum(source.size for source in job.sources[: batch.source])
            progress(Progress(before + batch.records[-1].position, total, sum(counts.documents), sum(counts.tokens)))
    _check_counts(job.config, counts, final=True)
    parts.seal(cursor, counts, end=True)
    return counts


def _full(job: Job, counts: Counts, group: int) -> bool:
    """Whether an input has given `max_tokens`."""
    if job.config.max_tokens is None:
        return False
    taken = (n for source, n in zip(job.sources, counts.tokens, strict=True) if source.group == group)
    return sum(taken) >= job.config.max_tokens


def _batches(job: Job, cursor: Cursor, pool: Pool, full: set[int], tick: Callable[[], None]) -> Iterator[Batch]:
    """The records after the cursor in requests to the pool, none of which spans two inputs.

    No more is read of an input that is in `full`; its pending batches are discarded.
    """
    for number in range(cursor.source, len(job.sources)):
        batch: list[Record] = []
        texts: list[bytes] = []
        group, size = job.sources[number].group, 0
        skip = cursor.record if number == cursor.source else 0
        for record in records(job.sources[number], job.fields, skip, tick) if group not in full else ():
            if group in full:
                break
            batch.append(record._replace(text=""))
            if not record.problem:
                texts.append(record.text.encode())
                size += len(texts[-1])
            # Records without a text count too: a file of bad lines must not fill the memory.
            if size >= REQUEST or len(batch) >= MANY_RECORDS:
                yield _request(number, batch, texts, pool)
                batch, texts, size = [], [], 0
        if batch:
            yield _request(number, batch, texts, pool)


def _request(source: int, batch: list[Record], texts: list[bytes], pool: Pool) -> Batch:
    return Batch(source, batch, [hashlib.sha256(text).hexdigest()[:32] for text in texts], pool.submit(texts))


def _in_order(batches: Iterator[Batch], ahead: int) -> Iterator[Batch]:
    """The batches in order, while up to `ahead` more of them are being tokenised."""
    waiting: deque[Batch] = deque()
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting


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
    """Stop where there are more bad records than `max_bad`, or at the end no documents at all.

    Raises:
        ValueError: names the first bad ones.
    """
    bad, limit = counts.empty + counts.bad, config.max_bad
    if 0 < limit < 1:
        if counts.read < MANY_RECORDS and not final:
            return
        limit = limit * counts.read
    if final and not sum(counts.documents):
        read = f"{counts.read} read, {counts.empty} empty, {counts.bad} bad, {counts.outside} in no stratum"
        raise ValueError(f"inputs: no documents among the records: {read}")
    if bad > limit:
        first = "; ".join(f"{name}, line {number}: {reason}" for name, number, reason in counts.bad_records[:5])
        raise ValueError(
            f"max_bad: {bad} of {counts.read} records are bad or empty, expected at most {config.max_bad}: {first}"
        )


def _store(job: Job, parts: Parts, counts: Counts, source: int, record: Record, digest: str, tokens: Any) -> bool:
    """Add a document to the shard, unless it fits no stratum; whether the shard is full."""
    if not job.config.stores(len(tokens)):
        counts.outside += 1
        return False
    # Without an id of its own a document is split by its text: its line number would depend on the order.
    split = job.sources[source].split or split_of(record.id if record.named else digest, job.config)
    stored = with_end(tokens, job.end_of_text)
    counts.documents[source] += 1
    counts.tokens[source] += len(stored)
    return parts.add(Entry(record.id, record.title, SPLITS.index(split), len(tokens), digest), stored)


def split_of(identifier: str, config: PrepareConfig) -> str:
    """The split of a document by a hash of its id, whatever its place in the input."""
    return "heldout" if key("split", config.seed, identifier) < config.heldout_fraction * 2**64 else "train"
