"""What the page draws of a figure's numbers: curves with values on hover, and maps by the explorer's tiles.

A figure that is neither, such as one of bars or of several kinds of panels, stays a picture.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gape.explore.view import LEAST_WEIGHT, weight_bytes
from gape.report.series import Data
from gape.report.style import CYCLE, line, lines

#: Keys that say nothing of what is under them.
_PLAIN = ("rows", "panels", "columns", "sides", "lines")


@dataclass(frozen=True, kw_only=True)
class Curves:
    """How the curves of a figure are drawn: what the axes are, and which of them (`log`) are logarithmic.

    Where y is a `share`, its intervals end at 0 and 1; `chance` is the share of guesses, drawn across.
    """

    y: str
    x: str = "Context length (tokens)"
    log: str = "x"
    share: bool = False
    chance: float | None = None

    def of(self, data: Data) -> Data:
        """The chart: axes, marks, and a panel for each list of curves in the data of a figure."""
        marks = {"training length": data.get("train_length"), "native context": data.get("native")}
        panels = list(_panels(data))
        if self.share:
            for curve in (curve for panel in panels for curve in panel["lines"]):
                curve |= {end: _cut(curve[end]) for end in ("low", "high")}
        return {
            "kind": "curves", "x": self.x, "y": self.y, "log": self.log, "share": self.share, "chance": self.chance,
            "marks": [[at, name] for name, at in marks.items() if at], "panels": panels,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Maps:
    """How the maps of a figure are drawn: cells are under `of_key` of each model of the data, one map per head.

    Logarithmic ones are attention, from :data:`LEAST_WEIGHT` to 1; others go from 0 to the largest.
    """

    of_key: str
    what: str
    logarithmic: bool

    def of(self, data: Data) -> Data:
        """The chart: a row of maps per model, their cells as bytes."""
        models = [(model["label"], np.array(model[self.of_key], dtype=float)) for model in data["models"]]
        top = 1.0 if self.logarithmic else max(float(np.nanmax(cells)) for _, cells in models)
        rows = [
            {"label": label, "cells": cells.shape[-1], "heads": [self._bytes(head, top) for head in cells]}
            for label, cells in models
        ]
        return {
            "kind": "maps", "what": self.what, "top": top, "least": LEAST_WEIGHT if self.logarithmic else None,
            "title": f"Layer {data['layer']}, {data['length']:,} tokens of {data['data']}", "length": data["length"],
            "rows": rows,
        }  # fmt: skip

    def _bytes(self, cells: npt.NDArray[Any], top: float) -> str:
        values = np.nan_to_num(cells)
        scaled = weight_bytes(values) if self.logarithmic else np.rint(255 * values / (top or 1)).astype(np.uint8)
        return base64.b64encode(scaled.tobytes()).decode()


def _panels(value: Any, title: str = "", kind: str = "") -> Iterator[Data]:
    """A panel for each list of curves, wherever it stands, under the titles above it; those of one kind share y.

    A curve without places of its own goes from 0 to 1.
    """
    if isinstance(value, list) and value and all(isinstance(each, dict) and "mean" in each for each in value):
        curves = [_curve(entry, style) for entry, style in zip(value, _styles(value), strict=True)]
        yield {"title": ": ".join(filter(None, (title, kind))), "kind": kind, "lines": curves}
    elif isinstance(value, list):
        for each in value:
            yield from _panels(each, title, kind)
    elif isinstance(value, dict):
        for key, inner in value.items():
            for panel in _panels(inner, value.get("title") or title, kind if key in _PLAIN else key):
                # Where a context is read on other documents a line breaks.
                yield panel | ({"breaks": [s[0] for s in value["stretches"][1:]]} if "stretches" in value else {})


def _cut(values: Sequence[float | None] | None) -> list[float | None] | None:
    return None if values is None else [value if value is None else min(max(value, 0.0), 1.0) for value in values]


def _styles(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The colours of curves: those of their schemes; variants of one scheme, and no schemes, have others."""
    if "position" not in entries[0]:
        return [{"color": CYCLE[number % len(CYCLE)], "linestyle": "-"} for number in range(len(entries))]
    return [
        line(entry["position"], entry["evaluated"]) if entry.get("evaluated", entry["position"]) != entry["position"]
        else style
        for entry, style in zip(entries, lines(entries), strict=True)
    ]  # fmt: skip


def _curve(entry: Mapping[str, Any], style: Mapping[str, Any]) -> Data:
    mean = entry["mean"]
    low, high = entry.get("low"), entry.get("high")
    if entry.get("std"):
        low, high = (
            [m if s is None else m + sign * s for m, s in zip(mean, entry["std"], strict=True)] for sign in (-1, 1)
        )
    at = entry.get("lengths") or entry.get("at") or [place / len(mean) for place in range(len(mean))]
    return {
        "label": entry["label"], "colour": style["color"], "dash": style["linestyle"],
        "hollow": style.get("markerfacecolor") == "white", "x": at, "y": mean, "low": low, "high": high,
    }  # fmt: skip
