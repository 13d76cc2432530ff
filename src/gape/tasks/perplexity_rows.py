"""Stored perplexity: windows scored batch by batch into a file from which a run resumes, then rows with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gape.tasks.perplexity import Plan, scores
from gape.utils import jsonl
from gape.utils.jsonl import Record

if TYPE_CHECKING:
    from gape.data import Corpus
    from gape.models.gpt import GPT


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

RESAMPLES = 2000
#: Numbers of a table of resampled weights that exist at once.
_NUMBERS = 2**22


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


def score_all(
    model: GPT,
    corpus: Corpus,
    plan: Plan,
    *,
    store: Path,
    of: str,
    chunk: int = 16384,
    new_cache: Callable[[int], Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Floats:
    """The summed loss (W,) of every window of a plan, resuming after the batches that the file `store` holds.

    `of` says what the scores depend on besides the plan: weights, precision. A file of something else is overwritten;
    the caller deletes it when the result is stored. `progress` is called with windows done and in all.
    """
    header: Record = {"plan": plan.identity(), "of": of}
    stored = jsonl.read_lines(store) if store.is_file() else []
    if stored[:1] != [header]:
        store.unlink(missing_ok=True)
        jsonl.append(store, header)
        stored = [header]

    def values() -> Iterator[list[float]]:
        yield from (line["sums"] for line in stored[1:])
        for new in scores(model, corpus, plan, first=len(stored) - 1, chunk=chunk, new_cache=new_cache):
            jsonl.append(store, {"sums": new})
            yield new

    sums, done = np.zeros(len(plan.windows)), 0
    progress(done, len(plan.windows))
    for batch, own in zip(plan.batches(), values(), strict=True):
        sums[batch] = own
        done += len(own)
        progress(done, len(plan.windows))
    return sums


def rows(plan: Plan, sums: Floats, seed: int = 0) -> list[Record]:
    """What is stored of a plan's scores: a row for each stratum where there are several, and last one over all.

    Raises:
        ValueError: a loss that is not finite.
    """
    broken = int((~np.isfinite(sums)).sum())
    if broken:
        raise ValueError(f"loss: got one that is not finite in {broken} of {len(sums)} windows, expected numbers")
    of_window = plan.windows[:, 0]
    strata = np.array([document.stratum or "" for document in plan.documents])[of_window]
    names = sorted({document.stratum for document in plan.documents if document.stratum}, key=lambda s: (len(s), s))
    records = [_row(plan, sums, strata == name, seed) | {"stratum": name} for name in names if len(names) > 1]
    records.append(_row(plan, sums, np.ones(len(of_window), dtype=bool), seed) | {"stratum": None})
    return [row for row in records if row]


def _row(plan: Plan, losses: Floats, chosen: npt.NDArray[np.bool_], seed: int) -> Record:
    if not chosen.any():
        return {}
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
