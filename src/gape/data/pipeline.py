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
from gape.data.shards import LISTED, SPLITS, Cursor, Entry, Parts, Tally, with_end
from gape.data.tokenizer import Tokenizer, load_tokenizer
from gape.data.worker import Encoded, Pool
from gape.utils import files, locks
from gape.utils.random import key
from gape.utils.signals import StopFlag
from gape.utils.validation import invalid_argument, whole

SETTINGS = "prepare.json"
#: Bytes of text after which a request goes out; a longer document goes alone.
REQUEST = 2**18
#: Requests under way for each process: one it works on, one that waits for it.
AHEAD = 2
#: Processes for each core at most.
CROWD = 8
#: Records before which a fraction of bad ones says nothing.
ENOUGH = 1000


class Progress(NamedTuple):
    """How far it is: bytes of the inputs (total 0 where they have no size), documents and tokens kept."""

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
    show: Callable[[Progress], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> Corpus:
    """Make a corpus, or go on with one that was stopped; the same settings and inputs give the same bytes.

    Args:
        config: the settings.
        directory: where to; made when missing.
        workers: processes that tokenise, up to 8 for each core; None means one for each core, 0 tokenises in this
            process.
        stop: polled between documents.
        show: told now and then how far it is.
        say: told what is worth a line.

    Raises:
        ValueError: before any work: an input, a field or the tokenizer that is not there, a vocabulary too large for
            the dtype, a directory that holds something else. Later: more bad lines than `max_bad`, an input that
            breaks off, no document at all.
        Interrupted: a signal came; the sealed shards stay and the same call goes on.
        DiskFullError: no room; likewise.
        BusyError: another process prepares the same corpus.
    """
    stop = stop or StopFlag()
    directory = Path(directory)
    workers = _cores() if workers is None else whole("workers", workers, 0)
    if workers > CROWD * _cores():
        raise invalid_argument("workers", workers, f"at most {CROWD * _cores()}, {CROWD} for each core")
    with stop:
        tokenizer = load_tokenizer(config.tokenizer)
        dtype = choose_dtype(config.dtype, tokenizer.vocab_size)
        job = Job(config, tokenizer, dtype, find(config, stop.check), directory)
        probe(job.sources, job.fields, stop.check)
        claim(directory, job.settings())
        parts = Parts(directory, config.shard_tokens)
        with locks.locked(parts.records, "prepared"):
            files.sweep(directory)
            # Asked only now: whoever held the directory a moment ago may have come to the end.
            if (directory / CARD).is_file():
                parts.discard()
                say(f"{directory} is prepared already")
                return open_corpus(directory)
            if config.end_of_text and tokenizer.end_of_text is None:
                say("the tokenizer has no end of text; documents are stored without one")
            try:
                tally = _fill(job, parts, workers, stop, show, say)
            except ValueError:
                if not parts.shards:
                    # Nothing was made of these inputs, so nothing keeps others from the directory.
                    parts.discard()
                    (directory / SETTINGS).unlink()
                raise
            card.finish(job.config, job.settings(), directory, parts, tally)
    return open_corpus(directory)


def _cores() -> int:
    """Cores this process may use; not every system says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def claim(directory: Path, settings: dict[str, Any]) -> None:
    """Take a directory for a corpus, or find that it is one of these settings.

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
    job: Job, parts: Parts, workers: int, stop: StopFlag, show: Callable[[Progress], None], say: Callable[[str], None]
) -> Tally:
    """Read, tokenise and seal until the inputs, or the tokens asked for of each, are at their end."""
    cursor, tally, end = parts.sealed()
    if end:
        return tally
    if parts.shards:
        say(f"going on after {len(parts.shards)} sealed shards, {sum(tally.tokens):,} tokens")
    else:
        tally.documents, tally.tokens = [0] * len(job.sources), [0] * len(job.sources)
    full = {source.group for source in job.sources if _full(job, tally, source.group)}
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
                _count(job, tally, batch.source, record)
                if not record.problem and _store(job, parts, tally, batch.source, record, *next(documents)):
                    parts.seal(cursor, tally, end=False)
                if _full(job, tally, group):
                    full.add(group)
            before = sum(source.size for source in job.sources[: batch.source])
            show(Progress(before + batch.records[-1].position, total, sum(tally.documents), sum(tally.tokens)))
    _judge(job.config, tally, final=True)
    parts.seal(cursor, tally, end=True)
    return tally


def _full(job: Job, tally: Tally, group: int) -> bool:
    """Whether an input has given the tokens asked for."""
    if job.config.max_tokens is None:
        return False
    taken = (n for source, n in zip(job.sources, tally.tokens, strict=True) if source.group == group)
    return sum(taken) >= job.config.max_tokens


def _batches(job: Job, cursor: Cursor, pool: Pool, full: set[int], tick: Callable[[], None]) -> Iterator[Batch]:
    """The records after the cursor in requests to the pool, none of which spans two inputs.

    An input that comes to be in `full` is left; what of it is under way by then is thrown away.
    """
    for number in range(cursor.source, len(job.sources)):
        held: list[Record] = []
        texts: list[bytes] = []
        group, size = job.sources[number].group, 0
        skip = cursor.record if number == cursor.source else 0
        for record in records(job.sources[number], job.fields, skip, tick) if group not in full else ():
            if group in full:
                break
            held.append(record._replace(text=""))
            if not record.problem:
                texts.append(record.text.encode())
                size += len(texts[-1])
            # Records without a text count too: a file of bad lines must not be held in memory.
            if size >= REQUEST or len(held) >= ENOUGH:
                yield _request(number, held, texts, pool)
                held, texts, size = [], [], 0
        if held:
            yield _request(number, held, texts, pool)


def _request(source: int, held: list[Record], texts: list[bytes], pool: Pool) -> Batch:
    return Batch(source, held, [hashlib.sha256(text).hexdigest()[:32] for text in texts], pool.submit(texts))


def _in_order(batches: Iterator[Batch], ahead: int) -> Iterator[Batch]:
    """The batches in their order, with up to `ahead` more under way behind the one that is given out."""
    waiting: deque[Batch] = deque()
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting


def _count(job: Job, tally: Tally, source: int, record: Record) -> None:
    """Add a record to the tally; name it where it is bad."""
    tally.read += 1
    if record.problem:
        tally.empty += record.problem == EMPTY
        tally.bad += record.problem != EMPTY
        if len(tally.listed) < LISTED:
            tally.listed.append([job.sources[source].name, record.number, record.problem])
        _judge(job.config, tally, final=False)


def _judge(config: PrepareConfig, tally: Tally, *, final: bool) -> None:
    """Stop where there are more bad records than are let pass, or at the end no documents at all.

    Raises:
        ValueError: names the first bad ones.
    """
    bad, limit = tally.empty + tally.bad, config.max_bad
    if 0 < limit < 1:
        if tally.read < ENOUGH and not final:
            return
        limit = limit * tally.read
    if final and not sum(tally.documents):
        counts = f"{tally.read} read, {tally.empty} empty, {tally.bad} bad, {tally.outside} in no stratum"
        raise ValueError(f"inputs: no documents among the records: {counts}")
    if bad > limit:
        first = "; ".join(f"{name}, line {number}: {reason}" for name, number, reason in tally.listed[:5])
        raise ValueError(
            f"max_bad: {bad} of {tally.read} records are bad or empty, expected at most {config.max_bad}: {first}"
        )


def _store(job: Job, parts: Parts, tally: Tally, source: int, record: Record, digest: str, tokens: Any) -> bool:
    """Put a document where it belongs; whether the shard is full."""
    if not job.config.keeps(len(tokens)):
        tally.outside += 1
        return False
    # Without an id of its own the text speaks for a document: its line number would bring the order in.
    split = job.sources[source].split or split_of(record.id if record.named else digest, job.config)
    stored = with_end(tokens, job.end_of_text)
    tally.documents[source] += 1
    tally.tokens[source] += len(stored)
    return parts.add(Entry(record.id, record.title, SPLITS.index(split), len(tokens), digest), stored)


def split_of(identifier: str, config: PrepareConfig) -> str:
    """The split of a document by a hash of its id: where it stands in the input plays no part."""
    return "heldout" if key("split", config.seed, identifier) < config.heldout_fraction * 2**64 else "train"
