"""Perplexity of long text under a stated protocol, last-k: which tokens are scored, and behind how much context.

A window of length L reads L tokens of one document and predicts the token after each; its last K tokens are scored. No
token is put in front of it. Windows end every K tokens, so that their scored tokens tile the document. Only documents
that fill a window are read. At equal seed and documents the same tokens are scored at every context. Windows are scored
batch by batch into a file from which a run resumes; rows have intervals over documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gape.utils import jsonl
from gape.utils.jsonl import Record
from gape.utils.random import key, words64
from gape.utils.validation import invalid_argument, whole

if TYPE_CHECKING:
    from gape.data import Corpus, Document
    from gape.models.gpt import GPT

#: As many as the paper's.
MOST_WINDOWS = 8000
#: Tokens of a batch of short windows.
BATCH_TOKENS = 2**16
RESAMPLES = 2000
#: Numbers of a table of resampled weights that exist at once.
_NUMBERS = 2**22

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How text is read and which of its tokens are scored.

    Attributes:
        context: L, the tokens of a window.
        last: K, the tokens that are scored at its end.
        align: score only tokens that a context of this length could precede too, so that shorter contexts are compared
            on the same tokens. 0 scores all.

    Raises:
        ValueError: a value out of range.
    """

    context: int
    last: int = 512
    align: int = 0

    def __post_init__(self) -> None:
        whole("context", self.context)
        whole("align", self.align, 0)
        if whole("last", self.last) > self.context:
            raise invalid_argument("last", self.last, f"at most the context, {self.context}")

    @property
    def min_tokens(self) -> int:
        """Tokens that a document must have."""
        return 1 + max(self.context, self.align)

    def settings(self) -> dict[str, Any]:
        """What tells it from others, for a stored row."""
        return {"protocol": "last-k", "context": self.context, "last": self.last, "align": self.align}

    def cut(self, length: int) -> Ints:
        """The windows of a document of `length` tokens: int64 (windows, 3): start, length, tokens scored at its end."""
        first = -(-(self.min_tokens - 1) // self.last)
        ends = np.arange(first, (length - 1) // self.last + 1) * self.last
        return np.stack(np.broadcast_arrays(ends - self.context, self.context, self.last), axis=1).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The windows that a protocol makes of a corpus.

    Attributes:
        documents, left_out: those that are read, in which the first column of `windows` counts, and those too short.
        windows: (W, 4): document, start, length, scored.
        of: windows before `max_windows` of them were drawn.
    """

    protocol: Protocol
    documents: tuple[Document, ...]
    windows: Ints
    left_out: tuple[Document, ...]
    of: int

    def batches(self) -> list[Ints]:
        """Numbers of windows that are read together, short ones many at a time."""
        size = max(1, BATCH_TOKENS // self.protocol.context)
        return [np.arange(at, min(at + size, len(self.windows))) for at in range(0, len(self.windows), size)]

    def identity(self) -> str:
        """A hash of the windows and the documents."""
        return f"{key(self.windows.tobytes().hex(), *(document.id for document in self.documents)):016x}"


def plan(
    corpus: Corpus,
    protocol: Protocol,
    *,
    split: str = "heldout",
    stratum: str | None = None,
    max_windows: int = MOST_WINDOWS,
    seed: int = 0,
) -> Plan:
    """Cut the documents of a split, and of a stratum if one is named, into the windows of a protocol.

    Of more than `max_windows` so many are drawn, by where they end: contexts share scored tokens as far as they can.
    Refused are a protocol that no document is long enough for, and max_windows out of range.
    """
    if whole("max_windows", max_windows) > MOST_WINDOWS:
        raise invalid_argument("max_windows", max_windows, f"a whole number from 1 to {MOST_WINDOWS:,}")
    fits(corpus, protocol, split=split, stratum=stratum)
    documents = list(corpus.documents(split, stratum))
    chosen = [document for document in documents if document.length >= protocol.min_tokens]
    cuts = [protocol.cut(document.length) for document in chosen]
    numbers = np.repeat(np.arange(len(chosen)), [len(cut) for cut in cuts])
    windows = np.column_stack([numbers, np.concatenate(cuts)])
    drawn = _drawn(windows, np.array([document.index for document in chosen]), max_windows, seed)
    too_short = tuple(document for document in documents if document.length < protocol.min_tokens)
    return Plan(protocol=protocol, documents=tuple(chosen), windows=windows[drawn], left_out=too_short, of=len(windows))


def fits(corpus: Corpus, protocol: Protocol, *, split: str = "heldout", stratum: str | None = None) -> None:
    """Refuse a protocol for which no document is long enough, without reading any; says how long the longest is."""
    rows = corpus.rows(split, stratum)
    lengths = corpus.record(rows)["length"]
    longest = int(lengths.max(initial=0))
    if longest >= protocol.min_tokens:
        return
    which = f"{split} documents" + ("" if stratum is None else f" of stratum {stratum}")
    name = corpus.document(int(rows[lengths.argmax()])).id if len(rows) else "none"
    expected = f"a length that a document fills: {protocol.min_tokens:,} tokens, and all {len(rows)} {which} of "
    expected += f"{corpus.directory} are shorter (the longest, {name}, has {longest:,})"
    raise invalid_argument("context", protocol.context, expected)


def _drawn(windows: Ints, indices: Ints, most: int, seed: int) -> Ints:
    """Numbers of the windows that are read, in order."""
    if len(windows) <= most:
        return np.arange(len(windows))
    document, start, length, _ = windows.T
    counters = (indices[document] << 32) + start + length
    return np.sort(np.argsort(words64(counters, key("perplexity", seed)), kind="stable")[:most])


@torch.no_grad()
def window_losses(
    model: GPT, ids: Tensor, scored: int, *, chunk: int = 16384, forgetting: Callable[[], Any] | None = None
) -> Tensor:
    """The loss of the last `scored` tokens of windows ids, int64 (B, L + 1), as (B, scored) in float32 (or float64).

    A window longer than a chunk is read chunk by chunk with a cache, so memory is that of a chunk beside L keys and
    values. Logits exist for the scored tokens only, a slice of them at a time. `forgetting` makes an empty cache that
    evicts; the model's own, which is in eval mode, does not.
    """
    inputs, targets = ids[:, :-1], ids[:, 1:]
    length = inputs.size(1)
    if forgetting is not None and length <= chunk:
        # Tokens of one chunk see each other, whatever is evicted: a text of one chunk comes in eighths.
        chunk = max(1, length // 8)
    cache = None if length <= chunk else model.new_cache(length) if forgetting is None else forgetting()
    losses = []
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        x = model.hidden(inputs[:, start:stop], cache=cache)
        first = max(start, length - scored)
        if first < stop:
            losses.append(model.token_losses(x[:, first - start :], targets[:, first:stop]))
    return torch.cat(losses, dim=1)


def scores(model: GPT, corpus: Corpus, plan: Plan, *, first: int = 0, **options: Any) -> Iterator[list[float]]:
    """The summed loss of each window, batch by batch from number `first` on; options as :func:`window_losses`."""
    device = next(model.parameters()).device
    for batch in plan.batches()[first:]:
        rows = [
            np.asarray(corpus.tokens(plan.documents[document], start, start + length + 1), dtype=np.int64)
            for document, start, length, _ in plan.windows[batch].tolist()
        ]
        ids = torch.from_numpy(np.stack(rows)).to(device)
        losses = window_losses(model, ids, plan.protocol.last, **options)
        yield losses.double().cpu().numpy().sum(1).tolist()


def score_all(
    model: GPT,
    corpus: Corpus,
    plan: Plan,
    *,
    store: Path,
    of: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> Floats:
    """The summed loss (W,) of every window of a plan, resuming after the batches that the file `store` has.

    `of` says what the scores depend on besides the plan: weights, precision. A file of something else is overwritten;
    the caller deletes it when the result is stored. Options are those of :func:`window_losses`.
    """
    header: Record = {"plan": plan.identity(), "of": of}
    stored = jsonl.read_lines(store) if store.is_file() else []
    if stored[:1] != [header]:
        store.unlink(missing_ok=True)
        jsonl.append(store, header)
        stored = [header]
    sums = [value for line in stored[1:] for value in line["sums"]]
    progress(len(sums), len(plan.windows))
    for new in scores(model, corpus, plan, first=len(stored) - 1, **options):
        jsonl.append(store, {"sums": new})
        sums += new
        progress(len(sums), len(plan.windows))
    return np.array(sums)


def rows(plan: Plan, sums: Floats, seed: int = 0) -> list[Record]:
    """What is stored of a plan's scores: a row for each stratum where there are several, and last one over all.

    A loss that is not finite is refused.
    """
    broken = int((~np.isfinite(sums)).sum())
    if broken:
        raise ValueError(f"loss: got one that is not finite in {broken} of {len(sums)} windows, expected numbers")
    strata = np.array([document.stratum or "" for document in plan.documents])[plan.windows[:, 0]]
    names = sorted(set(strata.tolist()) - {""}, key=lambda name: (len(name), name))
    rows = [_row(plan, sums, strata == name, seed) | {"stratum": name} for name in names if len(names) > 1]
    return [*rows, _row(plan, sums, np.ones(len(strata), dtype=bool), seed) | {"stratum": None}]


def _row(plan: Plan, losses: Floats, chosen: npt.NDArray[np.bool_], seed: int) -> Record:
    sums, counts = losses[chosen], plan.windows[chosen, 3].astype(np.float64)
    sources = plan.windows[chosen, 0]
    each = sums / counts
    interval = weighted_interval(sums, counts, sources, seed)
    nll = float(sums.sum() / counts.sum())
    return {
        "plan": plan.identity(), "documents": len(np.unique(sources)), "too_short": len(plan.left_out),
        "windows": int(chosen.sum()), "of_windows": plan.of, "tokens": int(counts.sum()), "nll": nll,
        "perplexity": math.exp(nll), "std": float(each.std(ddof=1)) if len(each) > 1 else 0.0,
        "low": interval.low, "high": interval.high, "resampled": interval.over,
        "window_nll": [round(value, 5) for value in each.tolist()],
        "window_document": np.unique(sources, return_inverse=True)[1].tolist(),
        "window_tokens": plan.protocol.last,
    }  # fmt: skip


class Interval(NamedTuple):
    """A 95% interval, and what was resampled for it: "documents", or "windows" where all are of one document."""

    low: float
    high: float
    over: str


def weighted_interval(sums: Floats, counts: Floats, documents: Ints, seed: int = 0) -> Interval:
    """The 95% interval of Σ sums / Σ counts, by drawing documents (with all their windows) with replacement.

    Windows of one book are not independent, so it is books that are drawn. Where there is one document only, windows
    are drawn instead, and the interval says nothing about other documents. All arguments are (W,): the summed loss
    of each window, or a difference of two such; its tokens; which document it is from.
    """
    units, of = np.unique(documents, return_inverse=True)
    over = "documents"
    if len(units) == 1:
        of, over = np.arange(len(sums)), "windows"
    size = int(of.max()) + 1
    totals, tokens = np.bincount(of, sums, size), np.bincount(of, counts, size)
    generator = np.random.Generator(np.random.PCG64(seed))
    means: list[Floats] = []
    block = max(1, _NUMBERS // size)
    for first in range(0, RESAMPLES, block):
        shape = (min(block, RESAMPLES - first), size)
        drawn = generator.integers(size, size=shape)
        means.append(totals[drawn].sum(1) / tokens[drawn].sum(1))
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return Interval(float(low), float(high), over)
