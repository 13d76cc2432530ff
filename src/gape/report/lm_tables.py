"""Tables of language models, as plain text, Markdown or HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gape.report.lm_series import KIND_NAMES, ROUTING
from gape.report.lm_series import perplexity as perplexity_series
from gape.report.lm_summary import (
    Difference,
    asked_most,
    far_back_differences,
    name,
    perplexity_differences,
    schemes,
)
from gape.report.results import Record, Results
from gape.report.series import NoData
from gape.report.tables import Table


def tables(results: Results) -> list[Table]:
    """All tables of some results' language models; none where there are none."""
    measured = results.measured
    made = perplexity_tables(results)
    found = _differences("Perplexity: nats per token beside another scheme, on the same windows", "context",
                         perplexity_differences(measured.get("perplexity", ())))  # fmt: skip
    made += [found] if found else []
    if measured.get("entropy"):
        made.append(entropy_table(measured["entropy"]))
    if measured.get("routing"):
        made.append(routing_table(measured["routing"]))
    return made + far_back_table(measured.get("far_back", ()))


def perplexity_tables(results: Results) -> list[Table]:
    """A table per panel of the figure: a row per scheme, a column per context; the lowest of each column stands out."""
    try:
        data = perplexity_series(results)
    except NoData:
        return []
    made = []
    for panel in data["panels"]:
        contexts = sorted({at for line in panel["lines"] for at in line["at"]})
        rows, values = [], []
        for line in panel["lines"]:
            at = dict(zip(line["at"], line["mean"], strict=True))
            values.append([at.get(context) for context in contexts])
            rows.append((line["label"], str(max(line["n"])), *(_cell(at.get(context), ".2f") for context in contexts)))
        best = set()
        for column in range(len(contexts)):
            lowest = min(value for row in values if (value := row[column]) is not None)
            best |= {(r, column + 2) for r, row in enumerate(values) if row[column] == lowest and len(values) > 1}
        header = ("Scheme", "seeds", *(f"{context:,}" for context in contexts))
        if len(panel["stretches"]) > 1:
            rows.append(("documents", "", *(f"{panel['documents'][str(context)]:,}" for context in contexts)))
        title = f"Perplexity by context, {data['protocol']['protocol']}, {panel['title'].lower()}"
        made.append(Table(title=title, header=header, rows=tuple(rows), strong=frozenset(best)))
    return made


def entropy_table(records: Sequence[Record]) -> Table:
    """Mean attention entropy by layer, a row per run and set."""
    layers = max(len(found["entropy"][0]) for record in records for found in record["sets"])
    rows = []
    for record in records:
        for found in record["sets"]:
            asked = found["asked"]
            where = "prompts" if asked["length"] is None else f"{asked['length']:,}"
            each = np.array(found["entropy"])
            means = (_cell(value, ".3f") for value in each.mean((0, 2)).tolist())
            # Runs may have been looked into on more or fewer passages of the same text.
            rows.append((record["run"], asked["data"], where, str(len(each)), *means))
    header = ("Run", "data", "tokens", "passages", *(f"layer {layer}" for layer in range(layers)))
    filled = tuple(row + ("–",) * (len(header) - len(row)) for row in rows)
    return Table(title="Mean attention entropy (nats)", header=header, rows=filled)


def routing_table(rows: Sequence[Record]) -> Table:
    """The routing variables at the last step that was tracked: mean over a layer's heads, and their range."""
    cells = []
    for run in dict.fromkeys(row["run"] for row in rows):
        own = [row for row in rows if row["run"] == run]
        last = [row for row in own if row["step"] == max(r["step"] for r in own)]
        for layer in sorted({row["layer"] for row in last}):
            heads = [row for row in last if row["layer"] == layer]
            ranges = (_range([row[variable] for row in heads]) for variable in ROUTING)
            cells.append((run, f"{heads[0]['step']:,}", str(layer), *ranges))
    header = ("Run", "step", "layer", "mean mask M", "landmark", "query gate", "amplitude")
    title = "Routing variables: mean over heads (least … most)"
    return Table(title=title, header=header, rows=tuple(cells))


def far_back_table(rows: Iterable[Record]) -> list[Table]:
    """Loss and gain by kind, scheme and distance, and how gated schemes stand beside others on the same tokens."""
    rows = list(rows)
    made = []
    for kind, title in KIND_NAMES.items():
        chosen = asked_most([row for row in rows if row["kind"] == kind])
        distances = sorted({row["distance"] for row in chosen})
        cells = []
        for runs in schemes(chosen).values():
            at: dict[int, list[Record]] = {}
            for row in runs:
                at.setdefault(row["distance"], []).append(row)
            cells.append((name(runs[0]), *(_loss_and_gain(at.get(distance, [])) for distance in distances)))
        if cells:
            header = ("Scheme", *(f"{distance:,}" for distance in distances))
            made.append(Table(title=f"{title}: loss (gain from the far text), nats", header=header, rows=tuple(cells)))
    losses = _differences("Far back: loss beside another scheme, on the same tokens", "distance",
                          far_back_differences(rows))  # fmt: skip
    gains = _differences("Far back: gain from the far text beside another scheme, on the same tokens", "distance",
                         far_back_differences(rows, gain=True))  # fmt: skip
    return made + [table for table in (losses, gains) if table is not None]


def _differences(title: str, along: str, found: Sequence[Difference]) -> Table | None:
    if not found:
        return None
    rows = tuple(
        (
            f"{d.scheme} − {d.other}", KIND_NAMES.get(d.what, d.what).lower(), f"{d.at:,}", str(d.seeds),
            f"{d.difference:+.4f}", interval(d.low, d.high), d.verdict,
        )
        for d in sorted(found, key=lambda d: (d.what, d.scheme, d.other, d.at))
    )  # fmt: skip
    header = ("Schemes", "what", along, "seeds", "difference", "95% interval", "verdict")
    return Table(title=title, header=header, rows=rows)


def interval(low: float | None, high: float | None) -> str:
    """An interval in a cell, a dash where there is none."""
    return "–" if low is None or high is None else f"{low:+.4f} … {high:+.4f}"


def _loss_and_gain(rows: Sequence[Record]) -> str:
    if not rows:
        return "–"
    loss, gain = (float(np.mean([row[key] for row in rows])) for key in ("nll", "gain"))
    return f"{loss:.3f} ({gain:+.3f})"


def _range(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3g} ({min(values):.2g} … {max(values):.2g})"


def _cell(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)
