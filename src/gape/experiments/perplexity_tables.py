"""Tables of perplexity: by run and context, and what runs differ by on the same windows."""

from __future__ import annotations

from typing import Any

from gape.report.tables import Table, interval
from gape.tasks.perplexity_rows import difference


def perplexity_tables(runs: list[list[dict[str, Any]]]) -> list[Table]:
    """Perplexity by run and context, and differences from the first run on the same windows; both for each stratum.

    Args:
        runs: rows of each run as :func:`gape.experiments.language.measure_runs` returns them.
    """
    tables = []
    for stratum in dict.fromkeys(row["stratum"] for rows in runs for row in rows):
        at = [{row["context"]: row for row in rows if row["stratum"] == stratum} for rows in runs]
        documents = "all documents" if stratum is None else f"stratum {stratum}"
        tables.append(_perplexities(at, documents))
        if len(at) > 1:
            tables.append(_differences(at, documents))
    return tables


def _perplexities(at: list[dict[int, dict[str, Any]]], documents: str) -> Table:
    """A row per run, a column per context, from each run's rows by context."""
    own = list(at[0].values())
    rows = tuple(
        (next(iter(rows.values()))["run"], *(f"{row['perplexity']:.2f}" for row in rows.values())) for rows in at
    )
    header = ("Run", *(f"{row['context']:,}" for row in own))
    return Table(title=f"Perplexity by context, {own[0]['protocol']}, {documents}", header=header, rows=rows)


def _differences(at: list[dict[int, dict[str, Any]]], documents: str) -> Table:
    """A row per run but the first and context."""
    cells = []
    for rows in at[1:]:
        for context, row in rows.items():
            d = difference(row, at[0][context])
            verdict = "one document" if d.low is None else _verdict(d.nll, d.separable)
            cells.append((row["run"], f"{context:,}", f"{d.nll:+.4f}", interval(d.low, d.high), verdict))
    first = next(iter(at[0].values()))["run"]
    header = ("Run", "context", "difference", "95% interval", "verdict")
    return Table(
        title=f"Nats per token beside {first} on the same windows, {documents}", header=header, rows=tuple(cells)
    )


def _verdict(nll: float, separable: bool) -> str:
    return ("worse" if nll > 0 else "better") if separable else "not separable"
