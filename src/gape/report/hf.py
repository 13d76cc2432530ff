"""Models of transformers beside one another: perplexity far beyond the context they were made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gape.report import lm_figures, lm_series, lm_tables
from gape.report.lm_summary import name, schemes
from gape.report.results import Record, Results
from gape.report.series import Data, NoData
from gape.report.style import FAINT
from gape.report.tables import Table
from gape.tasks.perplexity_rows import difference

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The variant of a model as it came.
UNTRAINED = "not fine-tuned"
#: Commands that make the results of the figure.
MADE_BY = (
    "gape hf import FILE --out models/smollm2, gape data prepare BOOKS --heldout HELDOUT --strata 66000 --excerpts "
    "--tokenizer models/smollm2 --out DATA and bash examples/extend.sh models/smollm2 DATA runs/hf/smollm2, then "
    "gape report runs/hf/smollm2 models/smollm2 --out results/hf/smollm2"
)


def perplexity(results: Results) -> Data:
    """Perplexity by context of models that began with one of transformers, and the context that one was made for.

    Raises:
        NoData: there are no such rows.
    """
    rows = _rows(results)
    if not rows:
        raise NoData("perplexity: got no rows of gape hf perplexity")
    data = lm_series.perplexity(replace(results, measured={"perplexity": tuple(rows)}))
    lengths, native = ({row.get(key) for row in rows} - {None} for key in ("train_length", "native"))
    for entry in (entry for panel in data["panels"] for entry in panel["lines"] if entry["variant"] == UNTRAINED):
        # A colour of its own beside the scheme's.
        entry["position"] = UNTRAINED
    one = lengths.pop() if len(lengths) == 1 else None
    return data | {"train_length": one, "native": native.pop() if len(native) == 1 else None}


def ours(results: Results) -> Data:
    """The same figure of the models that were trained here from nothing.

    Raises:
        NoData: there are no such rows.
    """
    rows = tuple(row for row in results.measured.get("perplexity", ()) if "base" not in row)
    return lm_series.perplexity(replace(results, measured={**results.measured, "perplexity": rows}))


def draw(data: Data) -> Figure:
    """Perplexity against context, with the context that the model was made for marked."""
    figure = lm_figures.draw_perplexity(data)
    for ax in figure.axes:
        low, high = ax.get_xlim()
        if data["native"] is not None and low < data["native"] < high:
            ax.axvline(data["native"], color=FAINT, linewidth=0.8)
            across = ax.get_xaxis_transform()
            ax.text(data["native"], 0.98, " native context", transform=across, va="top", fontsize=6)
    return figure


def tables(results: Results) -> list[Table]:
    """Perplexity by context, and every model with gates beside every one without."""
    own = replace(results, measured={"perplexity": tuple(_rows(results))})
    return lm_tables.tables(own) + beside(results)


def beside(results: Results) -> list[Table]:
    """Nats per token of models with gates less those of others, on the same windows; none without rows.

    What is a scheme's own base, fine-tuned alike, stands in the table of :func:`gape.report.lm_tables.tables`.
    """
    groups = {key: list(rows) for key, rows in schemes(_rows(results)).items()}
    cells = []
    for (position, variant), rows in groups.items():
        for (other, also), others in groups.items():
            bare = position.removesuffix("+gape")
            told = other == bare and also in ("", variant)
            if bare != position and not other.endswith("+gape") and not told:
                cells += _differences(rows, others)
    if not cells:
        return []
    header = ("Models", "context", "difference", "95% interval", "verdict")
    title = (
        "Models with gates: nats per token beside others, on the same windows, a seed of each; intervals over documents"
    )
    return [Table(title=title, header=header, rows=tuple(cells))]


def _differences(rows: Sequence[Record], others: Sequence[Record]) -> list[tuple[str, ...]]:
    """A row for each context that both were measured at on the same windows, of the first seed of each."""
    found: list[tuple[str, ...]] = []
    known = {(row["plan"], row["stratum"], row["context"]): row for row in reversed(others)}
    seen = set()
    for row in sorted(rows, key=lambda row: (row["context"], row["seed"])):
        other = known.get((row["plan"], row["stratum"], row["context"]))
        if other is None or (row["plan"], row["stratum"]) in seen:
            continue
        seen.add((row["plan"], row["stratum"]))
        d = difference(row, other)
        verdict = "not separable" if not d.separable else "worse" if d.nll > 0 else "better"
        who = f"{name(row)} − {name(other)}"
        cell = lm_tables.interval(d.low, d.high)
        found.append((who, f"{row['context']:,}", f"{d.nll:+.4f}", cell, "one document" if d.low is None else verdict))
    return found


def _rows(results: Results) -> list[Record]:
    return [row for row in results.measured.get("perplexity", ()) if "base" in row]
