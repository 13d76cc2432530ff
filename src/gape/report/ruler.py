"""Tables of stored rows: the paper's layout, who differs from whom on the same samples, and what an ablation costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gape.report.lm_figures import looks
from gape.report.lm_results import refuse_same_seed
from gape.report.lm_summary import name, schemes
from gape.report.results import Record, Results
from gape.report.series import Data, NoData
from gape.report.style import FAINT, new_figure
from gape.report.tables import Table
from gape.tasks.perplexity_rows import Floats, weighted_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The model that ablations are measured against.
FULL = ("p-rope+gape", "")
#: What sizes of models trained here begin with.
OURS = "GPT-"

Column = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Ranked(Table):
    """A table in which the best of a column stands out, and the second best too.

    Attributes:
        second: (row, column) of the second best cells.
    """

    second: frozenset[tuple[int, int]] = field(default_factory=frozenset)

    def text(self) -> str:
        """Aligned columns; a star for the best, a plus for the second."""
        return _with(self, "", " *", "", " +").text()

    def markdown(self) -> str:
        """A Markdown table; the best bold, the second underlined."""
        return _with(self, "**", "**", "<u>", "</u>").markdown()

    def html(self) -> str:
        """An HTML table; the best strong, the second underlined."""
        body = "".join(
            f"<tr>{''.join(f'<td>{self._html(r, c, cell)}</td>' for c, cell in enumerate(row))}</tr>\n"
            for r, row in enumerate(self.rows)
        )
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.header)
        caption = f"<caption>{escape(self.title)}</caption>"
        return f"<table>{caption}\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>"

    def _html(self, row: int, column: int, cell: str) -> str:
        tag = "strong" if (row, column) in self.strong else "u" if (row, column) in self.second else ""
        return f"<{tag}>{escape(cell)}</{tag}>" if tag else escape(cell)


def latex(table: Table) -> str:
    """A LaTeX table as the paper has it; the best bold, the second underlined."""
    marked = _with(table, r"\textbf{", "}", r"\underline{", "}")
    lines = [" & ".join(map(_tex, cells)) for cells in (table.header, *marked.rows)]
    columns = "ll" + "c" * (len(table.header) - 2)
    body = " \\\\\n".join([lines[0], "\\midrule\n" + lines[1], *lines[2:]]) if len(lines) > 1 else lines[0]
    return f"% {table.title}\n\\begin{{tabular}}{{{columns}}}\n\\toprule\n{body} \\\\\n\\bottomrule\n\\end{{tabular}}"


def _with(table: Table, before: str, after: str, start: str, end: str) -> Table:
    """The table with its marks written into the cells."""
    second = table.second if isinstance(table, Ranked) else frozenset()

    def cell(r: int, c: int, text: str) -> str:
        if (r, c) in table.strong:
            return f"{before}{text}{after}"
        return f"{start}{text}{end}" if (r, c) in second else text

    rows = tuple(tuple(cell(r, c, text) for c, text in enumerate(row)) for r, row in enumerate(table.rows))
    return Table(title=table.title, header=table.header, rows=rows)


def _tex(text: str) -> str:
    for sign, written in _TEX.items():
        text = text.replace(sign, written)
    return text


#: What LaTeX reads as something else, or not at all.
_TEX = {"&": r"\&", "_": r"\_", "%": r"\%", "#": r"\#", "±": r"$\pm$", "–": "--", "−": "$-$", "…": r"\dots{}"}


class Method(NamedTuple):
    """A scheme of one model: its name, and its rows by column, a row per seed."""

    model: str
    key: tuple[str, str]
    label: str
    rows: dict[Column, list[Record]]

    def values(self, column: Column, metric: str) -> Floats | None:
        """Each sample's value, a mean over seeds (samples,); None where it was not measured."""
        found = [row[f"sample_{metric}"] for row in self.rows.get(column, ()) if f"sample_{metric}" in row]
        return np.mean(np.array(found, dtype=np.float64), axis=0) if found else None

    def plan(self, column: Column) -> Any:
        """What is equal for equal samples."""
        return {row["plan"] for row in self.rows.get(column, ())}


def methods(rows: Iterable[Record]) -> list[Method]:
    """Rows by model and scheme; the later of two rows of one run, task and length counts.

    Raises:
        ValueError: rows of a model are of several precisions, or those of a scheme of one seed of several runs, or its
            seeds of different samples.
    """
    rows = list(rows)
    for model in {row["model"] for row in rows}:
        precisions = {row.get("precision") for row in rows if row["model"] == model}
        if len(precisions) > 1:
            told = ", ".join(sorted(map(str, precisions)))
            raise ValueError(f"rows: those of {model} were measured in {told}; --precision of gape ruler table picks")
    latest = {(row["run"], row["model"], row["task"], row["length"]): row for row in rows if row["samples"]}
    made = []
    for model in sorted({row["model"] for row in latest.values()}):
        own = [row for row in latest.values() if row["model"] == model]
        for scheme, records in schemes(own).items():
            by: dict[Column, list[Record]] = {}
            for row in records:
                by.setdefault((row["task"], row["length"]), []).append(row)
            found = Method(model, scheme, name(records[0]), by)
            for column in by:
                _refuse_other_seeds(found, column)
            made.append(found)
    return made


def _refuse_other_seeds(method: Method, column: Column) -> None:
    """Refuse rows of one scheme and column whose mean would be of different models, or of different samples."""
    seeds = {row["run"]: row["seed"] for row in method.rows[column]}
    refuse_same_seed(seeds, f"as {method.label} they are one; --name of gape ruler eval tells them apart")
    if len(method.plan(column)) > 1:
        label = f"{method.label} on {_header(column)}"
        raise ValueError(f"rows: seeds of {label} were measured on different samples; table them apart")


def columns(found: Sequence[Method]) -> list[Column]:
    """All columns by task and length, in the paper's order."""
    return sorted({column for method in found for column in method.rows})


def tables(rows: Iterable[Record]) -> list[Table]:
    """The table of losses, the one of matches where answers were generated, and the differences."""
    found = methods(rows)
    if not found:
        return []
    made = [ranking(found, "nll")]
    if any("match" in row for method in found for own in method.rows.values() for row in own):
        made.append(ranking(found, "match"))
    differences = difference_table(found)
    return made + ([differences] if differences else [])


_TITLES = {
    "nll": "RULER: answer NLL per token, mean ± std over samples; lower is better",
    "match": "RULER: string match of generated answers in percent, mean ± std over samples; higher is better",
}


def ranking(found: Sequence[Method], metric: str = "nll") -> Ranked:
    """The paper's table: a row per method, a column per task and length, best and second within each model.

    Where methods of a model were measured on different samples, none of that column stands out.
    """
    across, scale, form = columns(found), *((1.0, ".2f") if metric == "nll" else (100.0, ".1f"))
    strong, second, cells = set(), set(), []
    for method in found:
        values = [method.values(column, metric) for column in across]
        cells.append((method.model, method.label, *(_cell(value, scale, form) for value in values)))
    for model in dict.fromkeys(method.model for method in found):
        own = [r for r, method in enumerate(found) if method.model == model]
        for c, column in enumerate(across, 2):
            means = {r: v.mean() for r in own if (v := found[r].values(column, metric)) is not None}
            shown = {r: round(mean * scale, 2 if metric == "nll" else 1) for r, mean in means.items()}
            ranks = sorted(set(shown.values()), reverse=metric == "match")
            # Means over other samples are no better or worse.
            if len(ranks) > 1 and len({frozenset(found[r].plan(column)) for r in means}) == 1:
                strong |= {(r, c) for r, value in shown.items() if value == ranks[0]}
                second |= {(r, c) for r, value in shown.items() if value == ranks[1]}
    return Ranked(
        title=_TITLES[metric], header=("Model", "Method", *(_header(column) for column in across)), rows=tuple(cells),
        strong=frozenset(strong), second=frozenset(second),
    )  # fmt: skip


def difference_table(found: Sequence[Method], full: tuple[str, str] | None = None) -> Table | None:
    """Methods beside others of their model on the same samples; None where there are no two.

    Every gated scheme against every other; or all against the model `full`, where that is given.
    """
    cells = []
    for method in found:
        for other in (other for other in found if _stand_together(method, other, full)):
            for column in columns([method]):
                paired = difference(method, other, column)
                if paired is not None:
                    who = f"{method.label} − {other.label}"
                    interval = f"{paired.low:+.3f} … {paired.high:+.3f}"
                    cells.append((method.model, who, _header(column), str(paired.samples), f"{paired.mean:+.3f}",
                                  interval, paired.verdict))  # fmt: skip
    if not cells:
        return None
    header = ("Model", "Methods", "subset", "samples", "difference", "95% interval", "verdict")
    return Table(title="RULER: NLL per token beside another method, on the same samples", header=header,
                 rows=tuple(cells))  # fmt: skip


def _stand_together(method: Method, other: Method, full: tuple[str, str] | None) -> bool:
    variant = other.key[0].endswith("+gape") and other.key[1]
    wanted = other.key == full if full else method.key[0].endswith("+gape") and not variant
    return wanted and other is not method and other.model == method.model


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
        """In a word."""
        if self.samples == 1:
            return "one sample"
        return "not separable" if self.low <= 0 <= self.high else "worse" if self.mean > 0 else "better"


def difference(one: Method, other: Method, column: Column, metric: str = "nll") -> Paired | None:
    """`one` less `other`, sample by sample; None where they were not measured on the same samples."""
    values, beside = one.values(column, metric), other.values(column, metric)
    if values is None or beside is None or one.plan(column) != other.plan(column):
        return None
    each = values - beside
    return Paired(float(each.mean()), *_interval(each), float(beside.mean()), len(each))


def ablation(rows: Iterable[Record], full: tuple[str, str] = FULL) -> Table:
    """The change of NLL against the full model in percent; a star where the interval over samples leaves out zero.

    Args:
        rows: stored rows.
        full: position and variant of the full model.

    Raises:
        ValueError: the full model is not among them, or nothing stands beside it.
    """
    found = methods(rows)
    bases = {method.model: method for method in found if method.key == full}
    others = [method for method in found if method.key != full and method.model in bases]
    if not others:
        wanted = f"rows of {full[0]}{full[1] and ' ' + full[1]} and of models without a part of it"
        raise ValueError(f"rows: got those of {[method.label for method in found]}, expected {wanted}")
    across = columns(found)
    cells, strong = [], set()
    for r, method in enumerate(others):
        paired = [difference(method, bases[method.model], column) for column in across]
        cells.append((method.model, method.label, *(f"{p.percent(p.mean):+.2f}%" if p else "–" for p in paired)))
        strong |= {(r, c) for c, p in enumerate(paired, 2) if p and p.verdict in ("better", "worse")}
    label = next(iter(bases.values())).label
    return Table(
        title=f"RULER: change of answer NLL against {label}; above zero is worse",
        header=("Model", "Method", *(_header(column) for column in across)), rows=tuple(cells),
        strong=frozenset(strong),
    )  # fmt: skip


def _header(column: Column) -> str:
    task, length = column
    return f"{task}_{length // 1024}k" if length % 1024 == 0 else f"{task}_{length}"


def _cell(values: Floats | None, scale: float, form: str) -> str:
    if values is None:
        return "–"
    std = values.std(ddof=1) if len(values) > 1 else 0.0
    return f"{values.mean() * scale:{form}} ± {std * scale:{form}}"


def losses(results: Results) -> Data:
    """Mean answer NLL and its interval, by method and subset, of models trained here."""
    return _shown(_of(results, ours=True))


def others_losses(results: Results) -> Data:
    """The same of models of `transformers`."""
    return _shown(_of(results, ours=False))


def ablations(results: Results) -> Data:
    """The change of NLL against the full model in percent, by method and subset."""
    found = _of(results, ours=True)
    bases = {method.model: method for method in found if method.key == FULL}
    others = [method for method in found if method.key != FULL and method.model in bases]
    if not others:
        raise NoData(f"ruler: the results lack {FULL[0]} or models without a part of it")
    return _shown(others, bases)


def loss_tables(results: Results) -> list[Table]:
    """The tables of some results; none where they hold no rows."""
    return tables(results.measured.get("ruler", ()))


def ablation_tables(results: Results, full: tuple[str, str] = FULL) -> list[Table]:
    """The table of what an ablation costs, and the differences behind it with their intervals."""
    rows = results.measured.get("ruler", ())
    differences = difference_table(methods(rows), full)
    return [ablation(rows, full)] + ([differences] if differences else [])


_SAMPLES = (
    "gape ruler generate --tokenizer GPT2 --tasks cwe,niah_multikey_1,qa_2,vt --haystack TEXT --hotpotqa FILE "
    "--out samples"
)
#: Commands that make the results of GPT-2 with other positions.
MADE_OF_GPT2 = (
    f"{_SAMPLES}, for each scheme gape hf convert GPT2 --position SCHEME --context-length 1024 --out gpt2-SCHEME and "
    "gape hf finetune gpt2-SCHEME DATA --out runs/gpt2/SCHEME, then gape ruler eval runs/gpt2/*/model --data samples "
    "and gape ruler table runs/ruler --out results/ruler/124m"
)


def made_by(recipe: str, name: str) -> str:
    """Commands that make the results of a recipe's models."""
    return (
        f"{_SAMPLES}, gape lm train {recipe} data=DIR, gape ruler eval runs/{recipe}/* --data samples --tokenizer GPT2 "
        f"and gape ruler table runs/{recipe} --out results/ruler/{name}"
    )


def _shown(found: Sequence[Method], bases: Mapping[str, Method] | None = None) -> Data:
    """Means and intervals of methods, or of their differences from the full model in percent of its mean."""
    across = columns(found)
    entries = []
    for method in found:
        cells: list[tuple[float, float, float] | None] = []
        for column in across:
            if bases is None:
                each = method.values(column, "nll")
                cells.append(None if each is None else (float(each.mean()), *_interval(each)))
            else:
                p = difference(method, bases[method.model], column)
                cells.append(None if p is None else (p.percent(p.mean), p.percent(p.low), p.percent(p.high)))
        whose = f"{method.model} " if len({other.model for other in found}) > 1 else ""
        entries.append({"label": f"{whose}{method.label}", "position": method.key[0], "cells": cells})
    return {"columns": [_header(column) for column in across], "methods": entries, "percent": bases is not None}


def draw(data: Data) -> Figure:
    """A point with its interval for each method, side by side in each subset."""
    figure, axes = new_figure(max(6.4, 1.1 * len(data["columns"])), 3.4)
    ax, count, drawn = axes[0, 0], len(data["methods"]), looks(data["methods"])
    for number, method in enumerate(data["methods"]):
        at = [(c + 0.7 * (number + 0.5) / count - 0.35, cell) for c, cell in enumerate(method["cells"]) if cell]
        middle = [cell[0] for _, cell in at]
        reach = [[m - cell[1] for m, (_, cell) in zip(middle, at, strict=True)],
                 [cell[2] - m for m, (_, cell) in zip(middle, at, strict=True)]]  # fmt: skip
        look = {**drawn[number], "linestyle": "none"}
        ax.errorbar([x for x, _ in at], middle, reach, label=method["label"], elinewidth=1.2, **look)
    ax.set_xticks(range(len(data["columns"])), data["columns"], rotation=30, ha="right")
    ax.set_ylabel("Change of answer NLL (%)" if data["percent"] else "Answer NLL (nats per token)")
    if data["percent"]:
        ax.axhline(0, color=FAINT, linewidth=0.8)
    figure.legend(loc="outside lower center", ncols=min(4, count))
    return figure


def _of(results: Results, *, ours: bool) -> list[Method]:
    rows = [row for row in results.measured.get("ruler", ()) if row["model"].startswith(OURS) == ours]
    if not rows:
        raise NoData(f"ruler: the results hold no rows of gape ruler eval of {'our' if ours else 'other'} models")
    return methods(rows)


def _interval(each: Floats) -> tuple[float, float]:
    low, high, _ = weighted_interval(each, np.ones_like(each), np.arange(len(each)))
    return low, high


#: What tables may be written as.
FORMATS: dict[str, Callable[[Table], str]] = {
    "text": lambda table: table.text(),
    "markdown": lambda table: table.markdown(),
    "latex": latex,
}
