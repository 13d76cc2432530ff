"""The numbers behind each figure of measured results: plain data that can be stored and drawn again.

Every function takes results and returns a dictionary for JSON. It raises :class:`NoData` where the results have
nothing to show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from gape.report.results import Record, Results, scheme_order
from gape.report.style import TARGETS, label
from gape.report.summary import Curve, curves, mean_of

Data = dict[str, Any]
TARGET_ORDER = ("last", "first", "middle")


class NoData(ValueError):  # noqa: N818
    """The results hold nothing for this figure."""


def accuracy(results: Results) -> Data:
    """The paper's grid: close and far needles by NoPE, RoPE and p-RoPE, each with and without gates, and ALiBi."""
    grid = [
        [
            _panel(results, target, (base, f"{base}+gape"), ("alibi",), f"{label(base)}: {TARGETS[target].lower()}")
            for base in ("nope", "rope", "p-rope")
        ]
        for target in ("last", "first")
    ]
    return _grid(_without_empty(grid))


def fox(results: Results) -> Data:
    """FoX, ALiBi, NoPE and NoPE with gates."""
    panels = [_panel(results, target, ("fox",), ("nope", "nope+gape", "alibi")) for target in TARGET_ORDER[:2]]
    return _grid([[panel for panel in panels if panel]])


def yarn(results: Results) -> Data:
    """YaRN in training and for evaluation only, with and without gates."""
    schemes = ("yarn", "yarn+gape", "rope", "rope+gape")
    panels = [_panel(results, target, schemes, switched=True) for target in TARGET_ORDER[:2]]
    return _grid([[panel for panel in panels if panel]])


def overview(results: Results) -> Data:
    """Everything: a panel per target, a curve per scheme."""
    chosen = results.select(variant=main_variant(results))
    positions = tuple(chosen.values("position"))
    panels = [_panel(chosen, target, positions) for target in TARGET_ORDER]
    return _grid([[panel for panel in panels if panel]])


def variants(results: Results) -> Data:
    """A row per target, a column per scheme, a curve per variant."""
    if len(results.values("variant")) < 2:
        raise NoData("variants: got results of one variant, expected several")
    positions = sorted(results.values("position"), key=scheme_order)
    grid = []
    for target in TARGET_ORDER:
        row = []
        for position in positions:
            found = curves(results.select(target=target, position=position))
            lines = [_line(curve, name=curve.variant) for curve in found if curve.position == curve.evaluated]
            title = f"{label(position)}: {TARGETS[target].lower()}"
            row.append({"target": target, "title": title, "lines": lines} if lines else None)
        grid.append(row)
    return _grid(_without_empty(grid))


def entropy(results: Results, target: str = "first") -> Data:
    """Mean attention entropy over layers and heads by scheme and length, over samples and seeds."""
    chosen = _main(results).select(target=target)
    bars = []
    for position, records in _by_position(chosen).items():
        at: dict[int, list[float]] = {}
        for record in records:
            for spread in record["spread"]:
                at.setdefault(spread["length"], []).extend(_flat_mean(sample) for sample in spread["entropy"])
        lengths = sorted(at)
        means = [mean_of(at[length]) for length in lengths]
        spreads = {"mean": [m.mean for m in means], "std": [m.std for m in means], "n": [m.n for m in means]}
        bars.append({"position": position, "label": label(position), "lengths": lengths, **spreads})
    if not bars:
        raise NoData(f"entropy: got no looks inside models for the {target} needle")
    return {"target": target, "bars": bars}


def entropy_change(results: Results) -> Data:
    """ΔH = H(with gates) − H(without) by target, layer and length, on the same samples and seeds."""
    panels = []
    for target in TARGET_ORDER:
        analyses = _by_position(_main(results).select(target=target))
        pairs = [(base, analyses[base], analyses[f"{base}+gape"]) for base in analyses if f"{base}+gape" in analyses]
        series = [
            {"position": base, "label": label(base), "bars": _changes(plain, gated)} for base, plain, gated in pairs
        ]
        if series:
            panels.append({"target": target, "series": series})
    if not panels:
        raise NoData("entropy change: got no scheme that was looked into both with and without gates")
    return {"panels": panels}


def query_gate(results: Results) -> Data:
    """g at the final query by layer and head, for each gated scheme and target, over samples and seeds."""
    panels: dict[str, Any] = {}
    for record in _main(results).analyses:
        if record.get("gates"):
            panel = panels.setdefault(record["position"], {})
            panel.setdefault(record["target"], []).extend(record["gates"]["query_gate"])
    if not panels:
        raise NoData("query gate: got no looks inside models with gates")
    return {
        "panels": [
            {"position": position, "label": label(position), "targets": _head_means(by_target)}
            for position, by_target in sorted(panels.items(), key=lambda item: scheme_order(item[0]))
        ]
    }


def landmarks(results: Results, position: str | None = None, target: str = "first") -> Data:
    """The landmark gate along one sequence, all layers and heads, with the theory's numbers at its query."""
    traced = [record for record in _main(results).analyses if record.get("trace") and record.get("gates")]
    preferred = (position,) if position else ("p-rope+gape", "nope+gape", "rope+gape", "yarn+gape")
    ranked = sorted(traced, key=lambda r: (_rank(preferred, r["position"]), r["target"] != target, r["seed"]))
    if not ranked or (position and ranked[0]["position"] != position):
        raise NoData("landmarks: got no run whose landmarks were kept")
    record = ranked[0]
    gates = {key: record["gates"][key][0] for key in ("query_gate", "amplitude", "effective", "required")}
    names = {key: record[key] for key in ("run", "position", "target", "seed")}
    return {**names, "label": label(record["position"]), **record["trace"], "query": gates}


def gates_entropy(results: Results) -> Data:
    """The paper's pair: the landmark gate along a sequence, and entropy for far needles."""
    looked = {record["target"] for record in _main(results).analyses}
    target = next((name for name in ("first", "last", "middle") if name in looked), "first")
    return {"landmarks": landmarks(results, target=target), "entropy": entropy(results, target)}


def landmark_kinds(results: Results) -> Data:
    """Mean landmarks of fillers, KEY, =, digits and the query, by variant, scheme, target, layer and head."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in results.analyses:
        if record.get("gates"):
            groups.setdefault((record["variant"], record["position"], record["target"]), []).append(record)
    rows = []
    for (variant, position, target), records in groups.items():
        kinds = {
            kind: _heads([sample for record in records for sample in record["gates"]["landmark"][kind]])
            for kind in records[0]["gates"]["landmark"]
        }
        rows.append({"variant": variant, "label": label(position), "target": target, "kinds": kinds})
    if not rows:
        raise NoData("landmarks by token: got no looks inside models with gates")
    return {"rows": rows}


def attention_maps(results: Results) -> Data:
    """Attention of one sequence, a map per layer and head, for the first base and gated scheme that were kept."""
    kept = [record for record in _main(results).analyses if record.get("maps")]
    if not kept:
        raise NoData("attention maps: got no run whose maps were kept")
    preferred = ("p-rope+gape", "p-rope", "nope+gape", "nope")
    ranked = sorted(kept, key=lambda r: (_rank(preferred, r["position"]), r["target"], r["seed"]))
    first = ranked[0]
    pair = [first, *[r for r in ranked if r["target"] == first["target"] and r["position"] != first["position"]][:1]]
    names = ("run", "position", "target", "seed")
    return {"models": [{k: r[k] for k in names} | {"label": label(r["position"])} | r["maps"] for r in pair]}


def _panel(
    results: Results,
    target: str,
    needed: Sequence[str],
    beside: Sequence[str] = (),
    title: str | None = None,
    switched: bool = False,
) -> Data | None:
    """Curves of some schemes for one target; None where none of the needed ones is there."""
    found = [curve for curve in curves(_main(results).select(target=target)) if curve.position in (*needed, *beside)]
    if not switched:
        found = [curve for curve in found if curve.position == curve.evaluated]
    if not any(curve.position in needed for curve in found):
        return None
    found.sort(key=lambda c: (c.position not in needed, scheme_order(c.position), c.position != c.evaluated))
    return {"target": target, "title": title or TARGETS[target], "lines": [_line(curve) for curve in found]}


def _line(curve: Curve, name: str | None = None) -> Data:
    means = curve.means
    return {
        "label": label(curve.position, curve.evaluated) if name is None else name,
        "position": curve.position,
        "evaluated": curve.evaluated,
        "lengths": list(curve.lengths),
        "mean": [m.mean for m in means],
        "std": [m.std for m in means],
        "n": [m.n for m in means],
        "values": [list(values) for values in curve.values],
    }


def _without_empty(grid: list[list[Data | None]]) -> list[list[Data]]:
    """The panels that are there, row by row."""
    rows = [[panel for panel in row if panel] for row in grid]
    return [row for row in rows if row]


def _grid(rows: list[list[Data]]) -> Data:
    if not rows or not rows[0]:
        raise NoData("accuracy: got no rows of these schemes and targets")
    return {"rows": rows}


def main_variant(results: Results) -> str:
    """The variant that stands for a set of results: the unnamed one, else the first of the rows, by name."""
    known = results.values("variant")
    return "" if "" in known or not known else str(known[0])


def _main(results: Results) -> Results:
    return results.select(variant=main_variant(results))


def _by_position(results: Results) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in sorted(results.analyses, key=lambda r: (scheme_order(r["position"]), r["seed"])):
        groups.setdefault(record["position"], []).append(record)
    return groups


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
    return [{"layer": k[0], "length": k[1], "mean": m.mean, "std": m.std, "n": m.n} for k, m in means.items()]


def _head_means(by_target: dict[str, list[Any]]) -> Data:
    return {target: _heads(by_target[target]) for target in TARGET_ORDER if target in by_target}


def _heads(samples: list[list[list[float | None]]]) -> list[Data]:
    """Means over samples for every layer and head; None where no sample has a number, as for fillers without any."""
    rows = []
    for layer in range(len(samples[0])):
        for head in range(len(samples[0][layer])):
            found = [value for sample in samples if (value := sample[layer][head]) is not None]
            told = asdict(mean_of(found)) if found else {"mean": None, "std": None, "n": 0}
            rows.append({"layer": layer, "head": head, **told})
    return rows


def _flat_mean(layers: Iterable[Sequence[float]]) -> float:
    return mean_of(value for heads in layers for value in heads).mean


def _rank(order: Sequence[str], name: str) -> int:
    return order.index(name) if name in order else len(order)
