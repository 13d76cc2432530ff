"""Recall of language models by distance and context: numbers, tables and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gape.report.figures import draw_panels
from gape.report.results import Results, recall_question
from gape.report.schemes import by_scheme, group_by, name
from gape.report.series import Data, language_rows, same_settings, train_length
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
    panels = [
        {"what": what, "title": title, "lines": _lines([row for row in rows if row["what"] == what], "match")}
        for what, title in PANELS.items()
    ]
    return {"panels": [panel for panel in panels if panel["lines"]], "train_length": train_length(results)}


def draw(data: Data) -> Figure:
    """Facts answered against context, a panel per distance."""
    return draw_panels(data, "Facts answered")


def tables(results: Results) -> list[Table]:
    """A table per distance, and what generation costs; none where there are no rows."""
    rows = results.of("recall")
    shown = [(f"Recall, {title.lower()}: share of facts answered", what, "match", 1.0, ".3f")
             for what, title in PANELS.items()]  # fmt: skip
    shown += [
        ("Tokens per second, one text", GENERATE, "tokens_per_second", 1.0, ".1f"),
        ("Cache behind a text, MiB", GENERATE, "cache_bytes", 2.0**20, ".2f"),
    ]
    every = (_table(title, [row for row in rows if row["what"] == what], key, unit, form)
             for title, what, key, unit, form in shown)  # fmt: skip
    return [table for table in every if table is not None]


def _table(title: str, rows: Sequence[Record], key: str, unit: float, form: str) -> Table | None:
    """A row per scheme, a column per context: the mean, and half of its 95% interval over seeds."""
    lines, lengths = _lines(rows, key), sorted({row["length"] for row in rows})
    cells = []
    for line in lines:
        at = dict(zip(line["at"], zip(line["mean"], line["high"], strict=True), strict=True))
        own = [line["label"], str(max(line["n"]))]
        for length in lengths:
            mean, high = at.get(length, (None, None))
            spread = "" if high is None or mean is None else f" ± {(high - mean) / unit:{form}}"
            own.append("–" if mean is None else f"{mean / unit:{form}}{spread}")
        cells.append(tuple(own))
    header = ("Scheme", "seeds", *(f"{length:,}" for length in lengths))
    return Table(title=title, header=header, rows=tuple(cells)) if cells else None


def _lines(rows: Sequence[Record], key: str) -> list[Data]:
    """A line per scheme of rows of one kind, measured in the way that most of them are."""
    lines = []
    for (position, variant), own in by_scheme(same_settings(rows, recall_question)).items():
        at = dict(sorted(group_by(own, lambda row: row["length"]).items()))
        values = [[row[key] for row in {row["run"]: row for row in each}.values()] for each in at.values()]
        ends = [student_interval(each) if len(each) > 1 else (None, None) for each in values]
        lines.append({
            "label": name(own[0]), "position": position, "variant": variant, "at": list(at),
            "mean": [mean_of(each).mean for each in values], "low": [low for low, _ in ends],
            "high": [high for _, high in ends], "n": [len(each) for each in values],
        })  # fmt: skip
    return lines
