"""Figures of accuracy, loss, RULER and forgetting, each drawn from the data of its series."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gape.report.series import Data
from gape.report.style import CYCLE, FAINT, legend_below, length_axis, line, lines, log_axis, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHANCE = 0.1
Points = dict[str, list[tuple[float, float]]]
#: Inches: of the figure of forgetting without its legend, of a line of the legend, and from an axis to the legend.
_HEIGHT, _ENTRY, _BELOW = 3.0, 0.13, 0.5
#: An eps that half precision rounds away: a control, which tables have.
_CONTROL = 1e-9


def draw_accuracy(data: Data) -> Figure:
    """Accuracy against length, a panel per entry, means with deviations over seeds."""
    rows = data["rows"]
    columns = max(map(len, rows))
    figure, axes = new_figure(3.1 * columns + 0.5, 2.4 * len(rows) + 0.5, len(rows), columns, sharey=True)
    for r, row in enumerate(rows):
        for c in range(columns):
            axes[r, c].set_visible(c < len(row))
        for ax, panel in zip(axes[r], row, strict=False):
            _accuracy_panel(ax, panel)
        axes[r, 0].set_ylabel("Accuracy")
    legend_below(figure, axes, 1.9)
    return figure


def _accuracy_panel(axes: Axes, panel: Data) -> None:
    entries = panel["lines"]
    by_scheme = len({(entry["position"], entry["evaluated"]) for entry in entries}) == len(entries)
    axes.axhline(CHANCE, color=FAINT, linewidth=0.8, linestyle=(0, (1, 2)), label="chance")
    for number, entry in enumerate(entries):
        style = line(entry["position"], entry["evaluated"])
        if not by_scheme:
            colour, marker = CYCLE[number % len(CYCLE)], "os^Dv"[number % 5]
            style = {"color": colour, "marker": marker, "markerfacecolor": colour, "markeredgecolor": colour}
        # A little to the side of one another, so that bars and dots do not overlap.
        shift = min(1.025, 1.1 ** (1 / len(entries))) ** (number - (len(entries) - 1) / 2)
        at = [length * shift for length in entry["lengths"]]
        for x, values in zip(at, entry["values"], strict=True):
            if len(values) > 1:
                axes.plot([x] * len(values), values, ".", color=style["color"], markersize=3, alpha=0.6, zorder=1)
        axes.errorbar(
            at, entry["mean"], yerr=_within(entry), label=entry["label"], capsize=2.5, elinewidth=0.9, **style
        )
    length_axis(axes, (length for entry in entries for length in entry["lengths"]))
    axes.set_ylim(-0.03, 1.06)
    axes.set_title(panel["title"])


def _within(entry: Data) -> list[list[float]] | None:
    """Deviations below and above, cut where no accuracy can be."""
    if not any(entry["std"]):
        return None
    pairs = [(mean, std or 0.0) for mean, std in zip(entry["mean"], entry["std"], strict=True)]
    return [[min(std, mean) for mean, std in pairs], [min(std, 1 - mean) for mean, std in pairs]]


def draw_perplexity(data: Data) -> Figure:
    """Perplexity against context, a panel per stratum and alignment; bands are intervals, or deviations over seeds.

    A line breaks where a context is read on other documents, and says how many. A model's native context is marked.
    """
    panels = data["panels"]
    figure, axes = new_figure(3.6 * len(panels) + 0.6, 3.3, 1, len(panels), sharey=True)
    for ax, panel in zip(axes[0], panels, strict=True):
        _draw_lines(ax, panel["lines"], panel["stretches"])
        _documents(ax, panel)
        _trained_at(ax, data["train_length"])
        length_axis(ax, (x for entry in panel["lines"] for x in entry["at"]))
        tilt(ax)
        ax.set_title(panel["title"], fontsize=9)
        low, high = ax.get_xlim()
        native = data.get("native")
        if native is not None and low < native < high:
            ax.axvline(native, color=FAINT, linewidth=0.8)
            ax.text(native, 0.98, " native context", transform=ax.get_xaxis_transform(), va="top", fontsize=6)
    axes[0, 0].set_yscale("log")
    low, high = axes[0, 0].get_ylim()
    # Over several powers of ten that many numbers would lie on one another.
    log_axis(axes[0, 0], "y", digits=(1, 2, 3, 5, 7) if high < 100 * low else (1, 3))
    axes[0, 0].set_ylabel("Perplexity")
    legend_below(figure, axes)
    return figure


def draw_far_back(data: Data) -> Figure:
    """Loss by distance of the answer above, what the far text was worth below; a column per kind."""
    columns = data["columns"]
    figure, axes = new_figure(3.5 * len(columns) + 0.6, 5.4, 2, len(columns))
    for c, column in enumerate(columns):
        for r, part in enumerate(("loss", "gain")):
            ax = axes[r, c]
            _draw_lines(ax, column[part])
            _trained_at(ax, data["train_length"])
            length_axis(ax, map(int, column["tokens"]), "Answer this many tokens back" if r else "")
            tilt(ax)
        axes[0, c].set_title(column["title"])
        axes[1, c].axhline(0, color=FAINT, linewidth=0.8)
    axes[0, 0].set_ylabel("Loss (nats per token)")
    axes[1, 0].set_ylabel("Gain from the far text (nats)")
    legend_below(figure, axes)
    return figure


def draw_ruler(data: Data) -> Figure:
    """A point with its interval for each method, side by side in each subset."""
    figure, axes = new_figure(max(6.4, 1.1 * len(data["columns"])), 3.4)
    ax, count = axes[0, 0], len(data["methods"])
    for number, (method, style) in enumerate(zip(data["methods"], lines(data["methods"]), strict=True)):
        at = [(c + 0.7 * (number + 0.5) / count - 0.35, *cell) for c, cell in enumerate(method["cells"]) if cell]
        reach = [[mean - low for _, mean, low, _ in at], [high - mean for _, mean, _, high in at]]
        x, means = [point[0] for point in at], [point[1] for point in at]
        ax.errorbar(x, means, reach, label=method["label"], elinewidth=1.2, **{**style, "linestyle": "none"})
    ax.set_xticks(range(len(data["columns"])), data["columns"], rotation=30, ha="right")
    ax.set_ylabel("Change of answer NLL (%)" if data["percent"] else "Answer NLL (nats per token)")
    if data["percent"]:
        ax.axhline(0, color=FAINT, linewidth=0.8)
    figure.legend(loc="outside lower center", ncols=min(4, count))
    return figure


def draw_forgetting(data: Data) -> Figure:
    """Bytes by length, cost by eps, and times that earlier versions measured: what there is of them."""
    panels: dict[str, Callable[[Axes, list[Data]], None]] = {
        "prefill": _draw_prefill, "cache": _draw_cache, "decode": _draw_decode, "cost": _draw_cost,
    }  # fmt: skip
    shown = [part for part in panels if data.get(part)]
    figure, axes = new_figure(11 * len(shown) / 3, _HEIGHT, 1, len(shown))
    for part, ax in zip(shown, axes[0], strict=True):
        panels[part](ax, data[part])
    entries = [len(ax.get_legend_handles_labels()[1]) for ax in axes[0]]
    figure.set_figheight(_HEIGHT + _ENTRY * max(entries, default=0))
    return figure


def _draw_prefill(ax: Axes, rows: list[Data]) -> None:
    points: Points = {}
    for row in rows:
        if row["eps"] and row["speedup"]:
            what = "" if row["what"] == "attention" else ", whole model"
            points.setdefault(f"{row['label']}, eps {row['eps']:g}{what}", []).append((row["length"], row["speedup"]))
    ax.set_title("Prefill")
    ax.set_ylabel("Times as fast as dense")
    _draw_points(ax, points, level=1)
    if points:
        length_axis(ax, (int(length) for each in points.values() for length, _ in each))


def _draw_cache(ax: Axes, rows: list[Data]) -> None:
    points: Points = {}
    for row in rows:
        if row["bounds"] and row["share"]:
            key = f"{row['label']}, {row['bounds']}, eps {row['eps']:g}"
            points.setdefault(key, []).append((row["length"], row["share"]))
    ax.set_title("Cache")
    ax.set_ylabel("Bytes, of the full cache")
    _draw_points(ax, points, level=1)
    if points:
        length_axis(ax, (int(length) for each in points.values() for length, _ in each))


def _draw_decode(ax: Axes, rows: list[Data]) -> None:
    points: Points = {}
    for row in rows:
        if row["bounds"] and row["share"]:
            key = f"{row['label']}, {row['bounds']}, {row['length']:,}, batch {row['batch']}"
            points.setdefault(key, []).append((row["share"], row["speedup"]))
    ax.set_title("Decoding")
    ax.set_xlabel("Bytes, of the full cache")
    ax.set_ylabel("Tokens per second, × full cache")
    _draw_points(ax, points, level=1)


def _draw_cost(ax: Axes, rows: list[Data]) -> None:
    points: Points = {}
    kind = rows[0]["kind"]
    for row in rows:
        if row["kind"] == kind and row["eps"] > _CONTROL and row["change"] is not None:
            target = f", {row['target']}" if row["target"] else ""
            key = f"{row['label']}{target}, {row['how']}, {row['length']:,}"
            points.setdefault(key, []).append((row["eps"], row["change"]))
    ax.set_title("Cost")
    ax.set_xlabel("eps")
    ax.set_ylabel("Change of perplexity (%)" if kind == "perplexity" else "Change of accuracy")
    _draw_points(ax, points, level=0)
    if points:
        eps = [eps for each in points.values() for eps, _ in each]
        ax.set_xscale("log")
        ax.set_xlim(min(eps) / 10**0.2, max(eps) * 10**0.2)


def _draw_points(ax: Axes, points: Points, level: float) -> None:
    """A line for each label through its points, in order, broken for a whole model; beside them the level of dense."""
    from matplotlib.transforms import ScaledTranslation  # noqa: PLC0415

    for number, (label, each) in enumerate(points.items()):
        style = "os^D"[number // len(CYCLE) % 4] + ("--" if "whole model" in label else "-")
        ax.plot(*zip(*sorted(each), strict=True), style, color=CYCLE[number % len(CYCLE)], label=label)
    ax.axhline(level, color=FAINT, linewidth=0.8)
    if points:
        # Below: lines cross every corner.
        below = ax.transAxes + ScaledTranslation(0, -_BELOW, ax.figure.dpi_scale_trans)
        ax.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below)


def tilt(ax: Axes) -> None:
    """Tilt the numbers under an axis that has many."""
    ax.tick_params(axis="x", labelrotation=40, labelsize=7)


def _draw_lines(ax: Axes, entries: list[Data], stretches: list[list[int]] | None = None) -> None:
    """Means with bands where there is something to say about them; stretches of the axis are not joined."""
    for entry, style in zip(entries, lines(entries), strict=True):
        for stretch in stretches or [entry["at"]]:
            places = [place for place, at in enumerate(entry["at"]) if at in stretch]
            at, mean, low, high = ([entry[key][place] for place in places] for key in ("at", "mean", "low", "high"))
            ax.plot(at, mean, label=entry["label"], **style)
            if all(value is not None for value in (*low, *high)):
                ax.fill_between(at, low, high, color=style["color"], alpha=0.12, linewidth=0)


def _documents(ax: Axes, panel: Data) -> None:
    """Where contexts were read on different documents: how many, at the first of each."""
    firsts = [stretch[0] for stretch in panel["stretches"]]
    for context in firsts if len(firsts) > 1 else []:
        text = f"{panel['documents'][str(context)]:,} documents"
        ax.text(context, 0.02, text, transform=ax.get_xaxis_transform(), rotation=90, ha="right", va="top", fontsize=6)


def _trained_at(ax: Axes, length: int | None) -> None:
    if length is not None:
        ax.axvline(length, color=FAINT, linewidth=0.8, linestyle=(0, (1, 2)), label="training length")
