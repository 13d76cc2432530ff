"""Tables of means and deviations over seeds, as plain text, Markdown or HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from gape.report.results import Results
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
