"""What forgetting gains and costs: tables and a figure out of the rows of `gape lm forgetting`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gape.report.lm_summary import name
from gape.report.results import Record, Results
from gape.report.series import Data, NoData
from gape.report.style import CYCLE, FAINT, length_axis, new_figure
from gape.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Commands that make the results of the figure.
MADE_BY = (
    "gape lm train lm/forgetting data=DIR, gape lm forgetting runs/lm/forgetting/* --data DIR, gape niah train "
    "niah/forgetting, gape niah forgetting runs/niah/forgetting/*, "
    "and then gape report runs/lm/forgetting runs/niah/forgetting --out results/forgetting"
)

#: What tells two rows of one kind apart besides the run.
KEY = ("kind", "what", "length", "how", "impl", "eps", "bounds", "batch", "precision", "device")

#: What two rows that are set beside each other have in common: weights, text, and whose clock it was.
SAME = ("step", "weights", "corpus", "text_seed", "plan", "max_windows", "last", "samples", "tokens")
TIMED = {"prefill", "decode"}


def tables(rows: Iterable[Record]) -> list[Table]:
    """A table for each kind of measurement that there are rows of."""
    found = _latest(rows)
    made = (table(found) for table in (_prefill_table, _decode_table, _perplexity_table, _needle_table))
    return [table for table in made if table is not None]


def result_tables(results: Results) -> list[Table]:
    """:func:`tables` of stored results."""
    return tables(results.measured.get("forgetting", ()))


def series(results: Results) -> Data:
    """The numbers of the figure.

    Raises:
        NoData: nothing was measured.
    """
    rows = _latest(results.measured.get("forgetting", ()))
    data = {"prefill": _speedups(rows), "decode": _decoding(rows), "cost": _costs(rows)}
    if not any(data.values()):
        raise NoData("no measurements of forgetting")
    return data


#: Inches: of a figure without its legend, of a line of the legend, and from an axis to the legend below its name.
_HEIGHT, _ENTRY, _BELOW = 3.0, 0.13, 0.5
#: One after the other, when colours come again.
_MARKERS = "os^D"
#: An eps that half precision sees nothing of: a control, which tables have.
_UNSEEN = 1e-9


def draw(data: Data) -> Figure:
    """Speed of prefill by length, bytes against speed of decoding, and what it costs by eps: what there is of them."""
    panels = {"prefill": _draw_prefill, "decode": _draw_decode, "cost": _draw_cost}
    shown = [panel for part, panel in panels.items() if data[part]]
    figure, axes = new_figure(11 * len(shown) / 3, _HEIGHT, 1, len(shown))
    for panel, axis in zip(shown, axes[0], strict=True):
        panel(axis, data)
    entries = [len(axis.get_legend_handles_labels()[1]) for axis in axes[0]]
    figure.set_figheight(_HEIGHT + _ENTRY * max(entries, default=0))
    return figure


def _latest(rows: Iterable[Record]) -> list[Record]:
    """The later of two rows of one measurement."""
    return list({(row["run"], *(row.get(key) for key in KEY)): row for row in rows}.values())


def _speedups(rows: Sequence[Record]) -> list[Record]:
    """Times of prefill beside plain dense attention (attention alone) and beside the dense model (all of it)."""
    made = []
    found = [row for row in rows if row["kind"] == "prefill"]
    for row in found:
        base = _find(found, row, impl="cudnn", eps=0.0) if row["what"] == "attention" else _find(found, row, eps=0.0)
        looked = _find([r for r in rows if r["kind"] == "tiles"], row, eps=row["eps"], impl=row["impl"], what=None)
        made.append({
            "label": _label(row), "run": row["run"], "what": row["what"], "length": row["length"], "impl": row["impl"],
            "eps": row["eps"], "ms": row["ms"], "tiles": looked and looked["mean"],
            "speedup": base and base["ms"] / row["ms"],
        })  # fmt: skip
    return made


def _decoding(rows: Sequence[Record]) -> list[Record]:
    """Bytes and speed of decoding beside the full cache."""
    made = []
    found = [row for row in rows if row["kind"] == "decode"]
    for row in found:
        base = _find(found, row, how="dense", eps=0.0, bounds=None)
        made.append({
            "label": _label(row), "run": row["run"], "length": row["length"], "batch": row["batch"],
            "cache": _cache(row), "bounds": row["bounds"], "eps": row["eps"], "bytes": row["bytes"],
            "tokens_per_second": row["tokens_per_second"], "beyond": row.get("beyond"),
            "with_looks": 1000 * row["batch"] / row["mean_ms"] if row.get("looked") else None,
            "share": base and row["bytes"] / base["bytes"],
            "speedup": base and row["tokens_per_second"] / base["tokens_per_second"],
        })  # fmt: skip
    return made


def _costs(rows: Sequence[Record]) -> list[Record]:
    """Perplexity and needle accuracy beside the dense model's on the same text; tiles looked at for needles."""
    made = []
    looked = [row for row in rows if row["kind"] == "tiles"]
    for kind, value in (("perplexity", "perplexity"), ("needle", "accuracy")):
        found = [row for row in rows if row["kind"] == kind]
        for row in found:
            base = _find(found, row, how="dense", eps=0.0, bounds=None)
            change = None
            if base is not None:
                difference = row[value] - base[value]
                change = 100 * difference / base[value] if kind == "perplexity" else difference
            tiles = _find(looked, row, impl=row.get("impl"), samples=None) if row["how"] == "skipping" else None
            made.append({
                "label": _label(row), "run": row["run"], "kind": kind, "length": row["length"], "how": _cache(row),
                "target": row.get("target"), "eps": row["eps"], "value": row[value], "change": change,
                "tiles": tiles and tiles["mean"], "held": row.get("held"),
            })  # fmt: skip
    return made


def _find(rows: Iterable[Record], like: Record, **changed: Any) -> Record | None:
    """The row of the same weights, text and device as another, with some values of its key changed; None without.

    Times are of the same machine and version of torch, too.
    """
    keys = [key for key in (*KEY, *SAME) if key not in ("kind", "how", "impl")]
    wanted = {key: like.get(key) for key in ("run", *keys)} | changed
    timed = {key: like.get(key) for key in ("machine", "torch")}
    for row in rows:
        asked = wanted | timed if row["kind"] in TIMED else wanted
        if all(row.get(key) == value for key, value in asked.items()):
            return row
    return None


def _label(row: Record) -> str:
    """The scheme and its variant, behind the model that gates were put into, and the seed where it is not the first."""
    base = f"{row['base']}, " if row.get("base") else ""
    return base + name(row) + (f", seed {row['seed']}" if row["seed"] else "")


def _cache(row: Record) -> str:
    """How the model ran, in a few words."""
    if row["how"] == "dense":
        return "full" if row["kind"] == "decode" else "dense"
    return f"{row['how']}, {row['bounds']}" if row.get("bounds") else str(row["how"])


def _prefill_table(rows: Sequence[Record]) -> Table | None:
    cells = tuple(
        (f["label"], f["what"], f"{f['length']:,}", f["impl"], _eps(f["eps"]), _number(f["tiles"], ".3f"),
         f"{f['ms']:.2f}", _number(f["speedup"], ".2f", "×"))
        for f in sorted(_speedups(rows), key=lambda f: (f["label"], f["what"], f["length"], f["eps"]))
    )  # fmt: skip
    header = ("Run", "what", "tokens", "by", "eps", "tiles", "ms", "speed")
    title = "Prefill: attention alone beside plain dense attention, the whole model beside itself without skipping"
    return Table(title=title, header=header, rows=cells) if cells else None


def _decode_table(rows: Sequence[Record]) -> Table | None:
    cells = tuple(
        (f["label"], f"{f['length']:,}", str(f["batch"]), f["cache"], _eps(f["eps"]), f"{f['bytes'] / 2**20:.1f}",
         _number(f["share"], ".3f"), f"{f['tokens_per_second']:.1f}", _number(f["speedup"], ".2f", "×"),
         _number(f["with_looks"], ".1f"), "–" if f["beyond"] is None else f"{f['beyond']:,}")
        for f in sorted(_decoding(rows), key=lambda f: (f["label"], f["length"], f["batch"], str(f["bounds"] or "")))
    )  # fmt: skip
    header = ("Run", "context", "batch", "cache", "eps", "MiB", "of full", "tokens/s", "speed", "with looks", "beyond")
    return Table(title="Decoding beside the full cache", header=header, rows=cells) if cells else None


def _perplexity_table(rows: Sequence[Record]) -> Table | None:
    return _cost_table(
        rows, "perplexity", "Perplexity beside dense attention on the same windows",
        ("Run", "context", "by", "eps", "perplexity", "change"), lambda f: (f"{f['value']:.3f}", _percent(f["change"])),
    )  # fmt: skip


def _needle_table(rows: Sequence[Record]) -> Table | None:
    return _cost_table(
        rows, "needle", "Needle accuracy beside dense attention on the same samples",
        ("Run", "tokens", "by", "eps", "needle", "tiles", "keys", "accuracy", "change"),
        lambda f: (
            str(f["target"]), _number(f["tiles"], ".3f"), _number(f["held"], ".3f"), f"{f['value']:.3f}",
            _number(f["change"], "+.3f"),
        ),
    )  # fmt: skip


def _cost_table(
    rows: Sequence[Record], kind: str, title: str, header: tuple[str, ...], last: Callable[[Record], tuple[str, ...]]
) -> Table | None:
    cells = tuple(
        (f["label"], f"{f['length']:,}", f["how"], _eps(f["eps"]), *last(f))
        for f in sorted(_costs(rows), key=lambda f: (f["label"], str(f["target"]), f["length"], f["how"], f["eps"]))
        if f["kind"] == kind
    )
    return Table(title=title, header=header, rows=cells) if cells else None


def _eps(eps: float) -> str:
    return f"{eps:g}" if eps else "–"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3f}%"


def _draw_prefill(axis: Axes, data: Data) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for found in data["prefill"]:
        if found["eps"] and found["speedup"]:
            what = "" if found["what"] == "attention" else ", whole model"
            key = f"{found['label']}, eps {found['eps']:g}{what}"
            lines.setdefault(key, []).append((found["length"], found["speedup"]))
    _plot(axis, lines)
    axis.set_title("Prefill")
    axis.set_ylabel("Times as fast as dense")
    axis.axhline(1, color=FAINT, linewidth=0.8)
    _finish(axis, [int(length) for points in lines.values() for length, _ in points])


def _draw_decode(axis: Axes, data: Data) -> None:
    groups: dict[str, list[tuple[float, float]]] = {}
    for found in data["decode"]:
        if found["bounds"] and found["share"]:
            key = f"{found['label']}, {found['bounds']}, {found['length']:,}, batch {found['batch']}"
            groups.setdefault(key, []).append((found["share"], found["speedup"]))
    _plot(axis, groups)
    axis.set_title("Decoding")
    axis.set_xlabel("Bytes, of the full cache")
    axis.set_ylabel("Tokens per second, × full cache")
    axis.axhline(1, color=FAINT, linewidth=0.8)
    _finish(axis, [])


def _draw_cost(axis: Axes, data: Data) -> None:
    groups: dict[str, list[tuple[float, float]]] = {}
    kinds = dict.fromkeys(found["kind"] for found in data["cost"])
    kind = next(iter(kinds), "perplexity")
    for found in data["cost"]:
        if found["kind"] == kind and found["eps"] > _UNSEEN and found["change"] is not None:
            target = f", {found['target']}" if found["target"] else ""
            key = f"{found['label']}{target}, {found['how']}, {found['length']:,}"
            groups.setdefault(key, []).append((found["eps"], found["change"]))
    _plot(axis, groups)
    axis.set_title("Cost")
    axis.set_xlabel("eps")
    axis.set_ylabel("Change of perplexity (%)" if kind == "perplexity" else "Change of accuracy")
    axis.axhline(0, color=FAINT, linewidth=0.8)
    if groups:
        powers = [math.log10(eps) for points in groups.values() for eps, _ in points]
        axis.set_xscale("log")
        axis.set_xlim(10 ** (min(powers) - 0.2), 10 ** (max(powers) + 0.2))
    _finish(axis, [])


def _plot(axis: Axes, lines: Mapping[str, list[tuple[float, float]]]) -> None:
    """A line for each label through its points, in order; those of a whole model are broken."""
    for number, (label, points) in enumerate(lines.items()):
        style = _MARKERS[number // len(CYCLE) % len(_MARKERS)] + ("--" if "whole model" in label else "-")
        axis.plot(*zip(*sorted(points), strict=True), style, color=CYCLE[number % len(CYCLE)], label=label)


def _finish(axis: Axes, lengths: Sequence[int]) -> None:
    from matplotlib.transforms import ScaledTranslation  # noqa: PLC0415

    if lengths:
        length_axis(axis, sorted(set(lengths)))
    if axis.get_lines()[:-1]:
        # Below: lines cross every corner.
        below = axis.transAxes + ScaledTranslation(0, -_BELOW, axis.figure.dpi_scale_trans)
        axis.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below)
