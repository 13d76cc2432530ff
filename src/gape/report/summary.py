"""Numbers over seeds: means and deviations, and whether two schemes can be told apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gape.report.results import Record, Results, scheme_order, unpack_hits

RESAMPLES = 2000
#: Student's t at 97.5% for 1, 2, … degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Mean:
    """A mean over n values and their sample standard deviation, None for a single one."""

    mean: float
    std: float | None
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f}"


def mean_of(values: Iterable[float]) -> Mean:
    """The mean of some numbers.

    Raises:
        ValueError: there are none.
    """
    numbers = list(values)
    if not numbers:
        raise ValueError("values: got none, expected at least one")
    mean = math.fsum(numbers) / len(numbers)
    if len(numbers) == 1:
        return Mean(mean, None, 1)
    variance = math.fsum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1)
    return Mean(mean, math.sqrt(variance), len(numbers))


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Accuracy of one scheme against length.

    Attributes:
        variant, position, evaluated, target: which.
        lengths, factors: where it was measured.
        values: of each seed, one tuple per length.
        means: over seeds, one per length.
    """

    variant: str
    position: str
    evaluated: str
    target: str
    lengths: tuple[int, ...]
    factors: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    means: tuple[Mean, ...]


def curves(results: Results) -> list[Curve]:
    """Accuracy by length for every scheme, variant and target, means over seeds, in the order of the rows."""
    groups: dict[tuple[str, str, str, str], list[Record]] = {}
    for row in results.rows:
        key = (row["variant"], row["position"], row["evaluated"], row["target"])
        groups.setdefault(key, []).append(row)
    made = []
    for (variant, position, evaluated, target), rows in groups.items():
        at: dict[int, list[Record]] = {}
        for row in rows:
            at.setdefault(row["factor"], []).append(row)
        factors = tuple(sorted(at))
        lengths = tuple(at[factor][0]["length"] for factor in factors)
        values = tuple(tuple(row["accuracy"] for row in at[factor]) for factor in factors)
        means = tuple(map(mean_of, values))
        names = {"variant": variant, "position": position, "evaluated": evaluated, "target": target}
        made.append(Curve(**names, lengths=lengths, factors=factors, values=values, means=means))
    return made


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What gates add to a base at one length.

    Attributes:
        variant, base, target, factor, length: which; `base` is the scheme without gates.
        difference: accuracy with gates less accuracy without.
        low, high: its 95% interval: of what gates do to any training run, or of these two runs where `seeds` is 1.
        seeds: pairs of runs it is made of.
    """

    variant: str
    base: str
    target: str
    factor: int
    length: int
    difference: float
    low: float
    high: float
    seeds: int

    @property
    def separable(self) -> bool:
        """Whether several seeds agree so far that the interval leaves out zero; one seed says nothing of others."""
        return self.seeds > 1 and (self.low > 0 or self.high < 0)


def comparisons(results: Results) -> list[Comparison]:
    """Every gated scheme against its base on the same seeds and the same samples; other pairs are left out.

    The interval is Student's over the differences of the seeds: resampling three of them would hardly ever show more
    than their own range, far less than 95% where seeds differ. With one pair the interval comes from a bootstrap over
    samples, with a fixed seed.
    """
    by_key: dict[tuple[Any, ...], dict[int, Record]] = {}
    for row in results.rows:
        if row["position"] == row["evaluated"]:
            key = (row["variant"], row["position"], row["target"], row["factor"])
            by_key.setdefault(key, {})[row["seed"]] = row
    made = []
    for (variant, position, target, factor), gated in by_key.items():
        base = position.removesuffix("+gape")
        plain = by_key.get((variant, base, target, factor), {})
        seeds = sorted(seed for seed in gated.keys() & plain.keys() if _same_samples(gated[seed], plain[seed]))
        if base == position or not seeds:
            continue
        differences = [_difference(gated[seed], plain[seed]) for seed in seeds]
        low, high = _interval(differences)
        mean, length = float(np.mean([d.mean() for d in differences])), gated[seeds[0]]["length"]
        where = {"variant": variant, "base": base, "target": target, "factor": factor, "length": length}
        made.append(Comparison(**where, difference=mean, low=low, high=high, seeds=len(seeds)))
    return sorted(made, key=lambda c: (c.variant, c.target, scheme_order(c.base), c.factor))


def _same_samples(gated: Record, plain: Record) -> bool:
    return all(gated.get(key) == plain.get(key) for key in ("length", "needles", "eval_seed"))


def _difference(gated: Record, plain: Record) -> NDArray[np.float64]:
    """Per sample: 1 where only the gated model was right, −1 where only the other was."""
    right, other = (np.array(unpack_hits(row["hits"], row["samples"]), dtype=np.float64) for row in (gated, plain))
    shared = min(len(right), len(other))
    return right[:shared] - other[:shared]


def _interval(differences: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    if len(differences) == 1:
        return _resampled(differences[0])
    found = mean_of(float(d.mean()) for d in differences)
    half = student(found.n - 1) * (found.std or 0.0) / math.sqrt(found.n)
    # No difference of two shares lies outside.
    return max(found.mean - half, -1.0), min(found.mean + half, 1.0)


def student(freedom: int) -> float:
    """The 97.5% point of Student's t for so many degrees of freedom, to three digits."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    # Fisher's expansion about the normal's 97.5% point.
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _resampled(difference: NDArray[np.float64]) -> tuple[float, float]:
    values = np.array([-1, 0, 1])
    # Drawing n samples with replacement is drawing how many of each value come.
    shares = (difference[:, None] == values).mean(0)
    means = np.random.default_rng(0).multinomial(len(difference), shares, size=RESAMPLES) @ values / len(difference)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
