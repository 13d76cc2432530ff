"""Perplexity of long text under a stated protocol, last-k: which tokens are scored, and behind how much context.

A window of length L reads L tokens of one document and predicts the token after each; its last K tokens are scored. No
token is put in front of it. Windows end every K tokens, so that their scored tokens tile the document. Only documents
that fill a window are read. At equal seed and documents the same tokens are scored at every context.
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
        documents: those that are read; the first column of `windows` counts in them.
        windows: (W, 4): document, start, length, scored.
        left_out: documents that are too short.
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

    Where there are more than `max_windows`, so many are drawn. A window is drawn or not by where it ends, so contexts
    share the tokens that they score as far as they can.

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
    return Plan(
        protocol=protocol, documents=tuple(chosen), windows=windows[drawn],
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
    """The loss of the last `scored` tokens of some windows, (B, scored) in float32 (float64 beside float64).

    A window longer than a chunk is read chunk by chunk with a cache, so memory is that of a chunk beside L keys and
    values. Logits exist for the scored tokens only, a slice of them at a time.

    Args:
        model: in eval mode.
        ids: int64 (B, L + 1): what is read, and the token after it.
        new_cache: makes an empty cache with room for so many tokens; the model's own by default.
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
        ids = torch.from_numpy(np.stack(rows)).to(device)
        losses = window_losses(model, ids, plan.protocol.last, chunk=chunk, new_cache=new_cache)
        yield losses.double().cpu().numpy().sum(1).tolist()


def _tokens(corpus: Corpus, plan: Plan, window: list[int]) -> Ints:
    document, start, length, _ = window
    return np.asarray(corpus.tokens(plan.documents[document], start, start + length + 1), dtype=np.int64)
