"""What forgetting gains and costs: tables of stored rows, each beside the dense model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gape.report.results import KINDS, Results
from gape.report.schemes import name
from gape.report.tables import Table, number
from gape.utils.jsonl import Record

Cell = Callable[[Record], str]

KEY = KINDS["forgetting"].key
#: What two rows that are compared have in common: weights and text.
SAME = ("step", "weights", "corpus", "text_seed", "plan", "max_windows", "last", "samples", "tokens")


def tables(results: Results) -> list[Table]:
    """A table for each kind of measurement that there are rows of; of two rows of one measurement the later counts."""
    rows = results.of("forgetting")
    latest = list({(row["run"], *(row.get(key) for key in KEY)): row for row in rows}.values())
    kinds = (
        ("Cache beside the full one", _CACHE, "cache", "bytes"),
        ("Perplexity beside dense attention on the same windows", _PERPLEXITY, "perplexity", "perplexity"),
        ("Needle accuracy beside dense attention on the same samples", _NEEDLE, "needle", "accuracy"),
    )
    each = (_table(title, columns, _beside(latest, kind, value)) for title, columns, kind, value in kinds)
    return [table for table in each if table.rows]


def _cell(key: str, form: str = "", unit: str = "") -> Cell:
    return lambda row: number(row.get(key), form, unit)


def _change(change: Callable[[float, float], float], form: str, unit: str = "") -> Cell:
    """How a row's value compares with that of the dense model; a dash where there is none."""
    return lambda row: number(None if row["dense"] is None else change(row["value"], row["dense"]), form, unit)


def _keys(row: Record) -> str:
    counts = [count for layer in row["num_keys"] for count in layer]
    return f"{min(counts):,} … {max(counts):,}"


_SETTING: dict[str, Cell] = {
    "by": lambda row: f"{row['how']}, {row['bounds']}" if row.get("bounds") else str(row["how"]),
    "eps": lambda row: f"{row['eps']:g}" if row["eps"] else "–",
}  # fmt: skip
#: The columns of each table by their headers, with what is in their cells.
_CACHE: dict[str, Cell] = {
    "Run": _cell("label"), "context": _cell("length", ","), **_SETTING,
    "MiB": lambda row: f"{row['bytes'] / 2**20:.1f}", "of full": _change(lambda own, full: own / full, ".3f"),
    "keys of a head": _keys,
    "realised eps": lambda row: number(row["realised_eps"] if row["bounds"] else None, ".1e"),
}  # fmt: skip
_PERPLEXITY: dict[str, Cell] = {
    "Run": _cell("label"), "context": _cell("length", ","), **_SETTING, "perplexity": _cell("value", ".3f"),
    "change": _change(lambda own, dense: 100 * (own - dense) / dense, "+.3f", "%"),
}  # fmt: skip
_NEEDLE: dict[str, Cell] = {
    "Run": _cell("label"), "tokens": _cell("length", ","), **_SETTING, "needle": _cell("target"),
    "tiles": _cell("tiles", ".3f"), "keys": _cell("key_share", ".3f"), "accuracy": _cell("value", ".3f"),
    "change": _change(lambda own, dense: own - dense, "+.3f"),
}  # fmt: skip


def _beside(rows: Sequence[Record], kind: str, value: str) -> list[Record]:
    """The rows of a kind with their value, that of the dense model, and the tiles that were visited."""
    own, tiles = ([row for row in rows if row["kind"] == which] for which in (kind, "tiles"))
    records = []
    for row in own:
        dense = _find(own, row, how="dense", eps=0.0, bounds=None)
        visited = _find(tiles, row, impl=row.get("impl"), samples=None) if row["how"] == "skipping" else None
        records.append(
            row
            | {"label": _label(row), "value": row[value], "dense": dense and dense[value]}
            | {"tiles": visited and visited["mean"]}
        )
    return records


def _find(rows: Iterable[Record], like: Record, **changed: Any) -> Record | None:
    """The row of the same weights, text and device as another, with some values of its key changed; None without."""
    keys = ("run", *(key for key in (*KEY, *SAME) if key not in ("kind", "how", "impl")))
    values = {key: like.get(key) for key in keys} | changed
    return next((row for row in rows if all(row.get(key) == value for key, value in values.items())), None)


def _label(row: Record) -> str:
    """The scheme and its variant, after the model that gates were put into, and the seed where it is not the first."""
    base = f"{row['base']}, " if row.get("base") else ""
    return base + name(row) + (f", seed {row['seed']}" if row["seed"] else "")


def _table(title: str, columns: dict[str, Cell], rows: Iterable[Record]) -> Table:
    def order(row: Record) -> tuple[Any, ...]:
        return row["label"], row.get("target") or "", row["length"], row["how"], row.get("bounds") or "", row["eps"]

    cells = tuple(tuple(cell(row) for cell in columns.values()) for row in sorted(rows, key=order))
    return Table(title=title, header=tuple(columns), rows=cells)
