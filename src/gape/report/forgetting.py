"""What forgetting gains and costs: tables and the figure's numbers out of the rows of `gape lm forgetting`.

Rows of kinds "prefill" and "decode" are times that earlier versions measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gape.report.results import KINDS, Results
from gape.report.schemes import name
from gape.report.series import Data, NoData
from gape.report.tables import Table, number
from gape.utils.jsonl import Record

Cell = Callable[[Record], str]
Columns = dict[str, Cell]

KEY = KINDS["forgetting"].key
#: What two rows that are compared have in common: weights and text.
SAME = ("step", "weights", "corpus", "text_seed", "plan", "max_windows", "last", "samples", "tokens")
#: Kinds whose rows are times, which are compared on one machine alone.
TIMED = {"prefill", "decode"}
#: Keys of texts that may be missing.
_TEXTS = ("target", "bounds")


def _cell(key: str, form: str = "", unit: str = "") -> Cell:
    return lambda record: number(record[key], form, unit)


def _eps(record: Record) -> str:
    return f"{record['eps']:g}" if record["eps"] else "–"


_COST = {"by": _cell("how"), "eps": _eps}
#: The columns of each table by their headers, with what is in their cells.
_PREFILL: Columns = {
    "Run": _cell("label"), "what": _cell("what"), "tokens": _cell("length", ","), "by": _cell("impl"), "eps": _eps,
    "tiles": _cell("tiles", ".3f"), "ms": _cell("ms", ".2f"), "speed": _cell("speedup", ".2f", "×"),
}  # fmt: skip
_CACHE: Columns = {
    "Run": _cell("label"), "context": _cell("length", ","), "cache": _cell("cache"), "eps": _eps,
    "MiB": lambda record: f"{record['bytes'] / 2**20:.1f}", "of full": _cell("share", ".3f"),
    "keys of a head": lambda record: f"{record['fewest']:,} … {record['most']:,}",
    "realised eps": _cell("realised_eps", ".1e"),
}  # fmt: skip
_DECODE: Columns = {
    "Run": _cell("label"), "context": _cell("length", ","), "batch": _cell("batch"), "cache": _cell("cache"),
    "eps": _eps, "MiB": lambda record: f"{record['bytes'] / 2**20:.1f}", "of full": _cell("share", ".3f"),
    "tokens/s": _cell("tokens_per_second", ".1f"), "speed": _cell("speedup", ".2f", "×"),
    "with looks": _cell("with_looks", ".1f"), "beyond": _cell("beyond", ","),
}  # fmt: skip
_PERPLEXITY: Columns = {
    "Run": _cell("label"), "context": _cell("length", ","), **_COST, "perplexity": _cell("value", ".3f"),
    "change": _cell("change", "+.3f", "%"),
}  # fmt: skip
_NEEDLE: Columns = {
    "Run": _cell("label"), "tokens": _cell("length", ","), **_COST, "needle": _cell("target"),
    "tiles": _cell("tiles", ".3f"), "keys": _cell("held", ".3f"), "accuracy": _cell("value", ".3f"),
    "change": _cell("change", "+.3f"),
}  # fmt: skip


def tables(rows: Iterable[Record]) -> list[Table]:
    """A table for each kind of measurement that there are rows of."""
    latest = _latest(rows)
    costs, cost_order = _costs(latest), ("label", "target", "length", "how", "eps")
    kinds = (
        _table(
            "Prefill: attention alone beside plain dense attention, the whole model beside itself without skipping",
            _PREFILL, _speedups(latest), ("label", "what", "length", "eps"),
        ),
        _table("Cache beside the full one", _CACHE, _caches(latest), ("label", "length", "bounds", "eps")),
        _table("Decoding beside the full cache", _DECODE, _decoding(latest), ("label", "length", "batch", "bounds")),
        _table("Perplexity beside dense attention on the same windows", _PERPLEXITY, _of(costs, "perplexity"),
               cost_order),
        _table("Needle accuracy beside dense attention on the same samples", _NEEDLE, _of(costs, "needle"), cost_order),
    )  # fmt: skip
    return [table for table in kinds if table.rows]


def result_tables(results: Results) -> list[Table]:
    """:func:`tables` of stored results."""
    return tables(results.of("forgetting"))


def series(results: Results) -> Data:
    """The numbers of the figure.

    Raises:
        NoData: nothing was measured.
    """
    rows = _latest(results.of("forgetting"))
    data = {"prefill": _speedups(rows), "cache": _caches(rows), "decode": _decoding(rows), "cost": _costs(rows)}
    if not any(data.values()):
        raise NoData("no measurements of forgetting")
    return data


def _latest(rows: Iterable[Record]) -> list[Record]:
    """The later of two rows of one measurement."""
    return list({(row["run"], *(row.get(key) for key in KEY)): row for row in rows}.values())


def _speedups(rows: Sequence[Record]) -> list[Record]:
    """Times of prefill beside plain dense attention (attention alone) and beside the dense model (all of it)."""
    records = []
    prefill, tiles = _of(rows, "prefill"), _of(rows, "tiles")
    for row in prefill:
        base = (
            _find(prefill, row, impl="cudnn", eps=0.0) if row["what"] == "attention" else _find(prefill, row, eps=0.0)
        )
        visited = _find(tiles, row, eps=row["eps"], impl=row["impl"], what=None)
        records.append({
            "label": _label(row), "run": row["run"], "what": row["what"], "length": row["length"], "impl": row["impl"],
            "eps": row["eps"], "ms": row["ms"], "tiles": visited and visited["mean"],
            "speedup": base and base["ms"] / row["ms"],
        })  # fmt: skip
    return records


def _caches(rows: Sequence[Record]) -> list[Record]:
    """Bytes and keys of caches beside the full one."""
    records = []
    caches = _of(rows, "cache")
    for row in caches:
        base = _find(caches, row, how="dense", eps=0.0, bounds=None)
        keys = [count for layer in row["num_keys"] for count in layer]
        records.append({
            "label": _label(row), "run": row["run"], "length": row["length"], "cache": _cache(row),
            "bounds": row["bounds"], "eps": row["eps"], "bytes": row["bytes"], "fewest": min(keys), "most": max(keys),
            "realised_eps": row["realised_eps"] if row["bounds"] else None,
            "share": base and row["bytes"] / base["bytes"],
        })  # fmt: skip
    return records


def _decoding(rows: Sequence[Record]) -> list[Record]:
    """Bytes and speed of decoding beside the full cache."""
    records = []
    decode = _of(rows, "decode")
    for row in decode:
        base = _find(decode, row, how="dense", eps=0.0, bounds=None)
        records.append({
            "label": _label(row), "run": row["run"], "length": row["length"], "batch": row["batch"],
            "cache": _cache(row), "bounds": row["bounds"], "eps": row["eps"], "bytes": row["bytes"],
            "tokens_per_second": row["tokens_per_second"], "beyond": row.get("beyond"),
            "with_looks": 1000 * row["batch"] / row["mean_ms"] if row.get("looked") else None,
            "share": base and row["bytes"] / base["bytes"],
            "speedup": base and row["tokens_per_second"] / base["tokens_per_second"],
        })  # fmt: skip
    return records


def _costs(rows: Sequence[Record]) -> list[Record]:
    """Perplexity and needle accuracy beside the dense model's on the same text; tiles visited for needles."""
    records = []
    tiles = _of(rows, "tiles")
    for kind, value in (("perplexity", "perplexity"), ("needle", "accuracy")):
        scores = _of(rows, kind)
        for row in scores:
            base = _find(scores, row, how="dense", eps=0.0, bounds=None)
            change = None
            if base is not None:
                difference = row[value] - base[value]
                change = 100 * difference / base[value] if kind == "perplexity" else difference
            visited = _find(tiles, row, impl=row.get("impl"), samples=None) if row["how"] == "skipping" else None
            records.append({
                "label": _label(row), "run": row["run"], "kind": kind, "length": row["length"], "how": _cache(row),
                "target": row.get("target"), "eps": row["eps"], "value": row[value], "change": change,
                "tiles": visited and visited["mean"], "held": row.get("key_share", row.get("held")),
            })  # fmt: skip
    return records


def _of(rows: Iterable[Record], kind: str) -> list[Record]:
    return [row for row in rows if row["kind"] == kind]


def _find(rows: Iterable[Record], like: Record, **changed: Any) -> Record | None:
    """The row of the same weights, text and device as another, with some values of its key changed; None without.

    Times are of the same machine and version of torch, too.
    """
    keys = ["run", *(key for key in (*KEY, *SAME) if key not in ("kind", "how", "impl"))]
    for row in rows:
        same = keys + ["machine", "torch"] * (row["kind"] in TIMED)
        if all(row.get(key) == value for key, value in ({key: like.get(key) for key in same} | changed).items()):
            return row
    return None


def _label(row: Record) -> str:
    """The scheme and its variant, after the model that gates were put into, and the seed where it is not the first."""
    base = f"{row['base']}, " if row.get("base") else ""
    return base + name(row) + (f", seed {row['seed']}" if row["seed"] else "")


def _cache(row: Record) -> str:
    """How the model ran, in a few words."""
    if row["how"] == "dense":
        return "full" if row["kind"] in ("cache", "decode") else "dense"
    return f"{row['how']}, {row['bounds']}" if row.get("bounds") else str(row["how"])


def _table(title: str, columns: Columns, records: Iterable[Record], order: Sequence[str]) -> Table:
    ordered = sorted(records, key=lambda record: [record[key] or "" if key in _TEXTS else record[key] for key in order])
    rows = tuple(tuple(cell(record) for cell in columns.values()) for record in ordered)
    return Table(title=title, header=tuple(columns), rows=rows)
