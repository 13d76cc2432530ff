"""Perplexity of long text under a stated protocol: which tokens are scored, each once, and behind how much context.

A window of length L reads L tokens of one document and predicts the token after each; its last tokens are scored. No
token is put in front of it. The protocols, for a document of n tokens, of which n − 1 can be predicted:

    last-k           windows of the full context, scored in their last K tokens, which tile the document
    strided          the first window is scored whole; each next one begins `stride` later and is scored in what is new
    non-overlapping  windows side by side, each scored whole; the last may be shorter

Only documents that fill a window are read. At equal seed and documents last-k scores the same tokens at every context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gape.utils.random import key, words64
from gape.utils.validation import invalid_argument, whole

if TYPE_CHECKING:
    from gape.data import Corpus, Document
    from gape.models.gpt import GPT

#: As many as the paper's.
MOST_WINDOWS = 8000
#: Tokens of a batch of short windows.
BATCH_TOKENS = 2**16

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How text is read and which of its tokens are scored.

    Attributes:
        name: "last-k", "strided" or "non-overlapping".
        context: L, the tokens of a window.
        last: K, for last-k.
        stride: for strided.
        align: for last-k: score only tokens that a context of this length could precede too, so that shorter contexts
            are compared on the same tokens. 0 scores all.

    Raises:
        ValueError: an unknown name, or a value out of range.
    """

    name: str = "last-k"
    context: int
    last: int = 512
    stride: int = 512
    align: int = 0

    def __post_init__(self) -> None:
        if self.name not in _CUTS:
            raise invalid_argument("protocol", self.name, f"one of {', '.join(_CUTS)}")
        whole("context", self.context)
        if whole("align", self.align, 0) and self.name != "last-k":
            raise invalid_argument("align", self.align, f"0 under {self.name}; last-k alone can align")
        for name, of in (("last", "last-k"), ("stride", "strided")):
            if whole(name, getattr(self, name)) > self.context and self.name == of:
                raise invalid_argument(name, getattr(self, name), f"at most the context, {self.context}")

    @property
    def min_tokens(self) -> int:
        """Tokens that a document must have."""
        return 1 + max(self.context, self.align)

    def settings(self) -> dict[str, Any]:
        """What tells it from others, for a stored row."""
        own = {"last-k": ("last", "align"), "strided": ("stride",), "non-overlapping": ()}[self.name]
        return {"protocol": self.name, "context": self.context, **{key: getattr(self, key) for key in own}}

    def cut(self, length: int) -> Ints:
        """The windows of a document of `length` tokens: int64 (windows, 3): start, length, tokens scored at its end."""
        return _CUTS[self.name](self, length - 1) if length >= self.min_tokens else np.empty((0, 3), dtype=np.int64)


def _last_k(protocol: Protocol, predictable: int) -> Ints:
    first = -(-max(protocol.context, protocol.align) // protocol.last)
    ends = np.arange(first, predictable // protocol.last + 1) * protocol.last
    return _windows(ends - protocol.context, protocol.context, protocol.last)


def _strided(protocol: Protocol, predictable: int) -> Ints:
    ends = np.arange(protocol.context, predictable, protocol.stride)
    ends = np.append(ends, predictable) if len(ends) else np.array([predictable])
    scored = np.diff(ends, prepend=ends[0] - protocol.context)
    return _windows(ends - protocol.context, protocol.context, scored)


def _non_overlapping(protocol: Protocol, predictable: int) -> Ints:
    starts = np.arange(0, predictable, protocol.context)
    lengths = np.minimum(protocol.context, predictable - starts)
    return _windows(starts, lengths, lengths)


_CUTS: dict[str, Callable[[Protocol, int], Ints]] = {
    "last-k": _last_k,
    "strided": _strided,
    "non-overlapping": _non_overlapping,
}
PROTOCOLS = tuple(_CUTS)


def _windows(starts: Ints, lengths: Ints | int, scored: Ints | int) -> Ints:
    return np.stack(np.broadcast_arrays(starts, lengths, scored), axis=1).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The windows that a protocol makes of a corpus.

    Attributes:
        protocol: which.
        documents: those that are read; the first column of `windows` counts in them.
        sources: (documents,), equal for excerpts of one text.
        windows: (W, 4): document, start, length, scored.
        left_out: documents that are too short.
        of: windows before `max_windows` of them were drawn.
    """

    protocol: Protocol
    documents: tuple[Document, ...]
    sources: Ints
    windows: Ints
    left_out: tuple[Document, ...]
    of: int

    def batches(self) -> list[Ints]:
        """Numbers of windows that are read together: of one length and scored alike, short ones many at a time."""
        kinds = self.windows[:, 2:]
        batches = []
        for kind in np.unique(kinds, axis=0)[::-1]:
            numbers = np.flatnonzero((kinds == kind).all(1))
            size = max(1, BATCH_TOKENS // int(kind[0]))
            batches += [numbers[at : at + size] for at in range(0, len(numbers), size)]
        return batches

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
    """Cut the documents of a split into the windows of a protocol.

    Args:
        corpus: what :func:`gape.data.open_corpus` gives.
        protocol: how.
        split, stratum: which documents; None means every stratum.
        max_windows: draw so many where there are more. A window is drawn or not by where it ends, so contexts share
            the tokens that they score as far as they can.
        seed: of the draw.

    Raises:
        ValueError: no document is long enough, or max_windows is out of range.
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
    sources = np.array([int(corpus.record(document.index)["name"]) for document in chosen])
    return Plan(
        protocol=protocol, documents=tuple(chosen), sources=sources, windows=windows[drawn],
        left_out=tuple(document for document in documents if document.length < protocol.min_tokens), of=len(windows),
    )  # fmt: skip


def fits(corpus: Corpus, protocol: Protocol, *, split: str = "heldout", stratum: str | None = None) -> None:
    """Refuse a protocol for which no document is long enough, without reading any.

    Raises:
        ValueError: says how long the longest is.
    """
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
    model: GPT, ids: Tensor, scored: int, *, chunk: int = 16384, new_cache: Callable[[int], Any] | None = None
) -> Tensor:
    """The loss of the last tokens of some windows.

    A window longer than a chunk is read chunk by chunk with a cache, so memory is that of a chunk beside L keys and
    values. Logits exist for the scored tokens only, a slice of them at a time.

    Args:
        model: in eval mode.
        ids: int64 (B, L + 1): what is read, and the token after it.
        scored: from 1 to L, how many of the last tokens count.
        chunk: tokens that go through the model at once.
        new_cache: makes an empty cache with room for so many tokens; the model's own by default.

    Returns:
        (B, scored) in float32 (float64 beside float64).
    """
    inputs, targets = ids[:, :-1], ids[:, 1:]
    length = inputs.size(1)
    cache = (new_cache or model.new_cache)(length) if length > chunk else None
    losses = []
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        x = model.hidden(inputs[:, start:stop], cache=cache)
        first = max(start, length - scored)
        if first < stop:
            losses.append(model.token_losses(x[:, first - start :], targets[:, first:stop]))
    return torch.cat(losses, dim=1)


def eviction_chunk(length: int, chunk: int) -> int:
    """Tokens of a text that go through an evicting cache at once, where `chunk` may go through the model.

    Tokens of one chunk see each other, whatever is evicted. So a text of one chunk comes in eighths.
    """
    return chunk if length > chunk else max(1, length // 8)


def scores(
    model: GPT, corpus: Corpus, plan: Plan, *, first: int = 0, chunk: int = 16384,
    new_cache: Callable[[int], Any] | None = None,
) -> Iterator[list[float]]:  # fmt: skip
    """The summed loss of each window, batch by batch from number `first` on; as :func:`window_losses` scores them."""
    device = next(model.parameters()).device
    for batch in plan.batches()[first:]:
        rows = [_tokens(corpus, plan, window) for window in plan.windows[batch].tolist()]
        ids, scored = torch.from_numpy(np.stack(rows)).to(device), int(plan.windows[batch[0], 3])
        losses = window_losses(model, ids, scored, chunk=chunk, new_cache=new_cache)
        yield losses.double().cpu().numpy().sum(1).tolist()


def _tokens(corpus: Corpus, plan: Plan, window: list[int]) -> Ints:
    document, start, length, _ = window
    return np.asarray(corpus.tokens(plan.documents[document], start, start + length + 1), dtype=np.int64)
