"""What forgetting gains and costs: tables and the figure's numbers out of the rows of `gape lm forgetting`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gape.report.results import KINDS, Record, Results
from gape.report.schemes import name
from gape.report.series import Data, NoData
from gape.report.tables import Table, number

KEY = KINDS["forgetting"].key
#: What two rows that are compared have in common: weights and text.
SAME = ("step", "weights", "corpus", "text_seed", "plan", "max_windows", "last", "samples", "tokens")
#: Kinds whose rows are times, which are compared on one machine alone.
TIMED = {"prefill", "decode"}


def tables(rows: Iterable[Record]) -> list[Table]:
    """A table for each kind of measurement that there are rows of."""
    latest = _latest(rows)
    speedups, decoding, costs = _speedups(latest), _decoding(latest), _costs(latest)
    kinds = (
        _table(
            "Prefill: attention alone beside plain dense attention, the whole model beside itself without skipping",
            ("Run", "what", "tokens", "by", "eps", "tiles", "ms", "speed"),
            sorted(speedups, key=lambda f: (f["label"], f["what"], f["length"], f["eps"])),
            lambda f: (
                f["label"], f["what"], f"{f['length']:,}", f["impl"], _eps(f["eps"]), number(f["tiles"], ".3f"),
                f"{f['ms']:.2f}", number(f["speedup"], ".2f", "×"),
            ),
        ),
        _table(
            "Decoding beside the full cache",
            (
                "Run", "context", "batch", "cache", "eps", "MiB", "of full", "tokens/s", "speed", "with looks",
                "beyond",
            ),
            sorted(decoding, key=lambda f: (f["label"], f["length"], f["batch"], str(f["bounds"] or ""))),
            lambda f: (
                f["label"], f"{f['length']:,}", str(f["batch"]), f["cache"], _eps(f["eps"]),
                f"{f['bytes'] / 2**20:.1f}", number(f["share"], ".3f"), f"{f['tokens_per_second']:.1f}",
                number(f["speedup"], ".2f", "×"), number(f["with_looks"], ".1f"), number(f["beyond"], ","),
            ),
        ),
        _table(
            "Perplexity beside dense attention on the same windows",
            ("Run", "context", "by", "eps", "perplexity", "change"),
            _sorted_costs(costs, "perplexity"),
            lambda f: (*_run_cells(f), f"{f['value']:.3f}", number(f["change"], "+.3f", "%")),
        ),
        _table(
            "Needle accuracy beside dense attention on the same samples",
            ("Run", "tokens", "by", "eps", "needle", "tiles", "keys", "accuracy", "change"),
            _sorted_costs(costs, "needle"),
            lambda f: (
                *_run_cells(f), str(f["target"]), number(f["tiles"], ".3f"), number(f["held"], ".3f"),
                f"{f['value']:.3f}", number(f["change"], "+.3f"),
            ),
        ),
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
    data = {"prefill": _speedups(rows), "decode": _decoding(rows), "cost": _costs(rows)}
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
                "tiles": visited and visited["mean"], "held": row.get("held"),
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
        return "full" if row["kind"] == "decode" else "dense"
    return f"{row['how']}, {row['bounds']}" if row.get("bounds") else str(row["how"])


def _table(
    title: str, header: tuple[str, ...], rows: Iterable[Record], cells: Callable[[Record], tuple[str, ...]]
) -> Table:
    return Table(title=title, header=header, rows=tuple(map(cells, rows)))


def _sorted_costs(costs: Iterable[Record], kind: str) -> list[Record]:
    return sorted(_of(costs, kind), key=lambda f: (f["label"], str(f["target"]), f["length"], f["how"], f["eps"]))


def _run_cells(record: Record) -> tuple[str, ...]:
    return record["label"], f"{record['length']:,}", record["how"], _eps(record["eps"])


def _eps(eps: float) -> str:
    return f"{eps:g}" if eps else "–"
