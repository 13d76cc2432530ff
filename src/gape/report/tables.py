"""Tables of the needle task: means and deviations over seeds, and which digits a model names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from gape.report.results import Results, scheme_order, unpack_hits
from gape.report.series import TARGET_ORDER
from gape.report.style import TARGETS, label
from gape.report.summary import Comparison, Curve, Mean, comparisons, curves


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of strings.

    Attributes:
        title: above it.
        header: names of the columns.
        rows: cells, as many per row as columns.
        strong: (row, column) of the cells that stand out.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: frozenset[tuple[int, int]] = field(default_factory=frozenset)

    def text(self) -> str:
        """Aligned columns; what stands out has a star."""
        cells = [self.header, *self._marked("", " *")]
        widths = [max(len(row[c]) for row in cells) for c in range(len(self.header))]
        lines = [
            "  ".join(
                cell.ljust(w) if c == 0 else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in cells
        ]
        return "\n".join([self.title, lines[0], "-" * len(lines[0]), *lines[1:]])

    def markdown(self) -> str:
        """A Markdown table under a bold title; what stands out is bold."""
        lines = [self.header, tuple("---" if c == 0 else "---:" for c in range(len(self.header)))]
        lines += self._marked("**", "**")
        return f"**{self.title}**\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in lines)

    def html(self) -> str:
        """An HTML table with the title as caption."""

        def row(cells: Sequence[str], tag: str, number: int = -1) -> str:
            return "".join(
                f"<{tag}><strong>{escape(cell)}</strong></{tag}>"
                if (number, c) in self.strong
                else f"<{tag}>{escape(cell)}</{tag}>"
                for c, cell in enumerate(cells)
            )

        body = "".join(f"<tr>{row(cells, 'td', number)}</tr>\n" for number, cells in enumerate(self.rows))
        head = f"<thead><tr>{row(self.header, 'th')}</tr></thead>"
        return f"<table><caption>{escape(self.title)}</caption>\n{head}\n<tbody>\n{body}</tbody></table>"

    def _marked(self, before: str, after: str) -> list[tuple[str, ...]]:
        return [
            tuple(f"{before}{cell}{after}" if (r, c) in self.strong else cell for c, cell in enumerate(row))
            for r, row in enumerate(self.rows)
        ]


def accuracy_tables(results: Results) -> list[Table]:
    """One table per target: a row per scheme, a column per length, mean ± deviation; the best stand out."""
    tables = []
    for target in TARGET_ORDER:
        found = curves(results.select(target=target))
        if not found:
            continue
        factors = sorted({factor for curve in found for factor in curve.factors})
        rows, means = [], []
        for curve in found:
            at = dict(zip(curve.factors, curve.means, strict=True))
            name = " · ".join(filter(None, (curve.variant, label(curve.position, curve.evaluated))))
            fewest, most = (pick(mean.n for mean in curve.means) for pick in (min, max))
            seeds = str(most) if fewest == most else f"{fewest}–{most}"
            rows.append((name, seeds, *(str(at[factor]) if factor in at else "–" for factor in factors)))
            means.append([at.get(factor) for factor in factors])
        header = ("Scheme", "seeds", *(_column(factor, found) for factor in factors))
        title = f"Accuracy, {TARGETS[target].lower()}"
        tables.append(Table(title=title, header=header, rows=tuple(rows), strong=_best(means)))
    return tables


def comparison_table(results: Results) -> Table | None:
    """What gates add to each base, with a 95% interval; None where no base has both."""
    found = comparisons(results)
    if not found:
        return None
    rows = tuple(
        (
            " · ".join(filter(None, (c.variant, f"{label(c.base)} → {label(c.base + '+gape')}", c.target))),
            f"{c.factor}×",
            str(c.seeds),
            f"{c.difference:+.3f}",
            f"{c.low:+.3f} … {c.high:+.3f}",
            _verdict(c),
        )
        for c in found
    )
    header = ("Gates added to", "length", "seeds", "accuracy", "95% interval", "verdict")
    return Table(title="What gates add, on the same seeds and samples", header=header, rows=rows)


def _column(factor: int, found: list[Curve]) -> str:
    """A length as a multiple of the training length, and in tokens where that is one number."""
    lengths = {
        length for curve in found for at, length in zip(curve.factors, curve.lengths, strict=True) if at == factor
    }
    return f"{factor}× ({lengths.pop():,})" if len(lengths) == 1 else f"{factor}×"


def _verdict(comparison: Comparison) -> str:
    if comparison.seeds == 1:
        return "one seed"
    if not comparison.separable:
        return "not separable"
    return "better" if comparison.difference > 0 else "worse"


def _best(means: list[list[Mean | None]]) -> frozenset[tuple[int, int]]:
    """The cells with the highest mean of their column, the two leading columns counted."""
    best = set()
    for column in range(len(means[0])):
        values = [row[column] for row in means]
        top = max((m.mean for m in values if m is not None), default=None)
        if top is not None and len(values) > 1:
            best |= {(r, column + 2) for r, m in enumerate(values) if m is not None and f"{m.mean:.2f}" == f"{top:.2f}"}
    return frozenset(best)


#: From this accuracy on a run has nothing to explain.
SOLVED = 0.95
#: A digit is named "always" or "never" within this much.
SURE = 0.05


def digit_accuracies(row: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    """How often the answer is right where it is 0 … 9, ten numbers, from a row of results (:data:`ROW_KEYS`)."""
    asked = _asked(row["length"], row["needles"], row["target"], row["eval_seed"], row["samples"])
    right = np.array(unpack_hits(row["hits"], row["samples"]), dtype=np.float64)
    return np.array([right[asked == digit].mean() if (asked == digit).any() else np.nan for digit in range(10)])


def digit_table(results: Results) -> Table | None:
    """Runs that do not solve the task at the length they were trained at, and the digits they name; None if all do."""
    unsolved = [
        row
        for row in results.rows
        if row["factor"] == 1 and row["evaluated"] == row["position"] and row["accuracy"] < SOLVED
    ]
    if not unsolved:
        return None
    rows = []
    for row in sorted(unsolved, key=lambda row: (row["target"], scheme_order(row["position"]), row["seed"])):
        named = digit_accuracies(row)
        always, never = (named >= 1 - SURE).sum(), (named <= SURE).sum()
        name = " · ".join(filter(None, (row["variant"], label(row["position"]), TARGETS[row["target"]].lower())))
        # Of few samples none may ask for some digit.
        sometimes = np.isfinite(named).sum() - always - never
        cells = (f"{row['accuracy']:.2f}", str(always), str(never), str(sometimes))
        rows.append((name, str(row["seed"]), *cells))
    header = ("Scheme", "seed", "accuracy", "digits always named", "never", "sometimes")
    return Table(title="Below 0.95 at the training length, by digit", header=header, rows=tuple(rows))


@lru_cache(maxsize=16)
def _asked(length: int, needles: int, target: str, seed: int, samples: int) -> npt.NDArray[np.int64]:
    """The digit that each test sample asks for, (samples,)."""
    from gape.tasks import niah  # noqa: PLC0415

    config = niah.NIAHConfig(length=length, n_needles=needles, target=target)
    drawn = niah.sample(config, samples, seed=seed, split="test")
    asked: npt.NDArray[np.int64] = (drawn.targets[:, -1] - niah.DIGIT_0).numpy()
    return asked
