"""What the trainer reads: batches that are a function of the step."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class Batch(NamedTuple):
    """One micro-batch, on the model's device.

    ids: integer (B, N). targets: int64 (B, K), those of the last K ≤ N tokens, -100 where nothing is counted; not every
    model takes K < N. documents, positions: as the model's forward takes them, or None.
    """

    ids: Tensor
    targets: Tensor
    documents: Tensor | None = None
    positions: Tensor | None = None


@runtime_checkable
class Source(Protocol):
    """Where batches come from.

    A source may also have `fingerprint() -> str | Mapping`: a hash of the data and of everything that shapes it. It is
    recorded with the run, and a run is not resumed on data with another one.
    """

    def batch(self, step: int, micro: int) -> Batch:
        """The micro-batch number `micro` (from 0) of step `step` (from 1), a pure function of both and of a seed.

        It neither reads nor moves the global random states: asked again, also in another process, it gives the same.
        """
        ...
