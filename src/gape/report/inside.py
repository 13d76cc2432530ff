"""The numbers behind the figures of what happens inside models, made as :mod:`gape.report.series` makes the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

import numpy as np

from gape.report.results import Results
from gape.report.schemes import TARGETS, by_scheme, group_by, label, name, scheme_order, variant_of
from gape.report.series import Data, NoData, language_rows, of_main_variant
from gape.report.statistics import columns, mean_of
from gape.utils.jsonl import Record

#: The order in which the paper's figures of one layer show schemes, and the run that stands for gates.
SIDE_BY_SIDE = ("p-rope+gape", "p-rope", "rope", "nope+gape", "rope+gape")
ROUTING = ("mean_mask", "landmark", "gate", "amplitude")


def needle_entropy(results: Results, target: str = "first") -> Data:
    """Mean attention entropy over layers and heads by scheme and length, over samples and seeds."""
    bars = []
    for position, records in _by_position(results, target).items():
        spreads = [spread for record in records for spread in record["spread"]]
        at = dict(sorted(group_by(spreads, lambda spread: spread["length"]).items()))
        samples = ([sample for spread in each for sample in spread["entropy"]] for each in at.values())
        means = [mean_of(mean_of(chain(*layers)).mean for layers in each) for each in samples]
        bars.append({"position": position, "label": label(position), "lengths": list(at), **columns(means)})
    if not bars:
        raise NoData(f"entropy: got no analyses of models for the {target} needle")
    return {"target": target, "bars": bars}


def entropy_change(results: Results) -> Data:
    """ΔH = H(with gates) − H(without) by target, layer and length, on the same samples and seeds."""
    panels = []
    for target in TARGETS:
        analyses = _by_position(results, target)
        series = [
            {"position": base, "label": label(base), "bars": _changes(plain, analyses[f"{base}+gape"])}
            for base, plain in analyses.items()
            if f"{base}+gape" in analyses
        ]
        if series:
            panels.append({"target": target, "series": series})
    if not panels:
        raise NoData("entropy change: got no scheme that was analysed both with and without gates")
    return {"panels": panels}


def query_gate(results: Results) -> Data:
    """g at the final query by layer and head, for each gated scheme and target, over samples and seeds."""
    gated = group_by(_with(of_main_variant(results), "gates"), lambda record: record["position"])
    if not gated:
        raise NoData("query gate: got no analyses of models with gates")
    panels = []
    for position in sorted(gated, key=scheme_order):
        by_target = group_by(gated[position], lambda record: record["target"])
        targets = {
            target: _heads([sample for record in by_target[target] for sample in record["gates"]["query_gate"]])
            for target in TARGETS
            if target in by_target
        }
        panels.append({"position": position, "label": label(position), "targets": targets})
    return {"panels": panels}


def landmarks(results: Results, target: str = "first") -> Data:
    """The landmark gate along one sequence, all layers and heads, with the theory's numbers at its query."""
    preferred = ("p-rope+gape", "nope+gape", "rope+gape", "yarn+gape")
    traced = _with(of_main_variant(results), "trace", "gates")
    if not traced:
        raise NoData("landmarks: got no run whose landmarks were kept")
    record = min(traced, key=lambda r: (_place(preferred, r["position"]), r["target"] != target, r["seed"]))
    about = {key: record[key] for key in ("run", "position", "target", "seed")} | {"label": label(record["position"])}
    gates = {key: record["gates"][key][0] for key in ("query_gate", "amplitude", "effective", "required")}
    return {**about, **record["trace"], "query": gates}


def gates_entropy(results: Results) -> Data:
    """The paper's pair: the landmark gate along a sequence, and entropy for far needles."""
    targets = {record["target"] for record in of_main_variant(results).of("inside")}
    target = next((each for each in ("first", "last", "middle") if each in targets), "first")
    return {"landmarks": landmarks(results, target), "entropy": needle_entropy(results, target)}


def landmark_kinds(results: Results) -> Data:
    """Mean landmarks of fillers, KEY, =, digits and the query, by variant, scheme, target, layer and head."""
    groups = group_by(_with(results, "gates"), lambda r: (r["variant"], r["position"], r["target"]))
    if not groups:
        raise NoData("landmarks by token: got no analyses of models with gates")
    rows = []
    for (variant, position, target), records in groups.items():
        kinds = {
            kind: _heads([sample for record in records for sample in record["gates"]["landmark"][kind]])
            for kind in records[0]["gates"]["landmark"]
        }
        rows.append({"variant": variant, "label": label(position), "target": target, "kinds": kinds})
    return {"rows": rows}


def entropy(results: Results) -> Data:
    """The paper's three panels: entropy by layer, gates against entropy, the last layer's masks over training."""
    records = language_rows(results, "entropy")
    # What most runs were measured on; prompts before text, as in the paper, then by length.
    places = [(own["asked"]["data"], own["asked"]["length"]) for record in records for own in record["sets"]]
    shared = max(places, key=lambda place: (places.count(place), place[1] is None, place[1] or 0, place[0]))
    lines, scatter = [], None
    for (position, variant), runs in by_scheme(records).items():
        fitting = ([s for s in run["sets"] if (s["asked"]["data"], s["asked"]["length"]) == shared] for run in runs)
        sets = [own[-1] for own in fitting if own]
        if not sets:
            continue
        # (samples of all seeds, layers): means over heads.
        each = np.concatenate([np.array(chosen["entropy"]).mean(-1) for chosen in sets])
        spread = each.std(0, ddof=1).tolist() if len(each) > 1 else None
        line = {"label": name(runs[0]), "position": position, "variant": variant, "samples": len(each)}
        lines.append(line | {"mean": each.mean(0).tolist(), "std": spread})
        if sets[0]["gate"] is not None and (scatter is None or _rank(runs[0]) < scatter["rank"]):
            scatter = _scatter(sets[0], runs[0]) | {"rank": _rank(runs[0])}
    masks = None
    if results.of("routing"):
        tracked = routing(results)
        masks = {"label": tracked["label"], "layer": tracked["layers"][-1], "steps": tracked["steps"],
                 "heads": tracked["panels"]["mean_mask"][-1]}  # fmt: skip
    asked = dict(zip(("data", "length"), shared, strict=True))
    return {"asked": asked, "lines": lines, "scatter": scatter, "masks": masks}


def spectrum(results: Results) -> Data:
    """Norms of queries and keys by rotary pair: means over layers and heads, a line per scheme."""
    sides: dict[str, list[Data]] = {"queries": [], "keys": []}
    for run in _first_seeds(language_rows(results, "spectrum")):
        norms = run["sets"][-1]
        for side, lines in sides.items():
            mean, std = (np.array(norms[side][key]) for key in ("mean", "std"))
            profile = mean.mean((0, 1))
            lines.append(
                {
                    "label": name(run), "position": run["position"], "variant": variant_of(run),
                    "inv_freq": norms["inv_freq"], "mean": profile.tolist(), "std": std.mean((0, 1)).tolist(),
                }
            )  # fmt: skip
    return {"sides": sides}


def routing(results: Results) -> Data:
    """M, landmark, gate and amplitude over training, by layer and head, of the run that stands for gates."""
    rows = language_rows(results, "routing")
    best = min(rows, key=lambda row: (_rank(row), row["seed"], row["run"]))
    rows = [row for row in rows if row["run"] == best["run"]]
    steps, layers, heads = (sorted({row[key] for row in rows}) for key in ("step", "layer", "head"))
    at = {(row["layer"], row["head"], row["step"]): row for row in rows}
    panels = {
        variable: [
            [[at.get((layer, head, step), {}).get(variable) for step in steps] for head in heads] for layer in layers
        ]
        for variable in ROUTING
    }
    return {"run": best["run"], "label": name(rows[0]), "steps": steps, "layers": layers, "panels": panels}


def maps(results: Results) -> Data:
    """Attention of one layer's heads on one passage, a row per scheme, gates first as in the paper."""
    return _pictures(results, "maps", ("run", "label", "weights"))


def masks(results: Results) -> Data:
    """M of one layer's heads on one passage, a row per scheme with gates."""
    return _pictures(results, "masks", ("run", "label", "masks", "mean"))


def _with(results: Results, *keys: str) -> list[Record]:
    """Analyses of needle models that have all of these parts."""
    return [record for record in results.of("inside") if all(record.get(key) for key in keys)]


def _by_position(results: Results, target: str) -> dict[str, list[Record]]:
    chosen = of_main_variant(results).select(target=target).of("inside")
    ordered = sorted(chosen, key=lambda record: (scheme_order(record["position"]), record["seed"]))
    return group_by(ordered, lambda record: record["position"])


def _changes(plain: list[Record], gated: list[Record]) -> list[Data]:
    """ΔH per layer and length: means over heads, paired by seed and sample."""
    before = {(record["seed"], spread["length"]): spread for record in plain for spread in record["spread"]}
    pairs: dict[tuple[int, int], list[float]] = {}
    for record in gated:
        for spread in record["spread"]:
            base = before.get((record["seed"], spread["length"]), {"entropy": []})
            # As many samples as both have; they are the same ones in the same order.
            for one, other in zip(spread["entropy"], base["entropy"], strict=False):
                for layer, (heads, others) in enumerate(zip(one, other, strict=True)):
                    change = mean_of(heads).mean - mean_of(others).mean
                    pairs.setdefault((layer, spread["length"]), []).append(change)
    means = {key: mean_of(values) for key, values in sorted(pairs.items())}
    return [{"layer": key[0], "length": key[1], **asdict(mean)} for key, mean in means.items()]


def _heads(samples: list[list[list[float | None]]]) -> list[Data]:
    """Means over samples for every layer and head; None where no sample has a number, as for fillers without any."""
    rows = []
    for layer in range(len(samples[0])):
        for head in range(len(samples[0][layer])):
            values = [value for sample in samples if (value := sample[layer][head]) is not None]
            mean = asdict(mean_of(values)) if values else {"mean": None, "std": None, "n": 0}
            rows.append({"layer": layer, "head": head, **mean})
    return rows


def _place(order: Sequence[str], position: str) -> int:
    return order.index(position) if position in order else len(order)


def _rank(record: Record) -> tuple[bool, int, Any]:
    """How well a scheme stands for gates: without a variant, in the order of the paper."""
    position = record["position"]
    return (variant_of(record) != "", _place(SIDE_BY_SIDE, position), scheme_order(position))


def _first_seeds(records: Sequence[Record]) -> list[Record]:
    """One run of each scheme, that of the lowest seed."""
    return [min(runs, key=lambda record: record["seed"]) for runs in by_scheme(records).values()]


def _scatter(measured: Data, run: Record) -> Data:
    """Mean gate and mean entropy of every head, and how they go together."""
    gate, spread, within = (np.array(measured[key], dtype=float).mean(0) for key in ("gate", "entropy", "correlation"))
    ranks = (np.argsort(np.argsort(values.ravel())) for values in (gate, spread))
    return {
        "label": name(run), "run": run["run"], "gate": gate.tolist(), "entropy": spread.tolist(),
        "across_heads": _correlation(gate.ravel(), spread.ravel()), "of_ranks": _correlation(*ranks),
        "within_heads": [[value if math.isfinite(value) else None for value in row] for row in within.tolist()],
    }  # fmt: skip


def _correlation(x: Any, y: Any) -> float | None:
    if len(x) < 2 or np.std(x) == 0 or np.std(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def _pictures(results: Results, kind: str, keys: Sequence[str]) -> Data:
    models = [
        {**each, "run": run["run"], "label": name(run), "rank": _rank(run)}
        for run in _first_seeds(language_rows(results, kind))
        for each in run["sets"]
    ]
    # One passage and one layer, that of most runs, side by side.
    places = [(model["asked"]["data"], model["passage"], model["layer"], model["length"]) for model in models]
    best = max(places, key=lambda place: (places.count(place), place))
    chosen = sorted((m for m, place in zip(models, places, strict=True) if place == best), key=lambda m: m["rank"])
    return {
        "data": best[0], "passage": best[1], "layer": best[2], "length": best[3],
        "models": [{key: model[key] for key in keys} for model in chosen],
    }  # fmt: skip
