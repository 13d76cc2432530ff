"""Training windows: pieces of one document each, in an order that is a function of the seed and the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gape.data.corpus import Corpus
from gape.utils.random import below64, key, permuted
from gape.utils.validation import invalid_argument, whole


class Batch(NamedTuple):
    """One micro-batch, on the model's device.

    ids: integer (B, N). targets: int64 (B, K), those of the last K ≤ N tokens, -100 where nothing is counted; not every
    model takes K < N. documents, positions: as the model's forward takes them, or None. weights: float32 like targets,
    how much each counts in the mean loss, or None for all alike; not every model takes them.
    """

    ids: Tensor
    targets: Tensor
    documents: Tensor | None = None
    positions: Tensor | None = None
    weights: Tensor | None = None

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with a function applied to each of its tensors."""
        return self._replace(**{name: change(x) for name, x in self._asdict().items() if x is not None})


@runtime_checkable
class Source(Protocol):
    """Where batches come from.

    A source may also have `fingerprint() -> str | Mapping`: a hash of the data and of everything that shapes it. It is
    recorded with the run, and a run is not resumed on data with another one.
    """

    def batch(self, step: int, micro: int) -> Batch:
        """The micro-batch number `micro` (from 0) of step `step` (from 1), a pure function of both and of a seed.

        It neither reads nor changes the global random states: another call, also in another process, gives the same.
        """


Places = npt.NDArray[np.int64]


class WindowSource:
    """Batches of windows of `length` tokens, each inside one document: a `gape.train.Source`.

    A document of n tokens gives ⌊(n − 1) / length⌋ windows an epoch, one after the other from an offset drawn for the
    document and the epoch; each has `length` + 1 tokens, the last of which is the next one's first, so no token is a
    target twice. An epoch takes every window once, in an order drawn for it. Everything is a function of the seed and
    the window's number alone.

    Args:
        corpus: what `gape.data.open_corpus` gives.
        split, stratum: "train" or "heldout", and one of its strata; None means all.
        length: N, tokens a window is read at.
        batch_size, accumulation: B windows of a micro-batch, and micro-batches of a step.
        seed: of the order and the offsets.
        device: where batches go.

    Attributes:
        windows, documents: windows of an epoch, and documents long enough to give one.

    Raises:
        ValueError: no such split or stratum, no document of at least `length` + 1 tokens, or a shard that changed since
            it was prepared.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        split: str = "train",
        stratum: str | int | None = None,
        length: int = 1024,
        batch_size: int = 64,
        seed: int = 0,
        device: torch.device | str = "cpu",
        accumulation: int = 1,
    ) -> None:
        self.length, self.batch_size = whole("length", length), whole("batch_size", batch_size)
        self.accumulation, self.seed = whole("accumulation", accumulation), whole("seed", seed, at_least=0)
        self.corpus, self.split, self.stratum = corpus, split, None if stratum is None else str(stratum)
        self.device = torch.device(device)
        records = corpus.record(corpus.rows(split, stratum))
        lengths = records["length"].astype(np.int64)
        enough = lengths > self.length
        if not enough.any():
            longest = int(lengths.max(initial=0))
            which = f"{split} documents" + (f" of stratum {stratum}" if stratum is not None else "")
            raise invalid_argument("length", length, f"below the longest of the {which}, which has {longest} tokens")
        self._shards = records["shard"][enough].astype(np.int64)
        self._offsets = records["offset"][enough].astype(np.int64)
        # Every shard is compared with its hash now, not hours later.
        for shard in np.unique(self._shards).tolist():
            corpus.shard(shard)
        counts = (lengths[enough] - 1) // self.length
        # Places a document's first window may begin at.
        self._starts = lengths[enough] - counts * self.length
        self._ends = np.cumsum(counts)
        self._firsts = self._ends - counts
        self.windows, self.documents = int(self._ends[-1]), len(counts)

    def batch(self, step: int, micro: int, rows: slice | None = None) -> Batch:
        """Micro-batch `micro` (from 0) of step `step` (from 1): ids and targets, int64 (B, N) on the device.

        targets[b, i] is the token after ids[b, i]. With `rows`, only those of its B windows are read.
        """
        batch = moved(self.tokens(self.numbers(step, micro, rows)), self.device)
        return Batch(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())

    def numbers(self, step: int, micro: int, rows: slice | None = None) -> Places:
        """The numbers of the windows of a micro-batch, or of some rows, int64 (B,), counted through all epochs."""
        whole("step", step)
        if not 0 <= micro < self.accumulation:
            raise invalid_argument("micro", micro, f"a number from 0 to {self.accumulation - 1}")
        first = ((step - 1) * self.accumulation + micro) * self.batch_size
        return np.arange(first, first + self.batch_size)[rows or slice(None)]

    def tokens(self, numbers: Places) -> Places:
        """The tokens of windows by number, int64 (len(numbers), N + 1)."""
        shards, offsets = self.places(numbers)
        tokens = np.empty((len(numbers), self.length + 1), dtype=np.int64)
        for row, shard, offset in zip(tokens, shards.tolist(), offsets.tolist(), strict=True):
            row[:] = self.corpus.shard(shard)[offset : offset + self.length + 1]
        return tokens

    def places(self, numbers: Places) -> tuple[Places, Places]:
        """The shards and the offsets in them of windows by number, counted through all epochs; int64 like `numbers`."""
        epochs, order = np.divmod(numbers, self.windows)
        documents, offsets = np.empty_like(numbers), np.empty_like(numbers)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            window = permuted(order[here], self.windows, key("order", self.seed, epoch))
            document = np.searchsorted(self._ends, window, side="right")
            begin = below64(document, self._starts[document], key("offset", self.seed, epoch))
            documents[here] = document
            offsets[here] = self._offsets[document] + begin + (window - self._firsts[document]) * self.length
        return self._shards[documents], offsets

    def epochs(self, step: int) -> float:
        """Passes over the windows that `step` steps make."""
        return step * self.accumulation * self.batch_size / self.windows

    def fingerprint(self) -> dict[str, Any]:
        """The corpus's fingerprint and everything that shapes the batches; the device does not."""
        return {
            "corpus": self.corpus.fingerprint(),
            "split": self.split,
            "stratum": self.stratum,
            "length": self.length,
            "batch_size": self.batch_size,
            "accumulation": self.accumulation,
            "seed": self.seed,
        }


def moved(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array as a tensor on a device; the copy to a GPU does not wait."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
