"""RULER: the paper's tables of answer losses, differences on the same samples, and what an ablation costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gape.report.results import Results, refuse_same_seed
from gape.report.schemes import by_scheme, group_by, name
from gape.report.statistics import verdict
from gape.report.tables import Table, interval
from gape.tasks.perplexity import Floats, weighted_interval
from gape.utils.jsonl import Record

#: The model that ablations are measured against.
FULL = ("p-rope+gape", "")

Column = tuple[str, int]


class Method(NamedTuple):
    """A scheme of one model: its name, and its rows by column, a row per seed."""

    model: str
    key: tuple[str, str]
    label: str
    rows: dict[Column, list[Record]]

    def values(self, column: Column, metric: str = "nll") -> Floats | None:
        """Each sample's value, a mean over seeds (samples,); None where it was not measured."""
        samples = [row[f"sample_{metric}"] for row in self.rows.get(column, ()) if f"sample_{metric}" in row]
        return np.mean(np.array(samples, dtype=np.float64), axis=0) if samples else None

    def plan(self, column: Column) -> frozenset[Any]:
        """What is equal for equal samples."""
        return frozenset(row["plan"] for row in self.rows.get(column, ()))


class Paired(NamedTuple):
    """How much more one method has than another, its 95% interval over samples, the other's mean, and samples."""

    mean: float
    low: float
    high: float
    base: float
    samples: int

    def percent(self, value: float) -> float:
        """A difference in percent of the other's mean."""
        return 100 * value / self.base

    @property
    def verdict(self) -> str:
        """In a word; one sample decides nothing."""
        return "one sample" if self.samples == 1 else verdict(self.mean, self.low, self.high)


def methods(rows: Iterable[Record]) -> list[Method]:
    """Rows by model and scheme; the later of two rows of one run, task and length counts.

    Refused are several precisions of a model, several runs of one seed of a scheme, and seeds of different samples.
    """
    rows = list(rows)
    for model, own in group_by(rows, lambda row: row["model"]).items():
        precisions = sorted({str(row.get("precision")) for row in own})
        if len(precisions) > 1:
            which = ", ".join(precisions)
            raise ValueError(f"rows: those of {model} were measured in {which}; --precision of gape ruler table picks")
    latest = {(row["run"], row["model"], row["task"], row["length"]): row for row in rows if row["samples"]}
    schemes = []
    for model, own in sorted(group_by(latest.values(), lambda row: row["model"]).items()):
        for scheme, records in by_scheme(own).items():
            label, by_column = name(records[0]), group_by(records, lambda row: (row["task"], row["length"]))
            schemes.append(Method(model, scheme, label, by_column))
            for column, seeds in by_column.items():
                instead = f"as {label} they are one; --name of gape ruler eval tells them apart"
                refuse_same_seed({row["run"]: row["seed"] for row in seeds}, instead)
                if len(schemes[-1].plan(column)) > 1:
                    where = f"{label} on {_header(column)}"
                    raise ValueError(f"rows: seeds of {where} were measured on different samples; table them apart")
    return schemes


def columns(schemes: Sequence[Method]) -> list[Column]:
    """All columns by task and length, in the paper's order."""
    return sorted({column for method in schemes for column in method.rows})


def difference(one: Method, other: Method, column: Column) -> Paired | None:
    """The loss of `one` less that of `other`, sample by sample; None where they were measured on other samples."""
    values, others = one.values(column), other.values(column)
    if values is None or others is None or one.plan(column) != other.plan(column):
        return None
    each = values - others
    low, high, _ = weighted_interval(each, np.ones_like(each), np.arange(len(each)))
    return Paired(float(each.mean()), low, high, float(others.mean()), len(each))


def tables(results: Results) -> list[Table]:
    """The table of losses, that of matches where answers were generated, and the differences; none without rows."""
    schemes = methods(results.of("ruler"))
    if not schemes:
        return []
    metrics = ["nll"] + ["match"] * any("match" in row for row in results.of("ruler") if row["samples"])
    return [ranking(schemes, metric) for metric in metrics] + difference_tables(schemes)


def ablation_tables(results: Results, full: tuple[str, str] = FULL) -> list[Table]:
    """The table of what an ablation costs, and the differences behind it with their intervals."""
    schemes = methods(results.of("ruler"))
    return [ablation(schemes, full), *difference_tables(schemes, full)]


_TITLES = {
    "nll": "RULER: answer NLL per token, mean ± std over samples; lower is better",
    "match": "RULER: string match of generated answers in percent, mean ± std over samples; higher is better",
}


def ranking(schemes: Sequence[Method], metric: str = "nll") -> Table:
    """The paper's table: a row per method, a column per task and length, best and second within each model.

    Where methods of a model were measured on different samples, none of that column stands out.
    """
    across, scale, digits = columns(schemes), *((1.0, 2) if metric == "nll" else (100.0, 1))
    values = [[method.values(column, metric) for column in across] for method in schemes]
    rows = tuple(
        (method.model, method.label, *(_cell(value, scale, digits) for value in own))
        for method, own in zip(schemes, values, strict=True)
    )
    strong, second = set[tuple[int, int]](), set[tuple[int, int]]()
    for own in group_by(range(len(schemes)), lambda r: schemes[r].model).values():
        for c, column in enumerate(across):
            shown = {r: round(v.mean() * scale, digits) for r in own if (v := values[r][c]) is not None}
            ranks = sorted(set(shown.values()), reverse=metric == "match")
            # Means over other samples are no better or worse.
            if len(ranks) > 1 and len({schemes[r].plan(column) for r in shown}) == 1:
                for cells, rank in ((strong, ranks[0]), (second, ranks[1])):
                    cells.update((r, c + 2) for r, value in shown.items() if value == rank)
    header = ("Model", "Method", *map(_header, across))
    return Table(title=_TITLES[metric], header=header, rows=rows, strong=frozenset(strong), second=frozenset(second))


def difference_tables(schemes: Sequence[Method], full: tuple[str, str] | None = None) -> list[Table]:
    """Methods beside others of their model on the same samples; none where there are no two.

    Every gated scheme against every other; or all against the model `full`, where that is given.
    """
    rows = []
    for method in schemes:
        gated = method.key[0].endswith("+gape")
        for other in schemes:
            variant = other.key[0].endswith("+gape") and other.key[1]
            compared = other.key == full if full else gated and not variant
            if not compared or other is method or other.model != method.model:
                continue
            for column in columns([method]):
                p = difference(method, other, column)
                if p is not None:
                    cells = (str(p.samples), f"{p.mean:+.3f}", interval(p.low, p.high, "+.3f"), p.verdict)
                    rows.append((method.model, f"{method.label} − {other.label}", _header(column), *cells))
    header = ("Model", "Methods", "subset", "samples", "difference", "95% interval", "verdict")
    title = "RULER: NLL per token beside another method, on the same samples"
    return [Table(title=title, header=header, rows=tuple(rows))] if rows else []


def ablation(schemes: Sequence[Method], full: tuple[str, str] = FULL) -> Table:
    """The change of NLL against the full model in percent; a star where the interval over samples leaves out zero.

    Refused where the full model is not among them, or nothing stands beside it.
    """
    bases = {method.model: method for method in schemes if method.key == full}
    others = [method for method in schemes if method.key != full and method.model in bases]
    if not others:
        expected = f"rows of {full[0]}{full[1] and ' ' + full[1]} and of models without a part of it"
        raise ValueError(f"rows: got those of {[method.label for method in schemes]}, expected {expected}")
    across = columns(schemes)
    rows, strong = [], set()
    for r, method in enumerate(others):
        paired = [difference(method, bases[method.model], column) for column in across]
        rows.append((method.model, method.label, *(f"{p.percent(p.mean):+.2f}%" if p else "–" for p in paired)))
        strong |= {(r, c) for c, p in enumerate(paired, 2) if p and p.verdict in ("better", "worse")}
    title = f"RULER: change of answer NLL against {next(iter(bases.values())).label}; above zero is worse"
    header = ("Model", "Method", *map(_header, across))
    return Table(title=title, header=header, rows=tuple(rows), strong=frozenset(strong))


def _header(column: Column) -> str:
    task, length = column
    return f"{task}_{length // 1024}k" if length % 1024 == 0 else f"{task}_{length}"


def _cell(values: Floats | None, scale: float, digits: int) -> str:
    if values is None:
        return "–"
    std = values.std(ddof=1) if len(values) > 1 else 0.0
    return f"{values.mean() * scale:.{digits}f} ± {std * scale:.{digits}f}"
