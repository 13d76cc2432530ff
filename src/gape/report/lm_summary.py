"""Language models side by side: what to call a run, means over seeds, and differences on the same text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gape.report.results import Record, scheme_order
from gape.report.style import label
from gape.report.summary import mean_of, student
from gape.tasks.perplexity_rows import paired_interval

Floats = NDArray[np.float64]

#: What every scheme with gates is set beside, its base apart.
_RIVALS = ("rope", "alibi", "fox")


def name(record: Record) -> str:
    """A scheme as the paper writes it, with its variant after it."""
    variant = variant_of(record)
    return label(record["position"]) + (f" ({variant})" if variant else "")


def variant_of(record: Record) -> str:
    """What a variant's name adds to the scheme's, which many of them begin with."""
    return str(record.get("variant") or "").removeprefix(record["position"]).strip("_- ")


def schemes(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Records by (position, variant): bases in the order of tables, gated ones after them, plain before variants."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["position"], variant_of(record)), []).append(record)
    return dict(sorted(groups.items(), key=lambda item: (scheme_order(item[0][0]), item[0][1])))


def pooled(records: Sequence[Record], low: str = "low", high: str = "high", value: str = "nll") -> dict[str, Any]:
    """One measurement of several seeds: their mean; the deviation over seeds, or the interval of the only one.

    A single document gives no interval: it speaks for itself alone.
    """
    found = mean_of(record[value] for record in records)
    spread: tuple[float | None, float | None] = (None, None)
    if len(records) == 1:
        spread = (None, None) if records[0].get("documents") == 1 else (records[0].get(low), records[0].get(high))
    elif found.std is not None:
        spread = found.mean - found.std, found.mean + found.std
    return {"mean": found.mean, "low": spread[0], "high": spread[1], "n": found.n}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """By how much one scheme has more than another on the same text, in nats per token.

    Attributes:
        scheme, other: names.
        what: of what measurement.
        at: context or distance in tokens.
        difference: the mean over pairs of runs.
        low, high: its 95% interval: Student's over the pairs, or over documents where there is one pair; None where
            there is one document as well.
        seeds: pairs of runs.
        documents: the fewest of a pair.
        higher_is_better: whether more is better, as of a gain; of a loss it is not.
    """

    scheme: str
    other: str
    what: str
    at: int
    difference: float
    low: float | None
    high: float | None
    seeds: int
    documents: int
    higher_is_better: bool = False

    @property
    def verdict(self) -> str:
        """In a few words; one pair of runs speaks for itself alone, and one document for none but itself."""
        if self.low is None or self.high is None:
            return "one document"
        if self.low <= 0 <= self.high:
            return "not separable"
        word = "better" if (self.difference > 0) == self.higher_is_better else "worse"
        return word if self.seeds > 1 else f"{word}, one seed"


def far_back_differences(rows: Iterable[Record], *, gain: bool = False) -> list[Difference]:
    """Gated schemes against those of :func:`_pairs`, kind by kind and distance by distance, by document.

    Of losses, or of what the far text was worth.
    """
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for row in rows:
        question = repr(sorted(far_back_question(row).items()))
        groups.setdefault((row["kind"], row["distance"], row["context"], question), []).append(row)
    found = []
    for (kind, distance, _, _), records in groups.items():
        for first, second, seeds in _pairs(records):
            units = [_by_document(first[seed], second[seed], gain) for seed in seeds]
            shared = [unit for unit in units if len(unit[0])]
            if shared:
                found.append(_difference(first, second, kind, distance, shared, gain))
    return found


def perplexity_differences(rows: Iterable[Record]) -> list[Difference]:
    """Gated schemes against those of :func:`_pairs` at every context, window by window."""
    rows = list(rows)
    several = len({row.get("align") or 0 for row in rows}) > 1
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for row in rows:
        what = row["protocol"] if row.get("stratum") is None else f"{row['protocol']}, stratum {row['stratum']}"
        if several and row.get("align"):
            what = f"{what}, tokens that {row['align']:,} precede"
        groups.setdefault((what, row["context"], row.get("plan"), row.get("precision")), []).append(row)
    found = []
    for (what, context, _, _), records in groups.items():
        for first, second, seeds in _pairs(records):
            units = [_by_window(first[seed], second[seed]) for seed in seeds]
            found.append(_difference(first, second, what, context, units))
    return found


def far_back_question(row: Record) -> Record:
    """What was asked, but for the kinds and distances of which a row is one."""
    asked = row.get("asked") or {}
    return {key: value for key, value in asked.items() if key not in ("kinds", "distances")}


def asked_most(rows: Sequence[Record]) -> list[Record]:
    """Rows of far-back loss that answer one question, the one that most of them answer; of equals the last."""
    asked = [far_back_question(row) for row in rows]
    most = max(reversed(asked), key=asked.count, default=None)
    return [row for row, question in zip(rows, asked, strict=True) if question == most]


def _pairs(records: Sequence[Record]) -> list[tuple[dict[int, Record], dict[int, Record], list[int]]]:
    """Each scheme with gates, and by seed what it is set beside: its base, itself without a variant, the others."""
    groups = {key: {row["seed"]: row for row in rows} for key, rows in schemes(records).items()}
    pairs: list[tuple[dict[int, Record], dict[int, Record], list[int]]] = []
    for (position, variant), runs in groups.items():
        base = position.removesuffix("+gape")
        if base == position:
            continue
        rivals = ((rival, which) for rival in _RIVALS for which in (variant, ""))
        for other in ((base, variant), (base, ""), (position, ""), *rivals):
            beside = groups.get(other, {}) if other != (position, variant) else {}
            seeds = sorted(runs.keys() & beside.keys())
            if seeds and not any(pair[0] is runs and pair[1] is beside for pair in pairs):
                pairs.append((runs, beside, seeds))
    return pairs


def _difference(
    first: dict[int, Record],
    second: dict[int, Record],
    what: str,
    at: int,
    units: Sequence[tuple[Floats, Floats]],
    gain: bool = False,
) -> Difference:
    low, high = _interval(units)
    mean = mean_of(_means(units)).mean
    scheme, other = (name(next(iter(runs.values()))) for runs in (first, second))
    fewest = min(len(sums) for sums, _ in units)
    return Difference(
        scheme=scheme, other=other, what=what, at=at, difference=mean, low=low, high=high, seeds=len(units),
        documents=fewest, higher_is_better=gain,
    )  # fmt: skip


def _by_document(first: Record, second: Record, gain: bool) -> tuple[Floats, Floats]:
    """Differences of sums, and tokens, of the documents that both have."""

    def sums(row: Record) -> dict[str, float]:
        control = row["document_control"] if gain else [0.0] * len(row["document"])
        sign = -1 if gain else 1
        each = (c + sign * nll for c, nll in zip(control, row["document_nll"], strict=True))
        return dict(zip(row["document"], each, strict=True))

    own, beside = sums(first), sums(second)
    counts = dict(zip(first["document"], first["document_tokens"], strict=True))
    shared = [(own[document] - beside[document], counts[document]) for document in own if document in beside]
    table = np.array(shared, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _by_window(first: Record, second: Record) -> tuple[Floats, Floats]:
    """Differences of summed losses, and tokens, by document: windows of one document are not independent."""
    one, other = (np.array(row["window_nll"], dtype=np.float64) for row in (first, second))
    tokens = np.broadcast_to(np.array(first.get("window_tokens", 1.0), dtype=np.float64), one.shape)
    documents = np.array(first.get("window_document", range(len(one))))
    sums, counts = (np.bincount(documents, values).astype(np.float64) for values in ((one - other) * tokens, tokens))
    return sums, counts


def _interval(units: Sequence[tuple[Floats, Floats]]) -> tuple[float | None, float | None]:
    """Student's 95% over pairs of runs; of a single pair that over its documents, none where there is one."""
    if len(units) == 1:
        sums, tokens = units[0]
        return paired_interval(sums, tokens, np.arange(len(sums))) or (None, None)
    found = mean_of(_means(units))
    half = student(found.n - 1) * (found.std or 0.0) / math.sqrt(found.n)
    return found.mean - half, found.mean + half


def _means(units: Sequence[tuple[Floats, Floats]]) -> list[float]:
    return [float(sums.sum() / tokens.sum()) for sums, tokens in units]
