"""Figures of accuracy and loss, each drawn from the data of its series."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gape.report.series import Data
from gape.report.style import CYCLE, FAINT, legend_below, length_axis, line, lines, log_axis, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHANCE = 0.1


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
        _draw_lines(ax, panel["lines"], data["train_length"], stretches=panel["stretches"])
        # Where contexts were read on different documents: how many, at the first of each.
        for context, *_ in panel["stretches"] if len(panel["stretches"]) > 1 else ():
            text = f"{panel['documents'][str(context)]:,} documents"
            place = {"transform": ax.get_xaxis_transform(), "rotation": 90, "ha": "right", "va": "top"}
            ax.text(context, 0.02, text, fontsize=6, **place)
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
            _draw_lines(axes[r, c], column[part], data["train_length"], "Answer this many tokens back" if r else "")
        axes[0, c].set_title(column["title"])
        axes[1, c].axhline(0, color=FAINT, linewidth=0.8)
    axes[0, 0].set_ylabel("Loss (nats per token)")
    axes[1, 0].set_ylabel("Gain from the far text (nats)")
    legend_below(figure, axes)
    return figure


def draw_recall(data: Data) -> Figure:
    """Facts answered against context, a panel per distance; bands are intervals."""
    panels = data["panels"]
    figure, axes = new_figure(3.1 * len(panels) + 0.5, 3.1, 1, len(panels), sharey=True)
    for ax, panel in zip(axes[0], panels, strict=True):
        _draw_lines(ax, panel["lines"], data["train_length"])
        ax.set_ylim(-0.03, 1.06)
        ax.set_title(panel["title"])
    axes[0, 0].set_ylabel("Facts answered")
    legend_below(figure, axes)
    return figure


def _draw_lines(
    ax: Axes, entries: list[Data], trained_at: int | None, name: str = "Context length (tokens)",
    *, stretches: list[list[int]] | None = None,
) -> None:  # fmt: skip
    """Means over lengths, with bands where there are any, and the training length; stretches are not joined."""
    for entry, style in zip(entries, lines(entries), strict=True):
        for stretch in stretches or [entry["at"]]:
            places = [place for place, at in enumerate(entry["at"]) if at in stretch]
            at, mean, low, high = ([entry[key][place] for place in places] for key in ("at", "mean", "low", "high"))
            ax.plot(at, mean, label=entry["label"], **style)
            if all(value is not None for value in (*low, *high)):
                ax.fill_between(at, low, high, color=style["color"], alpha=0.12, linewidth=0)
    if trained_at is not None:
        ax.axvline(trained_at, color=FAINT, linewidth=0.8, linestyle=(0, (1, 2)), label="training length")
    length_axis(ax, (at for entry in entries for at in entry["at"]), name)
    ax.tick_params(axis="x", labelrotation=40, labelsize=7)
