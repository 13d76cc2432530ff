"""Figures of measured results, each drawn from the data that :mod:`gape.report.series` made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gape.report.series import Data
from gape.report.style import COLOURS, CYCLE, FAINT, INK, OTHER, TARGETS, length_axis, line, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHANCE = 0.1
TARGET_COLOURS = {"last": CYCLE[1], "first": CYCLE[0], "middle": CYCLE[2]}


def draw_accuracy(data: Data) -> Figure:
    """Accuracy against length, a panel per entry, means with deviations over seeds."""
    rows = data["rows"]
    columns = max(map(len, rows))
    figure, axes = new_figure(3.1 * columns + 0.5, 2.4 * len(rows) + 0.5, len(rows), columns, sharey=True)
    for r, row in enumerate(rows):
        for c in range(columns):
            if c < len(row):
                _accuracy_panel(axes[r, c], row[c])
            else:
                axes[r, c].set_visible(False)
    for r in range(len(rows)):
        axes[r, 0].set_ylabel("Accuracy")
    _legend_below(figure, axes)
    return figure


def _accuracy_panel(axes: Axes, panel: Data) -> None:
    by_scheme = len({(entry["position"], entry["evaluated"]) for entry in panel["lines"]}) == len(panel["lines"])
    axes.axhline(CHANCE, color=FAINT, linewidth=0.8, linestyle=(0, (1, 2)), label="chance")
    lengths: set[int] = set()
    for number, entry in enumerate(panel["lines"]):
        look = line(entry["position"], entry["evaluated"])
        if not by_scheme:
            colour, marker = CYCLE[number % len(CYCLE)], "os^Dv"[number % 5]
            look = {"color": colour, "marker": marker, "markerfacecolor": colour, "markeredgecolor": colour}
        # A little to the side of one another, so that bars and dots can be told apart.
        shift = min(1.025, 1.1 ** (1 / len(panel["lines"]))) ** (number - (len(panel["lines"]) - 1) / 2)
        at = [length * shift for length in entry["lengths"]]
        for x, values in zip(at, entry["values"], strict=True):
            if len(values) > 1:
                axes.plot([x] * len(values), values, ".", color=look["color"], markersize=3, alpha=0.6, zorder=1)
        axes.errorbar(at, entry["mean"], yerr=_within(entry), label=entry["label"], capsize=2.5, elinewidth=0.9, **look)
        lengths |= set(entry["lengths"])
    length_axis(axes, sorted(lengths))
    axes.set_ylim(-0.03, 1.06)
    axes.set_title(panel["title"])


def _within(entry: Data) -> list[list[float]] | None:
    """Deviations below and above, cut where no accuracy can be."""
    if not any(entry["std"]):
        return None
    pairs = [(mean, std or 0.0) for mean, std in zip(entry["mean"], entry["std"], strict=True)]
    return [[min(std, mean) for mean, std in pairs], [min(std, 1 - mean) for mean, std in pairs]]


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
            width = 0.8 / len(groups)
            for number, (series, bars) in enumerate(zip(panel["series"], groups, strict=True)):
                at = [lengths.index(bar["length"]) + (number - (len(groups) - 1) / 2) * width for bar in bars]
                colour = COLOURS.get(series["position"], OTHER)
                heights, errors = [bar["mean"] for bar in bars], [bar["std"] or 0.0 for bar in bars]
                ax.bar(at, heights, width * 0.92, yerr=errors, color=colour, label=series["label"], error_kw=_WHISKER)
            ax.axhline(0, color=INK, linewidth=0.8)
            ax.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
            ax.grid(axis="x", visible=False)
            ax.set_title(f"{TARGETS[panel['target']]}, layer {layer + 1}")
            if c == 0:
                ax.set_ylabel("ΔH with gates (nats)")
            if r == len(panels) - 1:
                ax.set_xlabel("Context length (tokens)")
    _legend_below(figure, axes)
    return figure


_WHISKER: dict[str, Any] = {"elinewidth": 0.9, "capsize": 2.0, "ecolor": INK}


def draw_query_gate(data: Data) -> Figure:
    """g at the final query by layer and head, a panel per scheme, bars per target."""
    panels = data["panels"]
    figure, axes = new_figure(2.9 * len(panels) + 0.5, 2.7, 1, len(panels))
    for number, panel in enumerate(panels):
        ax = axes[0, number]
        targets = panel["targets"]
        width = 0.8 / len(targets)
        for at, (target, heads) in enumerate(targets.items()):
            x = [n + (at - (len(targets) - 1) / 2) * width for n in range(len(heads))]
            errors = [head["std"] or 0.0 for head in heads]
            colour, name = TARGET_COLOURS.get(target, OTHER), TARGETS.get(target, target)
            means = [head["mean"] for head in heads]
            low = [min(error, mean) for error, mean in zip(errors, means, strict=True)]
            ax.bar(x, means, width * 0.92, yerr=[low, errors], color=colour, label=name, error_kw=_WHISKER)
        names = [f"L{head['layer'] + 1} H{head['head'] + 1}" for head in heads]
        ax.set_xticks(range(len(names)), names)
        ax.grid(axis="x", visible=False)
        ax.set_title(panel["label"])
    axes[0, 0].set_ylabel("Query gate g at the query token")
    _legend_below(figure, axes)
    return figure


def draw_gates_entropy(data: Data) -> Figure:
    """The landmark gate at layer 2, head 1 beside mean entropy by scheme and length."""
    figure, axes = new_figure(9.2, 3.1, 1, 2, width_ratios=[1.35, 1])
    traced = data["landmarks"]
    layer = min(1, len(traced["landmark"]) - 1)
    _landmark_panel(axes[0, 0], traced, layer, 0)
    title = f"{traced['label']}, {traced['target']} needle\n{axes[0, 0].get_title()}"
    axes[0, 0].set_title(title, fontsize=9)
    _entropy_panel(axes[0, 1], data["entropy"])
    _legend_below(figure, axes[:, :1])
    return figure


def draw_landmarks(data: Data) -> Figure:
    """The landmark gate along one sequence for every layer and head."""
    layers, heads = len(data["landmark"]), len(data["landmark"][0])
    figure, axes = new_figure(4.3 * heads + 0.4, 2.1 * layers + 0.7, layers, heads, sharex=True, sharey=True)
    figure.suptitle(f"{data['label']}, {data['target']} needle", fontsize=10)
    for layer in range(layers):
        for head in range(heads):
            _landmark_panel(axes[layer, head], data, layer, head)
            axes[layer, head].set_xlabel("Position" if layer == layers - 1 else "")
            axes[layer, head].set_ylabel("Landmark l" if head == 0 else "")
    _legend_below(figure, axes)
    return figure


def _legend_below(figure: Figure, axes: Any) -> None:
    """One legend for what the panels share, under them."""
    named: dict[str, Any] = {}
    for ax in axes.flat:
        handles, names = ax.get_legend_handles_labels()
        named |= dict(zip(names, handles, strict=True))
    columns = min(len(named), max(2, int(figure.get_figwidth() / 1.9)))
    # The chance line last, after the schemes.
    names = sorted(named, key=lambda name: name == "chance")
    figure.legend([named[name] for name in names], names, loc="outside lower center", ncols=columns, handlelength=2.6)


def _landmark_panel(axes: Axes, data: Data, layer: int, head: int) -> None:
    """l along a sequence; needles marked, and what the theory asks of the needle that is wanted."""
    values = data["landmark"][layer][head]
    digits = [place + 2 for place in data["needles"]]
    wanted = data["target_at"]
    axes.plot(values, color="#B8B8B8", linewidth=0.7, label="every token")
    axes.plot(digits, [values[d] for d in digits], "o", markersize=3, color=CYCLE[0], label="digits of needles")
    axes.plot([wanted], [values[wanted]], "D", markersize=6, color=CYCLE[3], label="the digit asked for")
    required, horizon = data["query"]["required"][layer][head], data["query"]["effective"][layer][head]
    if required is not None:
        axes.axhline(required, color=INK, linewidth=1.0, linestyle="--", label="required landmark l*")
    edge = None if horizon is None else data["length"] - 1 - horizon
    if edge is not None and edge > 0:
        axes.axvspan(edge, data["length"] - 1, color=CYCLE[2], alpha=0.12, linewidth=0, label="effective context")
    axes.set_xlim(0, data["length"] - 1)
    axes.set_ylim(-0.03, 1.05)
    axes.set_xlabel("Position")
    axes.set_ylabel("Landmark l")
    gate = data["query"]["query_gate"][layer][head]
    axes.set_title(f"Layer {layer + 1}, head {head + 1}, query gate {gate:.2g}")


def _entropy_panel(axes: Axes, data: Data) -> None:
    lengths: set[int] = set()
    for bar in data["bars"]:
        axes.errorbar(
            bar["lengths"], bar["mean"], yerr=[std or 0.0 for std in bar["std"]], label=bar["label"], capsize=2.5,
            elinewidth=0.9, **line(bar["position"]),
        )  # fmt: skip
        lengths |= set(bar["lengths"])
    length_axis(axes, sorted(lengths))
    axes.set_ylabel("Mean attention entropy (nats)")
    axes.set_title(TARGETS[data["target"]])
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def draw_landmark_kinds(data: Data) -> Figure:
    """Mean landmark by kind of token, a row per run, a column per layer and head."""
    rows = data["rows"]
    kinds = list(rows[0]["kinds"])
    heads = [(entry["layer"], entry["head"]) for entry in rows[0]["kinds"][kinds[0]]]
    figure, axes = new_figure(1.6 * len(heads) + 3.4, 0.3 * len(rows) + 1.4, 1, len(heads), sharey=True)
    names = [" · ".join(filter(None, (row["variant"], row["label"], row["target"]))) for row in rows]
    image: Any = None
    for column, (layer, head) in enumerate(heads):
        ax = axes[0, column]
        at = next(i for i, pair in enumerate(heads) if pair == (layer, head))
        means = [[row["kinds"][kind][at]["mean"] for kind in kinds] for row in rows]
        cells = [[float("nan") if mean is None else mean for mean in row] for row in means]
        image = ax.imshow(cells, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        for y, values in enumerate(means):
            for x, value in enumerate(values):
                text, colour = ("–", INK) if value is None else (f"{value:.2f}", "white" if value < 0.55 else INK)
                ax.text(x, y, text, ha="center", va="center", fontsize=6.5, color=colour)
        ax.set_xticks(
            range(len(kinds)), [{"equals": "=", "key": "KEY", "query": "?"}.get(k, k) for k in kinds], rotation=40
        )
        ax.set_yticks(range(len(names)), names)
        ax.grid(visible=False)
        ax.set_title(f"layer {layer + 1}, head {head + 1}")
    figure.colorbar(image, ax=axes[0, -1], label="mean landmark")
    return figure


def draw_attention_maps(data: Data) -> Figure:
    """A map per layer and head, a row per model, of one needle; darker is more attention, on a logarithmic scale."""
    from matplotlib.colors import LogNorm  # noqa: PLC0415

    models = data["models"]
    heads = [(layer, head) for layer, maps in enumerate(models[0]["weights"]) for head in range(len(maps))]
    figure, axes = new_figure(2.4 * len(heads) + 0.8, 2.5 * len(models) + 0.3, len(models), len(heads))
    figure.suptitle(f"{TARGETS[models[0]['target']]}, {models[0]['length']:,} tokens", fontsize=10)
    image: Any = None
    for r, model in enumerate(models):
        for c, (layer, head) in enumerate(heads):
            ax = axes[r, c]
            cells = model["weights"][layer][head]
            extent = (0, model["length"], model["length"], 0)
            image = ax.imshow(
                [[max(w, 1e-4) for w in row] for row in cells], norm=LogNorm(1e-4, 1), cmap="Greys", extent=extent
            )
            ax.grid(visible=False)
            ax.set_title(f"{model['label']}: layer {layer + 1}, head {head + 1}", fontsize=8)
            ax.set_xlabel("Key" if r == len(models) - 1 else "")
            ax.set_ylabel("Query" if c == 0 else "")
    figure.colorbar(image, ax=axes[:, -1], label="attention on a cell's keys", shrink=0.8)
    return figure
