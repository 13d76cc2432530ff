"""Means and deviations over seeds, 95% intervals, and differences of schemes on the same samples or text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gape.report.results import Results, far_back_question, unpack_hits
from gape.report.schemes import base_of, by_scheme, group_by, label, name, scheme_order
from gape.tasks.perplexity import RESAMPLES, Floats, weighted_interval
from gape.utils.jsonl import Record
from gape.utils.validation import invalid_argument

#: Student's t at 97.5% for 1, 2, … degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)

#: What every gated scheme is compared with besides its base.
_RIVALS = ("rope", "alibi", "fox")

Runs = dict[int, Record]
#: Differences summed over the tokens of each document, and its tokens.
Documents = tuple[Floats, Floats]
#: Two rows as such differences.
Paired = Callable[[Record, Record], Documents]


@dataclass(frozen=True)
class Mean:
    """A mean over n values and their sample standard deviation, None for a single one."""

    mean: float
    std: float | None
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f}"


def mean_of(values: Iterable[float]) -> Mean:
    """The mean of some numbers; a ValueError where there are none."""
    numbers = list(values)
    if not numbers:
        raise ValueError("values: got none, expected at least one")
    mean = math.fsum(numbers) / len(numbers)
    if len(numbers) == 1:
        return Mean(mean, None, 1)
    variance = math.fsum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1)
    return Mean(mean, math.sqrt(variance), len(numbers))


def columns(means: Iterable[Mean]) -> dict[str, list[Any]]:
    """Means, deviations and counts as lists, for the data of a figure."""
    means = list(means)
    return {key: [getattr(mean, key) for mean in means] for key in ("mean", "std", "n")}


def pool_seeds(rows: Sequence[Record]) -> dict[str, Any]:
    """The loss of several seeds: mean, and as low and high the deviation over seeds or the interval of the only one.

    A single document gives no interval: it says nothing about others.
    """
    mean = mean_of(row["nll"] for row in rows)
    low = high = None
    if mean.std is not None:
        low, high = mean.mean - mean.std, mean.mean + mean.std
    elif rows[0].get("documents") != 1:
        low, high = rows[0].get("low"), rows[0].get("high")
    return {"mean": mean.mean, "low": low, "high": high, "n": mean.n}


def student(freedom: int) -> float:
    """The 97.5% point of Student's t for so many degrees of freedom, to three digits."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    # Fisher's expansion about the normal's 97.5% point.
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def student_interval(values: Iterable[float]) -> tuple[float, float]:
    """The 95% interval of a mean over two or more seeds.

    Student's: resampling three seeds would hardly ever show more than their own range.
    """
    mean = mean_of(values)
    half = student(mean.n - 1) * (mean.std or 0.0) / math.sqrt(mean.n)
    return mean.mean - half, mean.mean + half


def verdict(difference: float, low: float, high: float, *, higher_is_better: bool = False) -> str:
    """What a difference and its interval say of the first of two schemes."""
    if low <= 0 <= high:
        return "not separable"
    return "better" if (difference > 0) == higher_is_better else "worse"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """By how much one scheme has more than another on the same samples or text.

    Attributes:
        scheme, other, variant: names; `variant` is that of both.
        what, at: of what measurement, and at what multiple of the training length, context or distance.
        difference: the mean over pairs of runs: accuracy, or nats per token.
        low, high: its 95% interval: over pairs of runs, or over samples or documents where there is one pair; None
            where there is one document as well.
        seeds: pairs of runs.
        documents: the fewest documents (samples) of a pair.
        higher_is_better: true of accuracy and of a gain, false of a loss.
    """

    scheme: str
    other: str
    variant: str = ""
    what: str
    at: int
    difference: float
    low: float | None
    high: float | None
    seeds: int
    documents: int
    higher_is_better: bool = False

    @property
    def direction(self) -> str:
        """Whether the first is better, whatever the number of seeds; one document decides nothing."""
        if self.low is None or self.high is None:
            return "one document"
        return verdict(self.difference, self.low, self.high, higher_is_better=self.higher_is_better)

    @property
    def verdict(self) -> str:
        """The direction, marked where it is of one pair of runs."""
        one = self.seeds == 1 and self.direction in ("better", "worse")
        return f"{self.direction}, one seed" if one else self.direction


class Curve(NamedTuple):
    """Accuracy of one scheme against length: `rows` of all seeds by multiple of the training length, ascending."""

    variant: str
    position: str
    evaluated: str
    target: str
    rows: dict[int, list[Record]]

    @property
    def means(self) -> dict[int, Mean]:
        """Accuracy over seeds, by multiple of the training length."""
        return {factor: mean_of(row["accuracy"] for row in rows) for factor, rows in self.rows.items()}


def curves(results: Results) -> list[Curve]:
    """Accuracy by length for every scheme, variant and target, in the order of the rows."""
    groups = group_by(
        results.of("needle"), lambda row: (row["variant"], row["position"], row["evaluated"], row["target"])
    )
    return [
        Curve(*scheme, rows=dict(sorted(group_by(rows, lambda row: int(row["factor"])).items())))
        for scheme, rows in groups.items()
    ]


def accuracy_differences(results: Results) -> list[Difference]:
    """Every gated scheme against its base on the same seeds and the same samples; other pairs are left out.

    The interval of one pair is a bootstrap over samples with a fixed seed.
    """
    rows = [row for row in results.of("needle") if row["position"] == row["evaluated"]]
    groups = group_by(rows, lambda row: (row["variant"], row["target"], row["position"], row["factor"]))
    runs = {key: {row["seed"]: row for row in each} for key, each in groups.items()}
    differences = []
    for key in sorted(runs, key=lambda key: (key[0], key[1], scheme_order(base_of(key[2])), key[3])):
        variant, target, position, factor = key
        base, gated = base_of(position), runs[key]
        plain = runs.get((variant, target, base, factor), {})
        seeds = [
            seed
            for seed in sorted(gated.keys() & plain.keys())
            if all(gated[seed].get(key) == plain[seed].get(key) for key in ("length", "needles", "eval_seed"))
        ]
        if base == position or not seeds:
            continue
        each = [_hits(gated[seed], plain[seed]) for seed in seeds]
        means = [float(hits.mean()) for hits in each]
        low, high = student_interval(means) if len(each) > 1 else _bootstrap(each[0])
        differences.append(
            Difference(
                scheme=label(position), other=label(base), variant=variant, what=target, at=factor,
                # No difference of two shares lies outside.
                difference=float(np.mean(means)), low=max(low, -1.0), high=min(high, 1.0), seeds=len(seeds),
                documents=min(map(len, each)), higher_is_better=True,
            )
        )  # fmt: skip
    return differences


def far_back_differences(rows: Iterable[Record], *, gain: bool = False) -> list[Difference]:
    """Gated schemes against others, kind by kind and distance by distance: losses, or gains from the far text."""

    def key(row: Record) -> tuple[Any, ...]:
        return row["kind"], row["distance"], row["context"], repr(sorted(far_back_question(row).items()))

    return _differences(rows, key, lambda one, other: _by_document(one, other, gain), higher_is_better=gain)


def perplexity_differences(rows: Iterable[Record]) -> list[Difference]:
    """Gated schemes against others at every context, window by window."""
    rows = list(rows)
    several = len({row.get("align") or 0 for row in rows}) > 1

    def key(row: Record) -> tuple[Any, ...]:
        what = row["protocol"] if row.get("stratum") is None else f"{row['protocol']}, stratum {row['stratum']}"
        if several and row.get("align"):
            what = f"{what}, tokens that {row['align']:,} precede"
        return what, row["context"], row.get("plan"), row.get("precision")

    return _differences(rows, key, _by_window)


def window_difference(row: Record, other: Record) -> Difference:
    """One run against another at one context, on the same windows; refuses rows of others."""
    if any(row[key] != other[key] for key in ("plan", "stratum")):
        raise invalid_argument("rows", (row["run"], other["run"]), "two of the same windows of the same corpus")
    difference = _over_seeds({0: row}, {0: other}, _by_window, what=row["protocol"], at=row["context"])
    assert difference is not None
    return difference


def _hits(gated: Record, plain: Record) -> Floats:
    """Per sample: 1 where only the gated model was right, −1 where only the other was."""
    right, other = (np.array(unpack_hits(row["hits"], row["samples"]), dtype=np.float64) for row in (gated, plain))
    shared = min(len(right), len(other))
    return right[:shared] - other[:shared]


def _bootstrap(difference: Floats) -> tuple[float, float]:
    values = np.array([-1, 0, 1])
    # Drawing n samples with replacement is drawing how many of each value come.
    shares = (difference[:, None] == values).mean(0)
    means = np.random.default_rng(0).multinomial(len(difference), shares, size=RESAMPLES) @ values / len(difference)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _differences(
    rows: Iterable[Record], key: Callable[[Record], tuple[Any, ...]], paired: Paired, *, higher_is_better: bool = False
) -> list[Difference]:
    """Gated schemes against others among rows of one key, which begins with what they measure, and where."""
    each = (
        _over_seeds(first, second, paired, what=what, at=at, higher_is_better=higher_is_better)
        for (what, at, *_), records in group_by(rows, key).items()
        for first, second in _pairs(records)
    )
    return [difference for difference in each if difference is not None]


def _pairs(records: Sequence[Record]) -> list[tuple[Runs, Runs]]:
    """Each gated scheme with its base, with itself without a variant, and with the rivals, where seeds are shared."""
    groups = {key: {row["seed"]: row for row in rows} for key, rows in by_scheme(records).items()}
    pairs: list[tuple[Runs, Runs]] = []
    for (position, variant), runs in groups.items():
        base = base_of(position)
        if base == position:
            continue
        rivals = ((rival, which) for rival in _RIVALS for which in (variant, ""))
        others = dict.fromkeys(((base, variant), (base, ""), (position, ""), *rivals))
        for other in others:
            rival = groups.get(other, {}) if other != (position, variant) else {}
            if runs.keys() & rival.keys():
                pairs.append((runs, rival))
    return pairs


def _over_seeds(first: Runs, second: Runs, paired: Paired, **about: Any) -> Difference | None:
    """The difference of two schemes over the seeds of both; None where they share no text."""
    units = [paired(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]
    units = [unit for unit in units if len(unit[0])]
    if not units:
        return None
    means = [float(sums.sum() / tokens.sum()) for sums, tokens in units]
    low = high = None
    if len(units) > 1:
        low, high = student_interval(means)
    # One document says nothing about others.
    elif len(units[0][0]) > 1:
        low, high, _ = weighted_interval(*units[0], np.arange(len(units[0][0])))
    scheme, other = (name(next(iter(runs.values()))) for runs in (first, second))
    return Difference(
        scheme=scheme, other=other, difference=mean_of(means).mean, low=low, high=high,
        seeds=len(units), documents=min(len(sums) for sums, _ in units), **about,
    )  # fmt: skip


def _by_document(first: Record, second: Record, gain: bool) -> Documents:
    """Differences of sums, and tokens, of the documents that both have."""

    def sums(row: Record) -> dict[str, float]:
        control = row["document_control"] if gain else [0.0] * len(row["document"])
        sign = -1 if gain else 1
        each = (c + sign * nll for c, nll in zip(control, row["document_nll"], strict=True))
        return dict(zip(row["document"], each, strict=True))

    one, two = sums(first), sums(second)
    counts = dict(zip(first["document"], first["document_tokens"], strict=True))
    shared = [(one[document] - two[document], counts[document]) for document in one if document in two]
    table = np.array(shared, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _by_window(first: Record, second: Record) -> Documents:
    """Differences of summed losses, and tokens, by document: windows of one document are not independent."""
    one, other = (np.array(row["window_nll"], dtype=np.float64) for row in (first, second))
    tokens = np.broadcast_to(np.array(first.get("window_tokens", 1.0), dtype=np.float64), one.shape)
    documents = np.array(first.get("window_document", range(len(one))))
    sums, counts = (np.bincount(documents, values).astype(np.float64) for values in ((one - other) * tokens, tokens))
    return sums, counts
