"""Recall of language models by distance and context: numbers, tables and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gape.report.figures import draw_panels
from gape.report.results import Results, recall_question
from gape.report.series import Data, language_rows, same_settings, scheme_lines, train_length
from gape.report.statistics import mean_of, student_interval
from gape.report.tables import Table
from gape.utils.jsonl import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Several facts of one text asked for together, and tokens generated behind a text.
SEVERAL, GENERATE = "several", "generate"
PANELS = {"near": "Fact near", "middle": "Fact halfway", "far": "Fact far", SEVERAL: "Several facts at once"}


def recall(results: Results) -> Data:
    """The share of facts answered by context, a panel per distance, a line per scheme; intervals over seeds."""
    rows = language_rows(results, "recall")
    panels = [{"what": what, "title": title, "lines": _lines(rows, what, "match")} for what, title in PANELS.items()]
    return {"panels": [panel for panel in panels if panel["lines"]], "train_length": train_length(results)}


def draw(data: Data) -> Figure:
    """Facts answered against context, a panel per distance."""
    return draw_panels(data, "Facts answered")


def tables(results: Results) -> list[Table]:
    """A table per distance, and what generation costs; none where there are no rows."""
    kinds = [(f"Recall, {title.lower()}: share of facts answered", what, "match", 1.0, ".3f")
             for what, title in PANELS.items()]  # fmt: skip
    kinds += [
        ("Tokens per second, one text", GENERATE, "tokens_per_second", 1.0, ".1f"),
        ("Cache behind a text, MiB", GENERATE, "cache_bytes", 2.0**20, ".2f"),
    ]
    rows = results.of("recall")
    every = (_table(title, _lines(rows, what, key), unit, form) for title, what, key, unit, form in kinds)
    return [table for table in every if table.rows]


def _table(title: str, lines: Sequence[Data], unit: float, form: str) -> Table:
    """A row per scheme, a column per context: the mean, and half of its 95% interval over seeds."""
    lengths = sorted({length for line in lines for length in line["at"]})
    cells = []
    for line in lines:
        at = dict(zip(line["at"], zip(line["mean"], line["high"], strict=True), strict=True))
        row = [line["label"], str(max(line["n"]))]
        for length in lengths:
            mean, high = at.get(length, (None, None))
            spread = "" if high is None or mean is None else f" ± {(high - mean) / unit:{form}}"
            row.append("–" if mean is None else f"{mean / unit:{form}}{spread}")
        cells.append(tuple(row))
    header = ("Scheme", "seeds", *(f"{length:,}" for length in lengths))
    return Table(title=title, header=header, rows=tuple(cells))


def _lines(rows: Sequence[Record], what: str, key: str) -> list[Data]:
    """A line per scheme of rows of one kind, measured in the way that most of them are."""

    def pool(runs: Sequence[Record]) -> Data:
        values = [row[key] for row in runs]
        low, high = student_interval(values) if len(values) > 1 else (None, None)
        return {"mean": mean_of(values).mean, "low": low, "high": high, "n": len(values)}

    alike = same_settings([row for row in rows if row["what"] == what], recall_question)
    return scheme_lines(alike, "length", pool)
