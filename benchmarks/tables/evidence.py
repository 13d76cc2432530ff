"""What the stored rows say of each claim of the paper: a figure with its 95% interval, and which of its parts hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gape.report.results import recall_question
from gape.report.schemes import group_by, label, name
from gape.report.series import same_settings
from gape.report.statistics import Difference, far_back_differences, mean_of, perplexity_differences, student_interval
from tables.markdown import Record, every, interval, only, select, stored
from tables.needle import by_seed, gain

GATED = "p-RoPE+GAPE"
#: From here on nearly every needle is found, and up to here no more than by chance, which is 0.1.
NEARLY_ALL, CHANCE = 0.95, 0.15
Floats = Any
Estimate = tuple[float, float, float]


class Evidence(NamedTuple):
    """Our figure, and for each part of the claim whether it holds; no parts where nothing was measured."""

    figure: str
    parts: tuple[bool, ...] = ()

    @property
    def verdict(self) -> str:
        """Held, not held, partly (how many of how many), or not measured."""
        if not self.parts:
            return "not measured"
        if all(self.parts):
            return "held"
        return f"partly ({sum(self.parts)} of {len(self.parts)})" if any(self.parts) else "not held"


NOT_MEASURED = Evidence("not measured")


def over(values: Iterable[float]) -> Estimate:
    """Mean and Student's interval over seeds or samples."""
    numbers = [float(value) for value in values]
    return mean_of(numbers).mean, *student_interval(numbers)


def _text(title: str, estimate: Estimate, form: str = "+.2f") -> str:
    return f"{title} {interval(*estimate, form)}"


def _above(estimates: Iterable[Estimate]) -> tuple[bool, ...]:
    return tuple(low > 0 for _, low, _ in estimates)


def _below(estimates: Iterable[Estimate]) -> tuple[bool, ...]:
    return tuple(high < 0 for _, _, high in estimates)


def _accuracy(position: str, target: str, factor: int) -> Estimate:
    mean, low, high = over(by_seed(position, target, factor).values())
    return mean, max(low, 0.0), min(high, 1.0)


def found(position: str, factor: int, **expected: bool) -> Evidence:
    """Whether needles are found nearly always, or as by chance."""
    each = {target: _accuracy(position, target, factor) for target in expected}
    text = ", ".join(_text(target, estimate, ".2f") for target, estimate in each.items())
    parts = (each[at][0] >= NEARLY_ALL if many else each[at][0] <= CHANCE for at, many in expected.items())
    return Evidence(f"{factor}×: {text}", tuple(parts))


def fades(*cases: tuple[str, str, int]) -> Evidence:
    """How accuracy changes from the training length to a multiple of it."""
    each = {}
    for position, target, factor in cases:
        near, far = by_seed(position, target, 1), by_seed(position, target, factor)
        each[f"{label(position)}, {target}, {factor}×:"] = over(far[seed] - near[seed] for seed in near)
    return Evidence("; ".join(_text(*one) for one in each.items()), _below(each.values()))


def gains(*cases: tuple[str, str, str, int]) -> Evidence:
    """How much accuracy one scheme has more than another."""
    each = {f"{label(one)} − {label(other)}, {target}, {factor}×:": gain(one, other, target, factor)
            for one, other, target, factor in cases}  # fmt: skip
    return Evidence("; ".join(_text(*one) for one in each.items()), _above(each.values()))


def query_gate() -> Evidence:
    """The gate at `?` in the first layer, for near and for far needles."""
    ends = {}
    for target in ("last", "first"):
        rows = [row for row in stored("results/niah/paper/analysis.jsonl") if row["target"] == target and row["gates"]]
        groups = group_by(rows, lambda row: row["position"]).values()
        heads = [np.mean([np.mean(row["gates"]["query_gate"], axis=0)[0] for row in own], axis=0) for own in groups]
        ends[target] = (np.min(heads), np.max(heads))
    text = ", ".join(f"{target} {low:.2f} to {high:.2f}" for target, (low, high) in ends.items())
    return Evidence(text, (bool(ends["last"][0] > 10 * ends["first"][1]),))


def landmark_peaks() -> Evidence:
    """Landmarks of digits less those of fillers on the first needle, as in the paper and with a price."""
    each = {}
    for variant, title in (("plain", "as in the paper"), ("l1-0.01", "with a price of 0.01")):
        rows = select(stored("results/niah/landmarks/analysis.jsonl"), variant=variant, position="p-rope+gape",
                      target="first")  # fmt: skip
        means = [[np.mean([sample[0] for sample in row["gates"]["landmark"][kind]]) for kind in ("digit", "filler")]
                 for row in rows]  # fmt: skip
        each[title] = over(digit - filler for digit, filler in means)
    return Evidence("digits − fillers: " + ", ".join(_text(*one) for one in each.items()), _above(each.values()))


def _needle_entropy(position: str, target: str, factor: int) -> dict[int, Floats]:
    """Mean entropy of each layer by seed."""
    rows = select(stored("results/niah/paper/analysis.jsonl"), position=position, target=target)
    spreads = {row["seed"]: only(row["spread"], factor=factor) for row in rows}
    return {seed: np.mean(spread["entropy"], axis=(0, 2)) for seed, spread in spreads.items()}


def needle_entropy(target: str, factor: int, bases: Sequence[str], layer: int | None = None) -> Evidence:
    """Change of entropy by gates on the same samples: of a layer, or of the mean over both."""
    each = {}
    for base in bases:
        plain, gated = (_needle_entropy(position, target, factor) for position in (base, f"{base}+gape"))
        changes = [gated[seed] - plain[seed] for seed in plain.keys() & gated.keys()]
        each[label(base)] = over(change.mean() if layer is None else change[layer] for change in changes)
    return Evidence(f"{factor}×: " + ", ".join(_text(*one) for one in each.items()), _below(each.values()))


def alibi_entropy() -> Evidence:
    """Change of ALiBi's entropy from the training length to four times it."""
    each = {}
    for target in ("last", "first"):
        near, far = (_needle_entropy("alibi", target, factor) for factor in (1, 4))
        each[target] = over((far[seed] - near[seed]).mean() for seed in near)
    return Evidence("1× to 4×: " + ", ".join(_text(*one) for one in each.items()), _below(each.values()))


def _pairs(rows: list[Record], other: str, differences: Callable[[list[Record]], list[Difference]]) -> list[Difference]:
    """GAPE less another scheme: over three shared seeds or more, else seed by seed over books."""
    own = [row for row in rows if name(row) in (GATED, other)]
    shared = set.intersection(*({row["seed"] for row in own if name(row) == one} for one in (GATED, other)))
    groups = [own] if len(shared) > 2 else [select(own, seed=seed) for seed in sorted(shared)]
    return [pair for each in groups for pair in differences(each) if (pair.scheme, pair.other) == (GATED, other)]


def _seed_by_seed(pairs: dict[str, list[Difference]], form: str) -> str:
    texts = {other: ", ".join(interval(pair.difference, pair.low, pair.high, form) for pair in own)
             for other, own in pairs.items()}  # fmt: skip
    return "; ".join(f"− {other}: {text}" for other, text in texts.items())


def perplexity() -> Evidence:
    """What gates take off the loss at 32 times the training length."""
    rows = select(every("results/lm/books*/perplexity.jsonl"), align=32768, context=32768)
    pairs = {other: _pairs(rows, other, perplexity_differences) for other in ("RoPE", "p-RoPE")}
    parts = (pair.direction == "better" for own in pairs.values() for pair in own)
    return Evidence(f"nats per token, {GATED} {_seed_by_seed(pairs, '+.2f')}", tuple(parts))


def planted() -> Evidence:
    """What a passage 8,192 tokens back is worth, against ALiBi, and against p-RoPE."""
    rows = select(every("results/lm/books*/far_back.jsonl"), kind="planted", distance=8192)
    pairs = {other: _pairs(rows, other, partial(far_back_differences, gain=True)) for other in ("ALiBi", "p-RoPE")}
    gains = ", ".join(f"{row['gain']:.4f}" for row in rows if name(row) == GATED)
    parts = (all(pair.direction == "better" for pair in pairs["ALiBi"]),
             all(pair.direction != "worse" for pair in pairs["p-RoPE"]))  # fmt: skip
    return Evidence(f"gain in nats per token {gains}; {_seed_by_seed(pairs, '+.4f')}", parts)


def recall() -> Evidence:
    """Far facts answered at 8 times the training length, as a share of those at 1×."""
    rows = select(every("results/lm/recall/recall.jsonl"), what="far")
    schemes = {label(one): [row for row in same_settings(rows, recall_question) if name(row) == label(one)]
               for one in ("p-rope+gape", "alibi", "fox")}  # fmt: skip
    if not all(select(own, length=at) for own in schemes.values() for at in (1024, 8192)):
        return NOT_MEASURED
    rates = {one: [[row["match"] for row in select(own, length=at)] for at in (1024, 8192)]
             for one, own in schemes.items()}  # fmt: skip
    texts, kept = [], {}
    for one, (near, far) in rates.items():
        low, high = student_interval(far) if len(far) > 1 else (None, None)
        before, after = mean_of(near).mean, mean_of(far).mean
        texts.append(f"{one} {before:.2f} → {interval(after, low, high, '.2f')}")
        kept[one] = after / before if before else 0.0
    parts = (kept[GATED] >= 0.8, kept["ALiBi"] < 0.2, kept["FoX"] < 0.2)
    return Evidence(f"1× → 8×: {', '.join(texts)}", parts)
