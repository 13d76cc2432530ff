"""Stored perplexity: windows scored batch by batch into a file from which a run resumes, then rows with intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gape.tasks.perplexity import Plan, edges, scores, tokens_by_position
from gape.utils.jsonl import JSONLines, Record
from gape.utils.validation import invalid_argument

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


class Scored(NamedTuple):
    """sums: (W,), the loss of each window of a plan summed over its scored tokens. by_position: sums by bin."""

    sums: Floats
    by_position: Floats


def score_all(
    model: GPT,
    corpus: Corpus,
    plan: Plan,
    *,
    store: Path,
    of: str,
    chunk: int = 16384,
    check: Callable[[], None] = lambda: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Scored:
    """Score every window of a plan, resuming after the batches that `store` holds.

    Args:
        model, corpus, plan, chunk, check: as in :func:`gape.tasks.perplexity.scores`.
        store: a file with a line per batch; the caller deletes it when the result is stored.
        of: what the scores depend on besides the plan: weights, precision. A file of something else is overwritten.
        progress: called with windows done and in all.

    Raises:
        Interrupted: or whatever `check` raises; finished batches are in the file.
    """
    batches = plan.batches()
    sums, by_position = np.zeros(len(plan.windows)), np.zeros(len(edges(plan.protocol.context)) - 1)
    done = windows = 0
    header = {"plan": plan.identity(), "of": of}

    def add(values: list[float], bins: list[float]) -> None:
        nonlocal done, windows, by_position
        sums[batches[done]] = values
        by_position = by_position + np.array(bins)
        done, windows = done + 1, windows + len(values)
        progress(windows, len(plan.windows))

    lines = JSONLines(store)
    try:
        _add_stored(store, lines, header, add)
        progress(windows, len(plan.windows))
        for part in scores(model, corpus, plan, first=done, chunk=chunk, check=check):
            lines.write(sums=part.sums, by_position=part.by_position)
            add(part.sums, part.by_position)
    finally:
        lines.close()
    return Scored(sums, by_position)


def rows(plan: Plan, scored: Scored, seed: int = 0) -> list[Record]:
    """What is stored of a plan's scores: a row for each stratum where there are several, and last one over all.

    A corpus of excerpts holds a text once for each stratum; no row over all of it is made where strata overlap.

    Raises:
        ValueError: a loss that is not finite.
    """
    broken = int((~np.isfinite(scored.sums)).sum())
    if broken:
        raise ValueError(
            f"loss: got one that is not finite in {broken} of {len(scored.sums)} windows, expected numbers"
        )
    of_window = plan.windows[:, 0]
    strata = np.array([document.stratum or "" for document in plan.documents])[of_window]
    names = sorted({document.stratum for document in plan.documents if document.stratum}, key=lambda s: (len(s), s))
    records = [_row(plan, scored, strata == name, seed) | {"stratum": name} for name in names if len(names) > 1]
    pairs = {(source, document.stratum) for source, document in zip(plan.sources.tolist(), plan.documents, strict=True)}
    if len(pairs) == len(set(plan.sources.tolist())):
        everything = np.ones(len(of_window), dtype=bool)
        records.append(_row(plan, scored, everything, seed) | {"stratum": None})
    return [row for row in records if row]


def position_row(plan: Plan, scored: Scored) -> Record:
    """Loss by position in the window: `edges` of the bins, `nll` and `tokens` in each; bins without tokens left out."""
    bounds, tokens = edges(plan.protocol.context), tokens_by_position(plan)
    filled = [at for at, count in enumerate(tokens) if count]
    return {
        "edges": [*(bounds[at] for at in filled), bounds[filled[-1] + 1]],
        "nll": [round(float(scored.by_position[at]) / tokens[at], 5) for at in filled],
        "tokens": [tokens[at] for at in filled],
    }


class Difference(NamedTuple):
    """nats per token by which one run is worse than another on the same windows, and the 95% interval of it.

    The interval is over documents; None where there is one, which says nothing about others.
    """

    nll: float
    low: float | None
    high: float | None

    @property
    def separable(self) -> bool:
        """Whether there is an interval and it leaves out zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def difference(one: Mapping[str, Any], other: Mapping[str, Any], seed: int = 0) -> Difference:
    """`one` less `other`, two stored rows of the same windows.

    Raises:
        ValueError: they are of different windows.
    """
    if one["plan"] != other["plan"] or one["stratum"] != other["stratum"]:
        raise invalid_argument("rows", (one["run"], other["run"]), "two of the same windows of the same corpus")
    nll = np.array(one["window_nll"]) - np.array(other["window_nll"])
    counts = np.broadcast_to(np.array(one["window_tokens"], dtype=np.float64), nll.shape)
    documents = np.array(one["window_document"])
    low, high = paired_interval(nll * counts, counts, documents, seed) or (None, None)
    return Difference(float((nll * counts).sum() / counts.sum()), low, high)


def _row(plan: Plan, scored: Scored, chosen: npt.NDArray[np.bool_], seed: int) -> Record:
    if not chosen.any():
        return {}
    sums, counts = scored.sums[chosen], plan.windows[chosen, 3].astype(np.float64)
    sources = plan.sources[plan.windows[chosen, 0]]
    each = sums / counts
    interval = weighted_interval(sums, counts, sources, seed)
    nll = float(sums.sum() / counts.sum())
    lengths = plan.windows[chosen, 3].tolist()
    return {
        "plan": plan.identity(), "documents": len(np.unique(sources)), "too_short": len(plan.left_out),
        "windows": int(chosen.sum()), "of_windows": plan.of, "tokens": int(counts.sum()), "nll": nll,
        "perplexity": math.exp(nll), "std": float(each.std(ddof=1)) if len(each) > 1 else 0.0,
        "low": interval.low, "high": interval.high, "resampled": interval.over,
        "window_nll": [round(value, 5) for value in each.tolist()],
        "window_document": np.unique(sources, return_inverse=True)[1].tolist(),
        "window_tokens": lengths[0] if len(set(lengths)) == 1 else lengths,
    }  # fmt: skip


def _add_stored(store: Path, lines: JSONLines, header: Record, add: Callable[[list[float], list[float]], None]) -> None:
    """Add the batches of a file, without an incomplete last line; a file with another header is overwritten."""
    lines.mend()
    first, *parts = [json.loads(line) for line in store.read_bytes().splitlines()] or [None]
    if first != header:
        lines.cut(0)
        lines.write(**header)
        return
    for part in parts:
        add(part["sums"], part["by_position"])
