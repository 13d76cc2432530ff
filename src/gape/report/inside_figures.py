"""Figures of what happens inside models, each drawn from data of :mod:`gape.report.inside`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gape.report.schemes import TARGETS, join_names
from gape.report.series import Data
from gape.report.style import (
    COLOURS,
    CYCLE,
    INK,
    OTHER,
    legend_below,
    length_axis,
    line,
    lines,
    log_axis,
    new_figure,
    ramp,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TARGET_COLOURS = {"last": CYCLE[1], "first": CYCLE[0], "middle": CYCLE[2]}
_ROUTING_NAMES = {
    "mean_mask": "Mean mask M", "landmark": "Landmark l", "gate": "Query gate g", "amplitude": "Amplitude Γ",
}  # fmt: skip
_WHISKER: dict[str, Any] = {"elinewidth": 0.9, "capsize": 2.0, "ecolor": INK}


def draw_entropy_change(data: Data) -> Figure:
    """ΔH by layer and length: a row per target, a column per layer, bars per base."""
    panels = data["panels"]
    layers = sorted({bar["layer"] for panel in panels for series in panel["series"] for bar in series["bars"]})
    figure, axes = new_figure(3.3 * len(layers) + 0.6, 2.3 * len(panels) + 0.6, len(panels), len(layers), sharey="row")
    for r, panel in enumerate(panels):
        for c, layer in enumerate(layers):
            ax = axes[r, c]
            groups = [[bar for bar in series["bars"] if bar["layer"] == layer] for series in panel["series"]]
            lengths = sorted({bar["length"] for bars in groups for bar in bars})
            for number, (series, bars) in enumerate(zip(panel["series"], groups, strict=True)):
                at = [lengths.index(bar["length"]) for bar in bars]
                heights, errors = [bar["mean"] for bar in bars], [bar["std"] or 0.0 for bar in bars]
                colour = COLOURS.get(series["position"], OTHER)
                _bars(ax, at, (number, len(groups)), heights, errors, color=colour, label=series["label"])
            ax.axhline(0, color=INK, linewidth=0.8)
            ax.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
            ax.grid(axis="x", visible=False)
            ax.set_title(f"{TARGETS[panel['target']]}, layer {layer + 1}")
            ax.set_ylabel("ΔH with gates (nats)" if c == 0 else "")
            ax.set_xlabel("Context length (tokens)" if r == len(panels) - 1 else "")
    legend_below(figure, axes, 1.9)
    return figure


def draw_query_gate(data: Data) -> Figure:
    """g at the final query by layer and head, a panel per scheme, bars per target."""
    panels = data["panels"]
    figure, axes = new_figure(2.9 * len(panels) + 0.5, 2.7, 1, len(panels))
    for ax, panel in zip(axes[0], panels, strict=True):
        targets = panel["targets"]
        for number, (target, heads) in enumerate(targets.items()):
            means, errors = [head["mean"] for head in heads], [head["std"] or 0.0 for head in heads]
            low = [min(error, mean) for error, mean in zip(errors, means, strict=True)]
            style = {"color": TARGET_COLOURS.get(target, OTHER), "label": TARGETS.get(target, target)}
            _bars(ax, range(len(heads)), (number, len(targets)), means, [low, errors], **style)
        names = [f"L{head['layer'] + 1} H{head['head'] + 1}" for head in heads]
        ax.set_xticks(range(len(names)), names)
        ax.grid(axis="x", visible=False)
        ax.set_title(panel["label"])
    axes[0, 0].set_ylabel("Query gate g at the query token")
    legend_below(figure, axes, 1.9)
    return figure


def draw_gates_entropy(data: Data) -> Figure:
    """The landmark gate at layer 2, head 1 beside mean entropy by scheme and length."""
    figure, axes = new_figure(9.2, 3.1, 1, 2, width_ratios=[1.35, 1])
    left, right = axes[0]
    traced = data["landmarks"]
    _landmark_panel(left, traced, min(1, len(traced["landmark"]) - 1), 0)
    left.set_title(f"{traced['label']}, {traced['target']} needle\n{left.get_title()}", fontsize=9)
    bars = data["entropy"]["bars"]
    for bar in bars:
        style = {"label": bar["label"], "capsize": 2.5, "elinewidth": 0.9, **line(bar["position"])}
        right.errorbar(bar["lengths"], bar["mean"], yerr=[std or 0.0 for std in bar["std"]], **style)
    length_axis(right, (length for bar in bars for length in bar["lengths"]))
    right.set_ylabel("Mean attention entropy (nats)")
    right.set_title(TARGETS[data["entropy"]["target"]])
    right.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    legend_below(figure, axes[:, :1], 1.9)
    return figure


def draw_landmark_kinds(data: Data) -> Figure:
    """Mean landmark by kind of token, a row per run, a column per layer and head."""
    rows = data["rows"]
    kinds = list(rows[0]["kinds"])
    heads = [(entry["layer"], entry["head"]) for entry in rows[0]["kinds"][kinds[0]]]
    figure, axes = new_figure(1.6 * len(heads) + 3.4, 0.3 * len(rows) + 1.4, 1, len(heads), sharey=True)
    signs = [{"equals": "=", "key": "KEY", "query": "?"}.get(kind, kind) for kind in kinds]
    image: Any = None
    for at, (layer, head) in enumerate(heads):
        ax = axes[0, at]
        means = [[row["kinds"][kind][at]["mean"] for kind in kinds] for row in rows]
        image = ax.imshow(list(map(_gaps, means)), vmin=0, vmax=1, cmap="cividis", aspect="auto")
        for y, values in enumerate(means):
            for x, value in enumerate(values):
                text, colour = ("–", INK) if value is None else (f"{value:.2f}", "white" if value < 0.55 else INK)
                ax.text(x, y, text, ha="center", va="center", fontsize=6.5, color=colour)
        ax.set_xticks(range(len(kinds)), signs, rotation=40)
        ax.set_yticks(range(len(rows)), [join_names(row["variant"], row["label"], row["target"]) for row in rows])
        ax.grid(visible=False)
        ax.set_title(f"layer {layer + 1}, head {head + 1}")
    figure.colorbar(image, ax=axes[0, -1], label="mean landmark")
    return figure


def draw_entropy(data: Data) -> Figure:
    """Entropy by layer; mean gate against mean entropy of every head; masks of the last layer over training."""
    panels: dict[str, Callable[[Axes, Data], None]] = {"scatter": _scatter_panel, "masks": _masks_panel}
    shown = [part for part in panels if data[part] is not None]
    figure, axes = new_figure(3.6 * (1 + len(shown)) + 0.4, 3.4, 1, 1 + len(shown))
    _entropy_panel(axes[0, 0], data)
    for ax, part in zip(axes[0, 1:], shown, strict=True):
        panels[part](ax, data[part])
    legend_below(figure, axes[:, :1])
    return figure


def draw_spectrum(data: Data) -> Figure:
    """Mean norm by rotary pair, fastest first, of queries and of keys; bars are deviations over samples.

    Pairs lie by their share, not their number: heads with fewer pairs have the same frequencies at the same share.
    """
    figure, axes = new_figure(8.6, 3.4, 1, 2, sharey=True)
    for ax, (side, entries) in zip(axes[0], data["sides"].items(), strict=True):
        for entry, style in zip(entries, lines(entries), strict=True):
            shares = np.arange(len(entry["mean"])) / len(entry["mean"])
            thin = {**style, "markersize": 3}
            ax.errorbar(shares, entry["mean"], yerr=entry["std"], label=entry["label"], elinewidth=0.6, **thin)
        ax.set_xlabel("Share of rotary pairs that are faster")
        ax.set_title(side.capitalize())
    axes[0, 0].set_ylabel("Mean norm")
    axes[0, 0].set_ylim(bottom=0)
    legend_below(figure, axes)
    return figure


def draw_routing(data: Data) -> Figure:
    """Four rows (M, l, g, Γ), a column per layer, a line per head, over training."""
    layers = data["layers"]
    figure, axes = new_figure(2.1 * len(layers) + 0.8, 7.2, 4, len(layers), sharex=True, sharey="row")
    figure.suptitle(data["label"], fontsize=10)
    for r, (variable, by_layer) in enumerate(data["panels"].items()):
        for c, heads in enumerate(by_layer):
            _over_training(axes[r, c], data["steps"], heads, 1.0)
            axes[r, c].set_title(f"Layer {layers[c]}" if r == 0 else "")
            axes[r, c].set_xlabel("Step" if r == 3 else "")
        axes[r, 0].set_ylabel(_ROUTING_NAMES[variable])
    legend_below(figure, axes[:1, :1])
    return figure


def draw_maps(data: Data) -> Figure:
    """Attention in cells, a row per scheme, a column per head; darker is more, on a logarithmic scale."""
    from matplotlib.colors import LogNorm  # noqa: PLC0415

    cells = [np.clip(np.array(model["weights"], dtype=float), 1e-4, None) for model in data["models"]]
    return _pictures(data, cells, {"norm": LogNorm(1e-4, 1), "cmap": "Greys"}, "attention on a cell's keys")


def draw_masks(data: Data) -> Figure:
    """M in cells, a row per scheme, a column per head; white is what causality hides."""
    cells = [np.array(model["masks"], dtype=float) for model in data["models"]]
    style = {"vmin": 0, "vmax": max(float(np.nanmax(heads)) for heads in cells), "cmap": "viridis"}
    return _pictures(data, cells, style, "mean of M in a cell")


def _bars(
    ax: Axes, at: Sequence[int], group: tuple[int, int], heights: Sequence[float], errors: Any, **style: Any
) -> None:
    """Bars of one series at their places, beside those of the other series; group: which of how many."""
    number, count = group
    width = 0.8 / count
    places = [place + (number - (count - 1) / 2) * width for place in at]
    ax.bar(places, heights, width * 0.92, yerr=errors, error_kw=_WHISKER, **style)


def _landmark_panel(axes: Axes, data: Data, layer: int, head: int) -> None:
    """l along a sequence; needles marked, and the landmark that the theory requires of the needle in question."""
    values = data["landmark"][layer][head]
    digits = [place + 2 for place in data["needles"]]
    target = data["target_at"]
    axes.plot(values, color="#B8B8B8", linewidth=0.7, label="every token")
    axes.plot(digits, [values[d] for d in digits], "o", markersize=3, color=CYCLE[0], label="digits of needles")
    axes.plot([target], [values[target]], "D", markersize=6, color=CYCLE[3], label="the digit asked for")
    required, horizon = data["query"]["required"][layer][head], data["query"]["effective"][layer][head]
    if required is not None:
        axes.axhline(required, color=INK, linewidth=1.0, linestyle="--", label="required landmark l*")
    end = data["length"] - 1
    if horizon is not None and horizon < end:
        axes.axvspan(end - horizon, end, color=CYCLE[2], alpha=0.12, linewidth=0, label="effective context")
    axes.set_xlim(0, end)
    axes.set_ylim(-0.03, 1.05)
    axes.set_xlabel("Position")
    axes.set_ylabel("Landmark l")
    gate = data["query"]["query_gate"][layer][head]
    axes.set_title(f"Layer {layer + 1}, head {head + 1}, query gate {gate:.2g}")


def _entropy_panel(ax: Axes, data: Data) -> None:
    for entry, style in zip(data["lines"], lines(data["lines"]), strict=True):
        layers = range(len(entry["mean"]))
        ax.errorbar(
            layers, entry["mean"], yerr=entry["std"], label=entry["label"], capsize=2.5, elinewidth=0.9, **style
        )
        ax.set_xticks(layers)
    length, text = data["asked"]["length"], data["asked"]["data"]
    read = max(entry["samples"] for entry in data["lines"])
    ax.set_title(f"{read} prompts of {text}" if length is None else f"{length:,} tokens of {text}", fontsize=9)
    ax.set_xlabel("Layer")
    ax.set_ylabel("Mean attention entropy (nats)")


def _scatter_panel(ax: Axes, data: Data) -> None:
    colours = ramp(len(data["gate"]))
    for layer, (gates, entropies) in enumerate(zip(data["gate"], data["entropy"], strict=True)):
        ax.plot(gates, entropies, "o", markersize=3.5, color=colours[layer], alpha=0.8)
        mean = [float(np.mean(values)) for values in (gates, entropies)]
        ax.plot(*mean, marker="D", markersize=7, color=colours[layer], markeredgecolor=INK, label=f"layer {layer}")
    log_axis(ax, "x", digits=(1, 2, 5))
    across = data["of_ranks"]
    correlation = "" if across is None else f": rank correlation {across:+.2f}".replace("-", "−")
    ax.set_title(f"{data['label']}{correlation}", fontsize=9)
    ax.set_xlabel("Mean query gate g of a head")
    ax.set_ylabel("Mean attention entropy (nats)")
    ax.legend(fontsize=7)


def _masks_panel(ax: Axes, data: Data) -> None:
    _over_training(ax, data["steps"], data["heads"], 1.2)
    ax.set_title(f"{data['label']}, layer {data['layer']}", fontsize=9)
    ax.set_xlabel("Step")
    ax.set_ylabel("Mean mask M")
    ax.legend(fontsize=6, ncols=2)


def _over_training(ax: Axes, steps: Sequence[int], heads: Sequence[Sequence[float | None]], width: float) -> None:
    """A line per head over the steps of training."""
    for head, (values, colour) in enumerate(zip(heads, ramp(len(heads)), strict=True)):
        ax.plot(steps, _gaps(values), color=colour, linewidth=width, label=f"head {head}")


def _pictures(data: Data, rows: Sequence[npt.NDArray[Any]], style: dict[str, Any], what: str) -> Figure:
    """The cells of each head in a column, a row per model."""
    heads, length = len(rows[0]), data["length"]
    figure, axes = new_figure(1.55 * heads + 1.2, 1.7 * len(rows) + 0.5, len(rows), heads)
    figure.suptitle(f"Layer {data['layer']}, {length:,} tokens of {data['data']}", fontsize=9)
    image: Any = None
    for r, (model, cells) in enumerate(zip(data["models"], rows, strict=True)):
        for head in range(heads):
            ax = axes[r, head]
            ax.grid(visible=False)
            image = ax.imshow(cells[head], extent=(0, length, length, 0), **style)
            ax.set_xticks([])
            ax.set_yticks([])
            ax.set_title(f"head {head}" if r == 0 else "", fontsize=8)
        axes[r, 0].set_ylabel(model["label"], fontsize=8)
    figure.colorbar(image, ax=axes[:, -1], label=what, shrink=0.8)
    return figure


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]
