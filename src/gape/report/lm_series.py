"""The numbers behind each figure of language models: plain data that can be stored and drawn again.

Every function takes results and returns a dictionary for JSON. It raises :class:`gape.report.series.NoData` where the
results have nothing to show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gape.report.lm_results import QUESTION
from gape.report.lm_summary import asked_most, name, pooled, schemes, variant_of
from gape.report.results import Record, Results, scheme_order
from gape.report.series import Data, NoData
from gape.report.summary import mean_of

#: The order in which the paper's figures of one layer show schemes, and the run that stands for gates.
SIDE_BY_SIDE = ("p-rope+gape", "p-rope", "rope", "nope+gape", "rope+gape")
KIND_NAMES = {"ngram": "Repeated n-grams", "names": "Repeated names", "planted": "A planted passage again"}
ROUTING = ("mean_mask", "landmark", "gate", "amplitude")


def perplexity(results: Results) -> Data:
    """Perplexity by context, a panel per stratum and `align`, a line per scheme.

    A panel's `documents` are those read at each context, and its `stretches` the contexts that were read on nearly the
    same ones: what fewer documents fill is another measurement, and no line leads there.
    """
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for row in _rows(results, "perplexity"):
        groups.setdefault((_unaligned(row), row.get("align") or 0, row.get("stratum") or ""), []).append(row)
    # The protocol that most was measured by; strata and alignments of the same are panels beside one another.
    best = max(
        {key[0] for key in groups},
        key=lambda p: (p[0] == "last-k", sum(len(rows) for key, rows in groups.items() if key[0] == p), repr(p)),
    )
    chosen = {key[1:]: rows for key, rows in groups.items() if key[0] == best}
    several = len({align for align, _ in chosen}) > 1
    panels = []
    for (align, stratum), asked in sorted(chosen.items(), key=lambda item: (item[0][0], _number(item[0][1]))):
        rows = _most_windows(asked)
        documents = {row["context"]: row.get("documents", 0) for row in rows}
        title = f"Documents of about {int(stratum):,} tokens" if stratum.isdigit() else stratum or "All documents"
        if several:
            read = documents[min(documents)]
            title = f"{title} ({read:,})" + (f", tokens that {align:,} precede" if align else "")
        panels.append(
            {
                "title": title, "stratum": stratum or None, "align": align,
                "lines": _curves(rows, "context", exponential=True),
                "documents": {str(at): documents[at] for at in sorted(documents)}, "stretches": _stretches(documents),
            }
        )  # fmt: skip
    return {"protocol": dict(best[1]) | {"protocol": best[0]}, "train_length": _train_length(results), "panels": panels}


def positions(results: Results) -> Data:
    """Loss by position in a window, a line per scheme.

    Where windows were scored whole the longest of them are shown. Of windows that were scored at their ends, every
    context gives the places before its end.
    """
    rows = _rows(results, "positions")
    asked = {_protocol(row) for row in rows}
    best = max(asked, key=lambda p: (p[0] != "last-k", sum(_protocol(row) == p for row in rows), repr(p)))
    chosen = [row for row in rows if _protocol(row) == best]
    longest = max(row["context"] for row in chosen)
    if best[0] != "last-k":
        chosen = [row for row in chosen if row["context"] == longest]
    lines = []
    for (position, variant), records in schemes(_latest(chosen, "context")).items():
        at: dict[float, list[float]] = {}
        for record in records:
            middles = ((low + high) / 2 for low, high in zip(record["edges"], record["edges"][1:], strict=False))
            for middle, nll in zip(middles, record["nll"], strict=True):
                at.setdefault(middle, []).append(nll)
        line = {"label": name(records[0]), "position": position, "variant": variant, "at": sorted(at)}
        lines.append(line | {"mean": [mean_of(at[middle]).mean for middle in sorted(at)]})
    return {"context": longest, "protocol": best[0], "train_length": _train_length(results), "lines": lines}


def entropy(results: Results) -> Data:
    """The paper's three panels: entropy by layer, gates against entropy, the last layer's masks over training."""
    records = _rows(results, "entropy")
    asked = _shared_set(records)
    lines, scatter = [], None
    for (position, variant), runs in schemes(records).items():
        sets = [found for run in runs if (found := _set(run, asked))]
        if not sets:
            continue
        # (samples of all seeds, layers): means over heads.
        each = np.concatenate([np.array(found["entropy"]).mean(-1) for found in sets])
        spread = each.std(0, ddof=1).tolist() if len(each) > 1 else None
        line = {"label": name(runs[0]), "position": position, "variant": variant, "samples": len(each)}
        lines.append(line | {"mean": each.mean(0).tolist(), "std": spread})
        if sets[0]["gate"] is not None and (scatter is None or _rank(position, variant) < scatter["rank"]):
            scatter = _scatter(sets[0], runs[0]) | {"rank": _rank(position, variant)}
    return {"asked": asked, "lines": lines, "scatter": scatter, "masks": _last_masks(results)}


def entropy_heads(results: Results) -> Data:
    """Entropy of every layer and head at every length, means over samples, a row per scheme."""
    records = _rows(results, "entropy")
    sets = {(s["asked"]["data"], s["asked"]["length"]) for record in records for s in record["sets"]}
    # Of the source with most lengths.
    data = max({at[0] for at in sets}, key=lambda d: (sum(at[0] == d for at in sets), d))
    lengths = sorted((at[1] for at in sets if at[0] == data), key=lambda length: length or 0)
    models = []
    for runs in schemes(records).values():
        run = min(runs, key=lambda record: record["seed"])
        cells = {}
        for found in run["sets"]:
            if found["asked"]["data"] == data:
                cells[str(found["asked"]["length"])] = np.array(found["entropy"]).mean(0).tolist()
        if cells:
            models.append({"label": name(run), "run": run["run"], "entropy": cells})
    return {"data": data, "lengths": lengths, "models": models}


def context(results: Results) -> Data:
    """How far attention reaches, by length and scheme, and the theory's effective context beside it."""
    records = _rows(results, "entropy")
    lines, panels = [], []
    for (position, variant), runs in schemes(records).items():
        run = min(runs, key=lambda record: record["seed"])
        sets = sorted((s for s in run["sets"] if s["asked"]["length"]), key=lambda s: s["asked"]["length"])
        if not sets:
            continue
        # Medians over samples, then quartiles over layers and heads; the middle share is the one shown.
        shown = 1
        heads = [np.median(np.array(s["used"], dtype=float), axis=0)[..., shown].ravel() for s in sets]
        quartiles = [np.quantile(values, (0.25, 0.5, 0.75)).tolist() for values in heads]
        lines.append(
            {
                "label": name(run), "position": position, "variant": variant, "share": sets[0]["shares"][shown],
                "lengths": [s["asked"]["length"] for s in sets], "quartiles": quartiles,
            }
        )  # fmt: skip
        if sets[-1]["effective"] is not None:
            panels.append(_horizons(sets[-1], run))
    if not lines:
        raise NoData("context: got no entropy of passages of a stated length")
    return {"lines": lines, "panels": panels, "train_length": _train_length(results)}


def spectrum(results: Results) -> Data:
    """Norms of queries and keys by rotary pair: means over layers and heads, a line per scheme."""
    sides: dict[str, list[Data]] = {"queries": [], "keys": []}
    for (position, variant), runs in schemes(_rows(results, "spectrum")).items():
        run = min(runs, key=lambda record: record["seed"])
        found = run["sets"][-1]
        for side, lines in sides.items():
            mean, std = (np.array(found[side][key]) for key in ("mean", "std"))
            profile = mean.mean((0, 1))
            lines.append(
                {
                    "label": name(run), "position": position, "variant": variant, "inv_freq": found["inv_freq"],
                    "mean": profile.tolist(), "std": std.mean((0, 1)).tolist(),
                    "peak": float(profile.max() / profile.mean()), "layers": mean.mean(1).tolist(),
                }
            )  # fmt: skip
    return {"sides": sides}


def routing(results: Results) -> Data:
    """M, landmark, gate and amplitude over training, by layer and head, of the run that stands for gates."""
    rows = _preferred(_rows(results, "routing"))
    layers, heads = (sorted({row[key] for row in rows}) for key in ("layer", "head"))
    steps = sorted({row["step"] for row in rows})
    at = {(row["step"], row["layer"], row["head"]): row for row in rows}
    panels = {
        variable: [
            [[_value(at, (step, layer, head), variable) for step in steps] for head in heads] for layer in layers
        ]
        for variable in ROUTING
    }
    return {"run": rows[0]["run"], "label": name(rows[0]), "steps": steps, "layers": layers, "panels": panels}


def maps(results: Results) -> Data:
    """Attention of one layer's heads on one passage, a row per scheme, gates first as in the paper."""
    return _pictures(results, "maps", "weights")


def masks(results: Results) -> Data:
    """M of one layer's heads on one passage, a row per scheme with gates."""
    return _pictures(results, "masks", "masks")


def far_back(results: Results) -> Data:
    """Loss, and what the far text was worth, by how far back the answer lies: a column per kind, a line per scheme."""
    rows = _rows(results, "far_back")
    columns = []
    for kind, title in KIND_NAMES.items():
        chosen = asked_most([row for row in rows if row["kind"] == kind])
        if not chosen:
            continue
        gains = [{**row, "nll": row["gain"], "low": row["gain_low"], "high": row["gain_high"]} for row in chosen]
        tokens = {row["distance"]: row["tokens"] for row in chosen}
        columns.append(
            {
                "kind": kind, "title": title, "tokens": {str(d): tokens[d] for d in sorted(tokens)},
                "loss": _curves(chosen, "distance"), "gain": _curves(gains, "distance"),
            }
        )  # fmt: skip
    return {"columns": columns, "train_length": _train_length(results)}


def _rows(results: Results, kind: str) -> Sequence[Record]:
    rows = results.measured.get(kind, ())
    if not rows:
        raise NoData(f"{kind.replace('_', ' ')}: got no rows of language models")
    return rows


def _curves(rows: Iterable[Record], along: str, *, exponential: bool = False) -> list[Data]:
    """A line per scheme: means over seeds, with deviations or the interval of a single seed."""
    lines = []
    for (position, variant), records in schemes(_latest(rows, along)).items():
        at: dict[int, list[Record]] = {}
        for record in records:
            at.setdefault(record[along], []).append(record)
        found = [pooled(at[x]) for x in sorted(at)]
        line: Data = {"label": name(records[0]), "position": position, "variant": variant, "at": sorted(at)}
        for key in ("mean", "low", "high"):
            values = [entry[key] for entry in found]
            line[key] = [math.exp(v) if exponential and v is not None else v for v in values]
        lines.append(line | {"n": [entry["n"] for entry in found]})
    return lines


def _latest(rows: Iterable[Record], along: str) -> list[Record]:
    """One row of each run at each place."""
    return list({(row["run"], row[along]): row for row in rows}.values())


def _protocol(row: Record) -> tuple[str, tuple[tuple[str, Any], ...]]:
    return row.get("protocol", ""), tuple((key, row.get(key)) for key in QUESTION[1:])


def _unaligned(row: Record) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """The question of a row of perplexity but for which, and how many, of the tokens are scored."""
    asked, rest = _protocol(row)
    return asked, tuple((key, value) for key, value in rest if key not in ("align", "max_windows"))


def _most_windows(rows: Sequence[Record]) -> list[Record]:
    """The rows of the `max_windows` that most of them were measured with; of equals the larger."""
    counts = [row.get("max_windows") or 0 for row in rows]
    most = max(counts, key=lambda count: (counts.count(count), count))
    return [row for row, count in zip(rows, counts, strict=True) if count == most]


def _stretches(documents: Mapping[int, int]) -> list[list[int]]:
    """Contexts in order, cut where fewer than nine tenths of the documents of the stretch's first are left."""
    found: list[list[int]] = []
    for context in sorted(documents):
        if found and documents[context] >= 0.9 * documents[found[-1][0]]:
            found[-1].append(context)
        else:
            found.append([context])
    return found


def _train_length(results: Results) -> int | None:
    lengths = {row.get("train_length") for rows in results.measured.values() for row in rows}
    return lengths.pop() if len(lengths) == 1 else None


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _shared_set(records: Sequence[Record]) -> Data:
    """The data and length that most runs were looked into with; prompts before text, as in the paper, then length."""
    counts: dict[tuple[str, int | None], int] = {}
    for record in records:
        for found in record["sets"]:
            key = (found["asked"]["data"], found["asked"]["length"])
            counts[key] = counts.get(key, 0) + 1
    data, length = max(counts, key=lambda key: (counts[key], key[1] is None, key[1] or 0, key[0]))
    return {"data": data, "length": length}


def _set(run: Record, asked: Data) -> Data | None:
    fitting = [s for s in run["sets"] if all(s["asked"][key] == value for key, value in asked.items())]
    return fitting[-1] if fitting else None


def _scatter(found: Data, run: Record) -> Data:
    """Mean gate and mean entropy of every head, and how they go together."""
    gate, entropy_, within = (np.array(found[key], dtype=float).mean(0) for key in ("gate", "entropy", "correlation"))
    ranks = (np.argsort(np.argsort(values.ravel())) for values in (gate, entropy_))
    return {
        "label": name(run), "run": run["run"], "gate": gate.tolist(), "entropy": entropy_.tolist(),
        "across_heads": _correlation(gate.ravel(), entropy_.ravel()), "of_ranks": _correlation(*ranks),
        "within_heads": _plain(within),
    }  # fmt: skip


def _correlation(x: Any, y: Any) -> float | None:
    if len(x) < 2 or np.std(x) == 0 or np.std(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def _last_masks(results: Results) -> Data | None:
    """Mean M of the last layer's heads over training; None where routing was not tracked."""
    if not results.measured.get("routing"):
        return None
    found = routing(results)
    heads = found["panels"]["mean_mask"][-1]
    return {"label": found["label"], "layer": found["layers"][-1], "steps": found["steps"], "heads": heads}


def _horizons(found: Data, run: Record) -> Data:
    """By layer and head: the theory's horizon without and with the mean landmark, and the distance that is used."""
    share = found["shares"].index(found["given_up"])
    effective, used = (_medians(found[key]) for key in ("effective", "used"))
    landmark = np.zeros_like(effective) if found["landmark"] is None else _medians(found["landmark"])
    return {
        "label": name(run), "position": run["position"], "length": found["asked"]["length"],
        "given_up": found["given_up"], "effective": _plain(effective), "used": _plain(used[..., share]),
        "spared": _plain(effective / np.clip(1 - landmark, 1e-6, None)),
    }  # fmt: skip


def _medians(values: Any) -> Any:
    """Medians over samples; a horizon without an end, None in JSON, counts as infinite."""
    return np.median(np.array([[[_finite(h) for h in layer] for layer in sample] for sample in values]), axis=0)


def _plain(values: Any) -> list[list[float | None]]:
    return [[value if math.isfinite(value) else None for value in row] for row in values.tolist()]


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return math.inf if value is None else float(value)


def _rank(position: str, variant: str) -> tuple[bool, int, Any]:
    """How well a scheme stands for gates: without a variant, in the order of the paper."""
    at = SIDE_BY_SIDE.index(position) if position in SIDE_BY_SIDE else len(SIDE_BY_SIDE)
    return (variant != "", at, scheme_order(position))


def _preferred(rows: Sequence[Record]) -> list[Record]:
    """The rows of one run: the one that stands for gates, of the first seed."""
    best = min(rows, key=lambda row: (_rank(row["position"], variant_of(row)), row["seed"], row["run"]))
    return [row for row in rows if row["run"] == best["run"]]


def _value(at: dict[tuple[int, int, int], Record], key: tuple[int, int, int], variable: str) -> float | None:
    return at[key][variable] if key in at else None


def _pictures(results: Results, kind: str, cells: str) -> Data:
    models = []
    for runs in schemes(_rows(results, kind)).values():
        run = min(runs, key=lambda record: record["seed"])
        of = {"run": run["run"], "label": name(run), "rank": _rank(run["position"], variant_of(run))}
        models += [{**found, **of} for found in run["sets"]]
    # One passage and one layer, that of most runs, side by side.
    keys = [(model["asked"]["data"], model["passage"], model["layer"], model["length"]) for model in models]
    best = max(keys, key=lambda key: (keys.count(key), key))
    chosen = sorted((m for m, key in zip(models, keys, strict=True) if key == best), key=lambda m: m["rank"])
    kept = ("run", "label", cells) if kind == "maps" else ("run", "label", cells, "mean")
    return {
        "data": best[0], "passage": best[1], "layer": best[2], "length": best[3],
        "models": [{key: model[key] for key in kept} for model in chosen],
    }  # fmt: skip
