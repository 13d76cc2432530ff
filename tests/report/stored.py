"""Made-up results in the form that runs leave behind."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from gape.report.results import Results, pack_hits

SCHEMES = (
    "nope", "nope+gape", "rope", "rope+gape", "p-rope", "p-rope+gape", "alibi", "fox", "yarn", "yarn+gape",
)  # fmt: skip
SWITCH = {"rope": "yarn", "rope+gape": "yarn+gape"}


def accuracy(position: str, factor: int) -> float:
    """Gated schemes and ALiBi stay good, the others fall."""
    return 0.95 if "gape" in position or position == "alibi" else 0.95 / factor


def row(position: str, target: str, seed: int, factor: int, **changed: Any) -> dict[str, Any]:
    draw = random.Random(f"{position}{target}{seed}{factor}")
    hits = [draw.random() < accuracy(position, factor) for _ in range(100)]
    return {
        "run": f"seed{seed}_{target}_{position}", "variant": "", "position": position, "target": target, "seed": seed,
        "train_length": 64, "evaluated": position, "factor": factor, "length": 64 * factor, "needles": factor,
        "samples": 100, "accuracy": sum(hits) / 100, "hits": pack_hits(hits), "eval_seed": 0, "precision": "float32",
        "step": 10, **changed,
    }  # fmt: skip


def looks(position: str, target: str, seed: int) -> dict[str, Any]:
    draw = random.Random(f"{position}{target}{seed}")

    def heads(low: float, high: float) -> list[list[float]]:
        return [[round(draw.uniform(low, high), 4) for _ in range(2)] for _ in range(2)]

    analysis: dict[str, Any] = {
        "run": f"seed{seed}_{target}_{position}", "variant": "", "position": position, "target": target, "seed": seed,
        "train_length": 64, "samples": 2, "factors": [1, 2], "step": 10, "gates": None, "trace": None,
        "spread": [
            {"factor": f, "length": 64 * f, "needles": f, "entropy": [heads(2 - 0.4 * ("gape" in position), 3)] * 2}
            for f in (1, 2)
        ],
    }  # fmt: skip
    place = {"length": 64, "needles": [3, 40], "target_at": 5}
    if "gape" in position:
        names = ("amplitude", "query_gate", "rate", "effective", "required", "target_landmark")
        analysis["gates"] = {name: [heads(0, 1), heads(0, 1)] for name in names}
        kinds = ("filler", "key", "equals", "digit", "query")
        analysis["gates"]["landmark"] = {kind: [heads(0, 1), heads(0, 1)] for kind in kinds}
        if seed == 0:
            analysis["trace"] = place | {"landmark": [[[0.5] * 64] * 2] * 2}
    return analysis


def needles(rows: Iterable[dict[str, Any]]) -> Results:
    return Results(measured={"needle": tuple(rows)})


def stored(schemes: tuple[str, ...] = SCHEMES, targets: tuple[str, ...] = ("last", "first"), seeds: int = 2) -> Results:
    """Results of a small sweep."""
    rows, analyses, runs = [], [], []
    for seed in range(seeds):
        for target in targets:
            for position in schemes:
                for factor in (1, 2, 4):
                    rows.append(row(position, target, seed, factor))
                    if position in SWITCH:
                        rows.append(row(position, target, seed, factor, evaluated=SWITCH[position]))
                analyses.append(looks(position, target, seed))
                runs.append(
                    {
                        "run": rows[-1]["run"],
                        "settings": {"seed": seed, "model": {"position": position, "n_layer": 2}},
                        "manifest": {"started": "2026-01-01T00:00:00Z", "versions": {"torch": "2.9"}, "data": "niah"},
                        "training": {"status": "finished", "step": 10},
                    }
                )
    return Results(runs=tuple(runs), measured={"needle": tuple(rows), "inside": tuple(analyses)})
