"""Tables of the needle task, from results/niah and results/forgetting."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median, stdev

import numpy as np

from gape.report.schemes import label
from gape.report.statistics import student_interval
from tables.markdown import Record, interval, select, stored, table

#: Schemes in the order of the tables, with what they are switched to for evaluation.
SCHEMES = [
    ("nope", "nope"), ("nope+gape", "nope+gape"), ("rope", "rope"), ("rope+gape", "rope+gape"), ("rope", "yarn"),
    ("rope+gape", "yarn+gape"), ("p-rope", "p-rope"), ("p-rope+gape", "p-rope+gape"), ("yarn", "yarn"),
    ("yarn+gape", "yarn+gape"), ("alibi", "alibi"), ("fox", "fox"),
]  # fmt: skip
FACTORS = (1, 2, 4, 8, 16)
TARGETS = {"last": "last needle", "first": "first needle", "middle": "middle needle"}
#: Kinds of token whose landmarks are shown.
KINDS = {"digit": "digits", "filler": "fillers", "key": "KEY", "equals": "="}
#: Variants of niah/landmarks by what they change.
LANDMARKS = {
    ("plain", "p-rope+gape"): "as in the paper", ("long", "p-rope+gape"): "all 5,000 steps",
    ("fast-gates", "p-rope+gape"): "gates at 5 times the rate", ("floor", "p-rope+gape"): "gate floor 4",
    ("l1-0.01", "p-rope+gape"): "`lambda_l1` 0.01", ("l1-0.1", "p-rope+gape"): "`lambda_l1` 0.1",
    ("plain", "nope+gape"): "NoPE+GAPE, as in the paper", ("l1-0.01", "nope+gape"): "NoPE+GAPE, `lambda_l1` 0.01",
}  # fmt: skip


def mean_and_deviation(rows: Sequence[Record]) -> str:
    """Accuracy over seeds."""
    values = [row["accuracy"] for row in rows]
    return f"{fmean(values):.2f} ± {stdev(values):.2f}" if len(values) > 1 else f"{values[0]:.2f}"


def accuracy(target: str) -> str:
    """Accuracy of every scheme by length, mean ± standard deviation over three seeds."""
    rows = select(stored("results/niah/paper/results.jsonl"), target=target)
    lines = []
    for position, evaluated in SCHEMES:
        of_scheme = select(rows, position=position, evaluated=evaluated)
        if of_scheme:
            cells = [mean_and_deviation(select(of_scheme, factor=factor)) for factor in FACTORS]
            lines.append([label(position, evaluated), *cells])
    return table([TARGETS[target], *(f"{factor}× ({2048 * factor:,})" for factor in FACTORS)], lines)


def by_seed(position: str, target: str, factor: int) -> dict[int, float]:
    """Accuracy of a scheme at a multiple of the training length, by seed."""
    rows = stored("results/niah/paper/results.jsonl")
    own = select(rows, position=position, evaluated=position, target=target, factor=factor)
    return {row["seed"]: row["accuracy"] for row in own}


def gain(one: str, other: str, target: str, factor: int) -> tuple[float, float, float]:
    """How much accuracy a scheme has more than another, seed by seed, with Student's 95% interval."""
    first, second = by_seed(one, target, factor), by_seed(other, target, factor)
    each = [first[seed] - second[seed] for seed in sorted(first)]
    return fmean(each), *student_interval(each)


def gains(target: str) -> str:
    """What gates add to each scheme, with intervals over the three seeds."""
    lines = []
    for base in ("nope", "rope", "p-rope", "yarn"):
        cells = [interval(*gain(f"{base}+gape", base, target, factor), "+.2f") for factor in FACTORS]
        lines.append([f"{label(base + '+gape')} − {label(base)}", *cells])
    return table([TARGETS[target], *(f"{factor}×" for factor in FACTORS)], lines)


def query_gates() -> str:
    """The query gate at `?` in the first layer's two heads, mean over seeds."""
    rows = stored("results/niah/paper/analysis.jsonl")
    lines = []
    for base in ("nope", "rope", "p-rope", "yarn"):
        cells = []
        for target in ("last", "first"):
            records = select(rows, position=f"{base}+gape", target=target)
            heads = np.mean([np.mean(row["gates"]["query_gate"], axis=0)[0] for row in records], axis=0)
            cells.append(", ".join(f"{value:.2f}" for value in heads))
        lines.append([label(f"{base}+gape"), *cells])
    return table(["gate at `?`, first layer's heads", "last needle", "first needle"], lines)


def landmarks() -> str:
    """Mean landmarks of the first layer's two heads by kind of token, first needle."""
    home = "results/niah/landmarks"
    lines = []
    for (variant, position), name in LANDMARKS.items():
        values = {"variant": variant, "position": position, "target": "first"}
        records = select(stored(f"{home}/analysis.jsonl"), **values)
        cells = []
        for kind in KINDS:
            heads = np.mean([np.mean(row["gates"]["landmark"][kind], axis=0)[0] for row in records], axis=0)
            cells.append(", ".join(f"{value:.2f}" for value in heads))
        right = [row["accuracy"] for row in select(stored(f"{home}/results.jsonl"), factor=1, **values)]
        lines.append([name, str(len(records)), *cells, f"{fmean(right):.2f}"])
    return table(["setting", "seeds", *KINDS.values(), "accuracy at 1×"], lines)


#: Variants of niah/far-small by what they change in training.
FAR = {
    "plain": "as in `niah/demo`", "mixed": "lengths from 32 to 128", "random": "positions drawn from 512",
    "skip": "positions that jump once, up to 512", "mixed-skip": "both of lengths and jumps",
}  # fmt: skip


def far_small(target: str) -> str:
    """Accuracy of small models by what their training changes, mean ± standard deviation over three seeds."""
    rows = select(stored("results/niah/far-small/results.jsonl"), target=target)
    lines = []
    for variant, name in FAR.items():
        for position in ("p-rope", "p-rope+gape", "rope+gape", "hope+gape"):
            own = select(rows, variant=variant, position=position)
            cells = [mean_and_deviation(select(own, factor=factor)) for factor in (1, 2, 4, 8)]
            lines.append([name, label(position), *cells])
    return table(["training", TARGETS[target], *(f"{factor}× ({128 * factor:,})" for factor in (1, 2, 4, 8))], lines)


def precision(position: str, target: str) -> str:
    """`rank2` beside `split` in bfloat16, every seed."""
    rows = select(stored("results/niah/precision/results.jsonl"), position=position, target=target)
    lines = []
    for impl in ("rank2", "split"):
        by = {(row["factor"], row["seed"]): row["accuracy"] for row in select(rows, variant=impl)}
        cells = [", ".join(f"{by[factor, seed]:.2f}" for seed in range(3)) for factor in FACTORS]
        lines.append([f"`{impl}`", *cells])
    return table([f"{label(position)}, {TARGETS[target]}", *(f"{factor}×" for factor in FACTORS)], lines)


def tied() -> str:
    """Accuracy at the training length with the output tied to the embedding, every seed."""
    rows = select(stored("results/niah/tied/results.jsonl"), factor=1)
    lines = []
    for position in dict.fromkeys(position for position, _ in SCHEMES):
        own = select(rows, position=position, evaluated=position)
        if own:
            by = {(row["target"], row["seed"]): row["accuracy"] for row in own}
            cells = [
                ", ".join(f"{by[target, seed]:.2f}" for seed in range(3) if (target, seed) in by)
                for target in ("last", "first")
            ]
            lines.append([label(position), *cells])
    return table(["tied output, 1×, by seed", "last needle", "first needle"], lines)


def step_time() -> str:
    """Time of a training step of the needle model."""
    lines, times = [], {}
    for position in ("p-rope", "p-rope+gape"):
        rows = select(stored(f"results/niah/speed/{position}/runtime.jsonl"), event="timing")
        times[position] = median(row["seconds_per_step"] for row in rows if row["step"] > 100) * 1e3
        lines.append([label(position), f"{times[position]:.2f}", f"{times[position] / times['p-rope']:.2f}"])
    return table(["needle model, batch 64 × 2,048", "ms per step", "times p-RoPE"], lines)
