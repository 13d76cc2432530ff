"""The numbers behind the figures of accuracy and loss, as dictionaries for JSON that can be drawn again.

Functions of results raise :class:`NoData` where those have nothing to show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gape.report.results import PROTOCOL, Results, far_back_question, recall_question
from gape.report.schemes import TARGETS, by_scheme, group_by, label, name, scheme_order
from gape.report.statistics import Curve, columns, curves, mean_of, pool_seeds, student_interval
from gape.utils.jsonl import Record

Data = dict[str, Any]
#: Kinds of far-back measurements in the order of tables and columns.
FAR_BACK = {"ngram": "Repeated n-grams", "names": "Repeated names", "planted": "A planted passage again"}
#: Several facts of one text asked for together, and tokens generated behind a text.
SEVERAL, GENERATE = "several", "generate"
#: Measurements of recall in the order of tables and panels.
RECALL = {"near": "Fact near", "middle": "Fact halfway", "far": "Fact far", SEVERAL: "Several facts at once"}
#: The variant of a model of transformers before any training of ours.
UNTRAINED = "not fine-tuned"


class NoData(ValueError):  # noqa: N818
    """The results hold nothing for this figure."""


def main_variant(results: Results) -> str:
    """The variant that stands for a set of results: the unnamed one, else the first of the rows, by name."""
    known = [row["variant"] for row in results.of("needle")]
    return "" if "" in known or not known else str(known[0])


def of_main_variant(results: Results) -> Results:
    """The results of the variant that stands for them."""
    return results.select(variant=main_variant(results))


def accuracy(results: Results) -> Data:
    """The paper's grid: close and far needles by NoPE, RoPE and p-RoPE, each with and without gates, and ALiBi."""
    return _grid([
        [
            _panel(results, target, (base, f"{base}+gape"), ("alibi",), f"{label(base)}: {TARGETS[target].lower()}")
            for base in ("nope", "rope", "p-rope")
        ]
        for target in ("last", "first")
    ])  # fmt: skip


def fox(results: Results) -> Data:
    """FoX, ALiBi, NoPE and NoPE with gates."""
    return _grid([[_panel(results, t, ("fox",), ("nope", "nope+gape", "alibi")) for t in ("last", "first")]])


def yarn(results: Results) -> Data:
    """YaRN in training and for evaluation only, with and without gates."""
    schemes = ("yarn", "yarn+gape", "rope", "rope+gape")
    return _grid([[_panel(results, target, schemes, switched=True) for target in ("last", "first")]])


def overview(results: Results) -> Data:
    """Everything: a panel per target, a curve per scheme."""
    positions = {row["position"] for row in of_main_variant(results).of("needle")}
    return _grid([[_panel(results, target, tuple(positions)) for target in TARGETS]])


def variants(results: Results) -> Data:
    """A row per target, a column per scheme, a curve per variant."""
    rows = results.of("needle")
    if len({row["variant"] for row in rows}) < 2:
        raise NoData("variants: got results of one variant, expected several")
    grid: list[list[Data | None]] = []
    for target in TARGETS:
        grid.append([])
        for position in sorted({row["position"] for row in rows}, key=scheme_order):
            shown = curves(results.select(target=target, position=position))
            lines = [_line(curve, name=curve.variant) for curve in shown if curve.position == curve.evaluated]
            title = f"{label(position)}: {TARGETS[target].lower()}"
            grid[-1].append({"target": target, "title": title, "lines": lines} if lines else None)
    return _grid(grid)


def perplexity(results: Results) -> Data:
    """Perplexity by context, a panel per stratum and `align`, a line per scheme.

    A panel's `documents` are those read at each context, and its `stretches` the contexts that were read on nearly the
    same ones: what fewer documents fill is another measurement, and no line leads there.
    """
    groups = group_by(
        language_rows(results, "perplexity"),
        lambda row: (_unaligned(row), row.get("align") or 0, row.get("stratum") or ""),
    )
    # The protocol that most was measured by; strata and alignments of the same are panels beside one another.
    best = max(
        {key[0] for key in groups},
        key=lambda p: (p[0] == "last-k", sum(len(rows) for key, rows in groups.items() if key[0] == p), repr(p)),
    )
    chosen = {key[1:]: rows for key, rows in groups.items() if key[0] == best}
    several = len({align for align, _ in chosen}) > 1
    panels = []
    for align, stratum in sorted(chosen, key=lambda key: (key[0], int(key[1]) if key[1].isdigit() else 0)):
        # Those with the `max_windows` of most; of equals the larger.
        counts = group_by(chosen[align, stratum], lambda row: row.get("max_windows") or 0)
        rows = counts[max(counts, key=lambda count: (len(counts[count]), count))]
        documents = {row["context"]: row.get("documents", 0) for row in rows}
        title = f"Documents of about {int(stratum):,} tokens" if stratum.isdigit() else stratum or "All documents"
        if several:
            read = documents[min(documents)]
            title = f"{title} ({read:,})" + (f", tokens that {align:,} precede" if align else "")
        panels.append(
            {
                "title": title, "stratum": stratum or None, "align": align,
                "lines": scheme_lines(rows, "context", _perplexity_of),
                "documents": {str(at): documents[at] for at in sorted(documents)}, "stretches": _stretches(documents),
            }
        )  # fmt: skip
    return {"protocol": dict(best[1]) | {"protocol": best[0]}, "train_length": train_length(results), "panels": panels}


def own_perplexity(results: Results) -> Data:
    """:func:`perplexity` of the models that were trained here from nothing."""
    rows = tuple(row for row in results.of("perplexity") if "base" not in row)
    return perplexity(results.only(**{**results.measured, "perplexity": rows}))


def hf_rows(results: Results) -> list[Record]:
    """Rows of perplexity of models that began with one of transformers."""
    return [row for row in results.of("perplexity") if "base" in row]


def hf_perplexity(results: Results) -> Data:
    """:func:`perplexity` of models that began with one of transformers, and that one's native context."""
    rows = hf_rows(results)
    data = perplexity(results.only(perplexity=rows))
    lengths, native = ({row.get(key) for row in rows} - {None} for key in ("train_length", "native"))
    for entry in (entry for panel in data["panels"] for entry in panel["lines"] if entry["variant"] == UNTRAINED):
        # A colour of its own beside the scheme's.
        entry["position"] = UNTRAINED
    one = lengths.pop() if len(lengths) == 1 else None
    return data | {"train_length": one, "native": native.pop() if len(native) == 1 else None}


def far_back(results: Results) -> Data:
    """Loss, and what the far text was worth, by how far back the answer lies: a column per kind, a line per scheme."""
    rows = language_rows(results, "far_back")
    columns = []
    for kind, title in FAR_BACK.items():
        chosen = same_settings([row for row in rows if row["kind"] == kind], far_back_question)
        if not chosen:
            continue
        gains = [{**row, "nll": row["gain"], "low": row["gain_low"], "high": row["gain_high"]} for row in chosen]
        tokens = {row["distance"]: row["tokens"] for row in chosen}
        columns.append(
            {
                "kind": kind, "title": title, "tokens": {str(d): tokens[d] for d in sorted(tokens)},
                "loss": scheme_lines(chosen, "distance", pool_seeds),
                "gain": scheme_lines(gains, "distance", pool_seeds),
            }
        )  # fmt: skip
    return {"columns": columns, "train_length": train_length(results)}


def recall(results: Results) -> Data:
    """The share of facts answered by context, a panel per distance, a line per scheme; intervals over seeds."""
    rows = language_rows(results, "recall")
    panels = [
        {"what": what, "title": title, "lines": recall_lines(rows, what, "match")} for what, title in RECALL.items()
    ]
    return {"panels": [panel for panel in panels if panel["lines"]], "train_length": train_length(results)}


def recall_lines(rows: Sequence[Record], what: str, key: str) -> list[Data]:
    """A line per scheme of rows of one kind, measured in the way that most of them are."""

    def pool(runs: Sequence[Record]) -> Data:
        values = [row[key] for row in runs]
        low, high = student_interval(values) if len(values) > 1 else (None, None)
        return {"mean": mean_of(values).mean, "low": low, "high": high, "n": len(values)}

    alike = same_settings([row for row in rows if row["what"] == what], recall_question)
    return scheme_lines(alike, "length", pool)


def language_rows(results: Results, kind: str) -> Sequence[Record]:
    """The rows of a kind; :class:`NoData` without any."""
    rows = results.of(kind)
    if not rows:
        raise NoData(f"{kind.replace('_', ' ')}: got no rows of language models")
    return rows


def same_settings(rows: Sequence[Record], question: Callable[[Record], Record]) -> list[Record]:
    """Rows of the settings that most of them have; of equals the last."""
    questions = [question(row) for row in rows]
    most = max(reversed(questions), key=questions.count, default=None)
    return [row for row, own in zip(rows, questions, strict=True) if own == most]


def train_length(results: Results) -> int | None:
    """The training length of language models, where all rows have the same."""
    kinds = [kind for kind in results.measured if kind not in ("needle", "inside")]
    lengths = {row.get("train_length") for kind in kinds for row in results.of(kind)}
    return lengths.pop() if len(lengths) == 1 else None


def _panel(
    results: Results,
    target: str,
    needed: Sequence[str],
    beside: Sequence[str] = (),
    title: str | None = None,
    switched: bool = False,
) -> Data | None:
    """Curves of some schemes for one target; None where none of the needed ones is there."""
    shown = [
        curve
        for curve in curves(of_main_variant(results).select(target=target))
        if curve.position in {*needed, *beside} and (switched or curve.position == curve.evaluated)
    ]
    if not any(curve.position in needed for curve in shown):
        return None
    shown.sort(key=lambda c: (c.position not in needed, scheme_order(c.position), c.position != c.evaluated))
    return {"target": target, "title": title or TARGETS[target], "lines": [_line(curve) for curve in shown]}


def _line(curve: Curve, name: str | None = None) -> Data:
    points = curve.rows.values()
    return {
        "label": label(curve.position, curve.evaluated) if name is None else name,
        "position": curve.position, "evaluated": curve.evaluated, "lengths": [rows[0]["length"] for rows in points],
        **columns(curve.means.values()), "values": [[row["accuracy"] for row in rows] for rows in points],
    }  # fmt: skip


def _grid(grid: Iterable[Iterable[Data | None]]) -> Data:
    """The panels that are there, row by row."""
    rows = [shown for row in grid if (shown := [panel for panel in row if panel])]
    if not rows:
        raise NoData("accuracy: got no rows of these schemes and targets")
    return {"rows": rows}


def scheme_lines(rows: Iterable[Record], along: str, pool: Callable[[Sequence[Record]], Data]) -> list[Data]:
    """A line per scheme: `mean`, `low`, `high` and `n` that `pool` makes of its runs, place by place along a key.

    Of two rows of one run at one place the later counts.
    """
    lines = []
    for (position, variant), records in by_scheme({(row["run"], row[along]): row for row in rows}.values()).items():
        at = dict(sorted(group_by(records, lambda record: record[along]).items()))
        points = [pool(each) for each in at.values()]
        line = {"label": name(records[0]), "position": position, "variant": variant, "at": list(at)}
        lines.append(line | {key: [point[key] for point in points] for key in ("mean", "low", "high", "n")})
    return lines


def _perplexity_of(rows: Sequence[Record]) -> Data:
    pooled = pool_seeds(rows)
    ends = {key: pooled[key] for key in ("mean", "low", "high")}
    return pooled | {key: None if value is None else math.exp(value) for key, value in ends.items()}


def _unaligned(row: Record) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """The protocol of a row of perplexity but for which, and how many, of the tokens are scored."""
    rest = (key for key in PROTOCOL[1:] if key not in ("align", "max_windows"))
    return row.get("protocol", ""), tuple((key, row.get(key)) for key in rest)


def _stretches(documents: Mapping[int, int]) -> list[list[int]]:
    """Contexts in order, cut where fewer than nine tenths of the documents of the stretch's first are left."""
    stretches: list[list[int]] = []
    for context in sorted(documents):
        if stretches and documents[context] >= 0.9 * documents[stretches[-1][0]]:
            stretches[-1].append(context)
        else:
            stretches.append([context])
    return stretches
