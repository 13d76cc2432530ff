"""Tables of what forgetting gains and costs: only what can be compared stands beside one another."""

from __future__ import annotations

from typing import Any

import pytest

from gape.report import forgetting
from gape.report.results import Results


def row(**more: Any) -> dict[str, Any]:
    return {
        "run": "a", "position": "rope+gape", "variant": "", "seed": 0, "step": 5, "corpus": "c", "text_seed": 0,
        "precision": "float32", "device": "cpu", "length": 64, "how": "dense", "eps": 0.0, "bounds": None,
        "machine": "this",
    } | more  # fmt: skip


def results(*rows: dict[str, Any]) -> Results:
    return Results(measured={"forgetting": rows})


PERPLEXITY = {"kind": "perplexity", "perplexity": 20.0, "plan": "p", "max_windows": 3}
CACHE = {"kind": "cache", "bytes": 10, "num_keys": [[4, 6]], "realised_eps": 1e-4}
OTHER = {"how": "forgetting", "eps": 1e-3, "bounds": "weights"}


@pytest.mark.parametrize(
    ("about", "changed", "column", "cell"),
    [
        (PERPLEXITY, {"perplexity": 21.0}, 5, "+5.000%"),
        (PERPLEXITY, {"plan": "q", "max_windows": 9}, 5, "–"),
        (PERPLEXITY, {"step": 6}, 5, "–"),
        (PERPLEXITY, {"machine": "that"}, 5, "+0.000%"),
        (CACHE, {"bytes": 5}, 5, "0.500"),
        (CACHE, {"step": 6}, 5, "–"),
    ],
)
def test_other_windows_weights_and_machines_are_not_compared(
    about: dict[str, Any], changed: dict[str, Any], column: int, cell: str
) -> None:
    (table,) = forgetting.tables(results(row(**about), row(**about | OTHER | changed)))
    (matches,) = [cells for cells in table.rows if "forgetting, weights" in cells]
    assert matches[column] == cell


def test_needle_rows_show_the_tiles_that_were_visited() -> None:
    needle = {"kind": "needle", "target": "first", "samples": 9, "how": "skipping", "impl": "triton", "eps": 1e-3}
    tiles = {"kind": "tiles", "target": "first", "how": "skipping", "impl": "triton", "mean": 0.25}
    rows = [row(**needle, accuracy=0.5), row(**tiles, eps=1e-3), row(**tiles | {"mean": 0.5}, eps=1e-2)]
    (table,) = forgetting.tables(results(*rows))
    (cells,) = table.rows
    assert dict(zip(table.header, cells, strict=True))["tiles"] == "0.250"
