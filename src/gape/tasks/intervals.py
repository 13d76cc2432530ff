"""How sure a mean over windows of text is: bootstrap intervals that know which windows come from one document."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

RESAMPLES = 2000
#: Numbers of a table of resampled weights that exist at once.
_NUMBERS = 2**22


class Interval(NamedTuple):
    """A 95% interval, and what was drawn anew for it: "documents", or "windows" where all are of one document."""

    low: float
    high: float
    over: str


def paired_interval(sums: Floats, counts: Floats, documents: Ints, seed: int = 0) -> tuple[float, float] | None:
    """The 95% interval of a difference between two runs on the same windows, over documents.

    Args:
        sums, counts, documents, seed: as in :func:`weighted_interval`, of differences.

    Returns:
        Its ends; None where all windows are of one document, which says nothing about others.
    """
    interval = weighted_interval(sums, counts, documents, seed)
    return (interval.low, interval.high) if interval.over == "documents" else None


def weighted_interval(sums: Floats, counts: Floats, documents: Ints, seed: int = 0) -> Interval:
    """The 95% interval of Σ sums / Σ counts, by drawing documents (with all their windows) with replacement.

    Windows of one book are not independent, so it is books that are drawn. Where there is one document only, windows
    are drawn instead, and the interval says nothing about other documents.

    Args:
        sums: (W,), the loss of each window summed over its tokens, or a difference of two such.
        counts: (W,), tokens of each window.
        documents: (W,), which document each window is from.
        seed: of the draws.
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
