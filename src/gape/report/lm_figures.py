"""Figures of language models, each drawn from the data that :mod:`gape.report.lm_series` made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gape.report.series import Data
from gape.report.style import CYCLE, FAINT, INK, length_axis, line, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROUTING_NAMES = {
    "mean_mask": "Mean mask M", "landmark": "Landmark l", "gate": "Query gate g", "amplitude": "Amplitude Γ",
}  # fmt: skip
#: For variants of one scheme, after the scheme's own colour.
_VARIANT_COLOURS = ("#882255", "#332288", "#117733", "#AA4499", "#661100")


def draw_perplexity(data: Data) -> Figure:
    """Perplexity against context, a panel per stratum and alignment; bands are intervals, or deviations over seeds.

    A line breaks where a context is read on other documents, and says how many.
    """
    panels = data["panels"]
    figure, axes = new_figure(3.6 * len(panels) + 0.6, 3.3, 1, len(panels), sharey=True)
    for ax, panel in zip(axes[0], panels, strict=True):
        _lines(ax, panel["lines"], panel["stretches"])
        _documents(ax, panel)
        _trained_at(ax, data["train_length"])
        length_axis(ax, sorted({x for entry in panel["lines"] for x in entry["at"]}))
        _tilted(ax)
        ax.set_title(panel["title"], fontsize=9)
    axes[0, 0].set_yscale("log")
    low, high = axes[0, 0].get_ylim()
    # Over several powers of ten that many numbers would lie on one another.
    _plain(axes[0, 0].yaxis, (1, 2, 3, 5, 7) if high < 100 * low else (1, 3))
    axes[0, 0].set_ylabel("Perplexity")
    _legend_below(figure, axes)
    return figure


def draw_positions(data: Data) -> Figure:
    """Loss against position in a window."""
    figure, axes = new_figure(6.4, 3.6)
    ax = axes[0, 0]
    for entry, look in zip(data["lines"], looks(data["lines"]), strict=True):
        ax.plot(entry["at"], entry["mean"], label=entry["label"], **{**look, "markersize": 3})
    _trained_at(ax, data["train_length"])
    ax.set_xscale("log", base=2)
    _plain(ax.xaxis)
    whole = data["protocol"] != "last-k"
    ax.set_xlabel(f"Position in windows of {data['context']:,} tokens" if whole else "Position in a window, its end")
    ax.set_ylabel("Loss (nats per token)")
    _legend_below(figure, axes)
    return figure


def draw_entropy(data: Data) -> Figure:
    """Entropy by layer; mean gate against mean entropy of every head; masks of the last layer over training."""
    parts = ["entropy", *(key for key in ("scatter", "masks") if data[key] is not None)]
    figure, axes = new_figure(3.6 * len(parts) + 0.4, 3.4, 1, len(parts))
    _entropy_panel(axes[0, 0], data)
    for ax, part in zip(axes[0, 1:], parts[1:], strict=True):
        {"scatter": _scatter_panel, "masks": _masks_panel}[part](ax, data[part])
    _legend_below(figure, axes[:, :1])
    return figure


def draw_entropy_heads(data: Data) -> Figure:
    """Entropy by layer and head in cells, a row per scheme, a column per length."""
    models, lengths = data["models"], data["lengths"]
    figure, axes = new_figure(2.1 * len(lengths) + 1.5, 1.7 * len(models) + 0.6, len(models), len(lengths))
    values = [value for m in models for cells in m["entropy"].values() for row in cells for value in row]
    image: Any = None
    for r, model in enumerate(models):
        for c, length in enumerate(lengths):
            ax = axes[r, c]
            cells = model["entropy"].get(str(length))
            ax.set_visible(cells is not None)
            if cells is None:
                continue
            image = ax.imshow(cells, vmin=min(values), vmax=max(values), cmap="cividis", aspect="auto")
            ax.grid(visible=False)
            ax.set_xticks(range(len(cells[0])))
            ax.set_yticks(range(len(cells)))
            ax.set_title(f"{model['label']}, {'prompts' if length is None else f'{length:,}'}", fontsize=8)
            ax.set_ylabel("Layer" if c == 0 else "")
            ax.set_xlabel("Head" if r == len(models) - 1 else "")
    figure.colorbar(image, ax=axes[:, -1], label="mean entropy (nats)")
    return figure


def draw_context(data: Data) -> Figure:
    """How far attention reaches by length; beside it, for schemes with a rate, the theory's horizon of every head."""
    panels = data["panels"]
    figure, axes = new_figure(3.5 * (1 + len(panels)) + 0.4, 3.8, 1, 1 + len(panels))
    ax = axes[0, 0]
    for entry, look in zip(data["lines"], looks(data["lines"]), strict=True):
        low, middle, high = np.array(entry["quartiles"]).T
        ax.plot(entry["lengths"], middle, label=entry["label"], **look)
        ax.fill_between(entry["lengths"], low, high, color=look["color"], alpha=0.12, linewidth=0)
    length_axis(ax, sorted({length for entry in data["lines"] for length in entry["lengths"]}))
    ax.set_yscale("log", base=2)
    _plain(ax.yaxis)
    ax.set_ylabel(f"Distance beyond which {data['lines'][0]['share']:.0%} of attention lies")
    ax.set_title("Used: median and quartiles of heads", fontsize=9)
    for ax, panel in zip(axes[0, 1:], panels, strict=True):
        _horizon_panel(ax, panel)
    _legend_below(figure, axes[:, :1])
    return figure


def draw_spectrum(data: Data) -> Figure:
    """Mean norm by rotary pair, fastest first, of queries and of keys; bars are deviations over samples.

    Pairs lie by their share, not their number: heads with fewer pairs have the same frequencies at the same share.
    """
    figure, axes = new_figure(8.6, 3.4, 1, 2, sharey=True)
    for ax, (side, lines) in zip(axes[0], data["sides"].items(), strict=True):
        for entry, look in zip(lines, looks(lines), strict=True):
            pairs = len(entry["mean"])
            thin = {**look, "markersize": 3}
            places = [pair / pairs for pair in range(pairs)]
            ax.errorbar(places, entry["mean"], yerr=entry["std"], label=entry["label"], elinewidth=0.6, **thin)
        ax.set_xlabel("Share of rotary pairs that are faster")
        ax.set_title(side.capitalize())
    axes[0, 0].set_ylabel("Mean norm")
    axes[0, 0].set_ylim(bottom=0)
    _legend_below(figure, axes)
    return figure


def draw_routing(data: Data) -> Figure:
    """Four rows (M, l, g, Γ), a column per layer, a line per head, over training."""
    layers = data["layers"]
    figure, axes = new_figure(2.1 * len(layers) + 0.8, 7.2, 4, len(layers), sharex=True, sharey="row")
    figure.suptitle(data["label"], fontsize=10)
    colours = _ramp(len(data["panels"]["gate"][0]))
    for r, (variable, by_layer) in enumerate(data["panels"].items()):
        for c, heads in enumerate(by_layer):
            ax = axes[r, c]
            for head, values in enumerate(heads):
                ax.plot(data["steps"], _gaps(values), color=colours[head], linewidth=1.0, label=f"head {head}")
            ax.set_title(f"Layer {layers[c]}" if r == 0 else "")
            ax.set_xlabel("Step" if r == 3 else "")
        axes[r, 0].set_ylabel(_ROUTING_NAMES[variable])
    _legend_below(figure, axes[:1, :1])
    return figure


def draw_maps(data: Data) -> Figure:
    """Attention in cells, a row per scheme, a column per head, on a logarithmic scale."""
    from matplotlib.colors import LogNorm  # noqa: PLC0415

    def cells(model: Data, head: int) -> Any:
        return np.clip(np.array(model["weights"][head], dtype=float), 1e-4, None)

    return _pictures(data, "weights", cells, {"norm": LogNorm(1e-4, 1), "cmap": "Greys"}, "attention on a cell's keys")


def draw_masks(data: Data) -> Figure:
    """M in cells, a row per scheme, a column per head; white is what causality hides."""

    def cells(model: Data, head: int) -> Any:
        return np.array(model["masks"][head], dtype=float)

    top = max(float(np.nanmax(cells(model, head))) for model in data["models"] for head in range(len(model["masks"])))
    return _pictures(data, "masks", cells, {"vmin": 0, "vmax": top, "cmap": "viridis"}, "mean of M in a cell")


def draw_far_back(data: Data) -> Figure:
    """Loss by distance of the answer above, what the far text was worth below; a column per kind."""
    columns = data["columns"]
    figure, axes = new_figure(3.5 * len(columns) + 0.6, 5.4, 2, len(columns))
    for c, column in enumerate(columns):
        for r, part in enumerate(("loss", "gain")):
            ax = axes[r, c]
            _lines(ax, column[part])
            _trained_at(ax, data["train_length"])
            length_axis(ax, [int(d) for d in column["tokens"]], "Answer this many tokens back" if r else "")
            _tilted(ax)
        axes[0, c].set_title(column["title"])
        axes[1, c].axhline(0, color=FAINT, linewidth=0.8)
    axes[0, 0].set_ylabel("Loss (nats per token)")
    axes[1, 0].set_ylabel("Gain from the far text (nats)")
    _legend_below(figure, axes)
    return figure


def _entropy_panel(ax: Axes, data: Data) -> None:
    for entry, look in zip(data["lines"], looks(data["lines"]), strict=True):
        layers = range(len(entry["mean"]))
        ax.errorbar(layers, entry["mean"], yerr=entry["std"], label=entry["label"], capsize=2.5, elinewidth=0.9, **look)
        ax.set_xticks(layers)
    length, text = data["asked"]["length"], data["asked"]["data"]
    read = max(entry["samples"] for entry in data["lines"])
    ax.set_title(f"{read} prompts of {text}" if length is None else f"{length:,} tokens of {text}", fontsize=9)
    ax.set_xlabel("Layer")
    ax.set_ylabel("Mean attention entropy (nats)")


def _scatter_panel(ax: Axes, data: Data) -> None:
    colours = _ramp(len(data["gate"]))
    for layer, (gates, entropies) in enumerate(zip(data["gate"], data["entropy"], strict=True)):
        ax.plot(gates, entropies, "o", markersize=3.5, color=colours[layer], alpha=0.8)
        mean = [float(np.mean(values)) for values in (gates, entropies)]
        ax.plot(*mean, marker="D", markersize=7, color=colours[layer], markeredgecolor=INK, label=f"layer {layer}")
    ax.set_xscale("log")
    _plain(ax.xaxis, (1, 2, 5))
    across = data["of_ranks"]
    told = "" if across is None else f": rank correlation {across:+.2f}".replace("-", "−")
    ax.set_title(f"{data['label']}{told}", fontsize=9)
    ax.set_xlabel("Mean query gate g of a head")
    ax.set_ylabel("Mean attention entropy (nats)")
    ax.legend(fontsize=7)


def _masks_panel(ax: Axes, data: Data) -> None:
    colours = _ramp(len(data["heads"]))
    for head, values in enumerate(data["heads"]):
        ax.plot(data["steps"], _gaps(values), color=colours[head], linewidth=1.2, label=f"head {head}")
    ax.set_title(f"{data['label']}, layer {data['layer']}", fontsize=9)
    ax.set_xlabel("Step")
    ax.set_ylabel("Mean mask M")
    ax.legend(fontsize=6, ncols=2)


def _horizon_panel(ax: Axes, panel: Data) -> None:
    colours = _ramp(len(panel["effective"]))
    finite = [x for key in ("effective", "used") for row in panel[key] for x in row if x]
    for layer, (effective, spared, used) in enumerate(
        zip(panel["effective"], panel["spared"], panel["used"], strict=True)
    ):
        look = {"markersize": 3.5, "color": colours[layer]}
        if spared != effective:
            ax.plot(_gaps(spared), used, "o", **look, markerfacecolor="none", markeredgewidth=0.6)
        ax.plot(_gaps(effective), used, "o", **look, label=f"layer {layer}")
    ends = [min([*finite, panel["length"]]), max([*finite, panel["length"]])]
    ax.plot(ends, ends, color=FAINT, linewidth=0.8, linestyle="--", label="used = theory")
    for axis, scale in ((ax.xaxis, ax.set_xscale), (ax.yaxis, ax.set_yscale)):
        scale("log", base=2)
        _plain(axis)
    _tilted(ax)
    ax.set_title(f"{panel['label']}, {panel['length']:,} tokens", fontsize=9)
    ax.set_xlabel(f"Effective context, unprotected keys hold {panel['given_up']:.0%}")
    ax.set_ylabel(f"Distance beyond which {panel['given_up']:.0%} lies")
    ax.legend(fontsize=6)


def _pictures(data: Data, key: str, cells: Any, look: dict[str, Any], what: str) -> Figure:
    models, heads = data["models"], len(data["models"][0][key])
    figure, axes = new_figure(1.55 * heads + 1.2, 1.7 * len(models) + 0.5, len(models), heads)
    figure.suptitle(f"Layer {data['layer']}, {data['length']:,} tokens of {data['data']}", fontsize=9)
    image: Any = None
    for r, model in enumerate(models):
        for head in range(heads):
            ax = axes[r, head]
            image = ax.imshow(cells(model, head), extent=(0, data["length"], data["length"], 0), **look)
            ax.grid(visible=False)
            ax.set_xticks([])
            ax.set_yticks([])
            ax.set_title(f"head {head}" if r == 0 else "", fontsize=8)
        axes[r, 0].set_ylabel(model["label"], fontsize=8)
    figure.colorbar(image, ax=axes[:, -1], label=what, shrink=0.8)
    return figure


def _lines(ax: Axes, lines: list[Data], stretches: list[list[int]] | None = None) -> None:
    """Means with bands where there is something to say about them; stretches of the axis are not joined."""
    for entry, look in zip(lines, looks(lines), strict=True):
        for stretch in stretches or [entry["at"]]:
            kept = [place for place, at in enumerate(entry["at"]) if at in stretch]
            at, mean, low, high = ([entry[key][place] for place in kept] for key in ("at", "mean", "low", "high"))
            ax.plot(at, mean, label=entry["label"], **look)
            if all(value is not None for value in (*low, *high)):
                ax.fill_between(at, low, high, color=look["color"], alpha=0.12, linewidth=0)


def _documents(ax: Axes, panel: Data) -> None:
    """Where contexts were read on different documents: how many, at the first of each."""
    firsts = [stretch[0] for stretch in panel["stretches"]]
    for context in firsts if len(firsts) > 1 else []:
        text = f"{panel['documents'][str(context)]:,} documents"
        ax.text(context, 0.02, text, transform=ax.get_xaxis_transform(), rotation=90, ha="right", va="top", fontsize=6)


def looks(lines: list[Data]) -> list[dict[str, Any]]:
    """How each scheme is drawn; further variants of one get colours of their own."""
    seen: dict[str, int] = {}
    looks = []
    for entry in lines:
        look, number = line(entry["position"]), seen.get(entry["position"], 0)
        if number:
            colour = _VARIANT_COLOURS[(number - 1) % len(_VARIANT_COLOURS)]
            # Hollow markers stay so: they tell a scheme from the same with gates.
            face = colour if look["markerfacecolor"] != "white" else "white"
            look |= {"color": colour, "markerfacecolor": face, "markeredgecolor": colour, "linestyle": "-."}
        seen[entry["position"]] = number + 1
        looks.append(look)
    return looks


def _trained_at(ax: Axes, length: int | None) -> None:
    if length is not None:
        ax.axvline(length, color=FAINT, linewidth=0.8, linestyle=(0, (1, 2)), label="training length")


def _tilted(ax: Axes) -> None:
    ax.tick_params(axis="x", labelrotation=40, labelsize=7)


def _plain(axis: Any, tenths: tuple[int, ...] = ()) -> None:
    """Ticks on a logarithmic axis that say the number, at so many of each power of ten where some are named."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415

    if tenths:
        axis.set_major_locator(LogLocator(10, subs=tenths))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _ramp(count: int) -> list[Any]:
    """Colours for layers or heads, in order; told apart in grey too."""
    if count <= len(CYCLE):
        return list(CYCLE[:count])
    from matplotlib import colormaps  # noqa: PLC0415

    return [colormaps["viridis"](at / max(1, count - 1) * 0.92) for at in range(count)]


def _gaps(values: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _legend_below(figure: Figure, axes: Any) -> None:
    named: dict[str, Any] = {}
    for ax in axes.flat:
        handles, names = ax.get_legend_handles_labels()
        named |= dict(zip(names, handles, strict=True))
    most = max(2, int(figure.get_figwidth() / 1.5))
    # As few rows as fit, and as even as they can be.
    columns = -(-len(named) // -(-len(named) // most))
    names = sorted(named, key=lambda text: text == "training length")
    figure.legend([named[text] for text in names], names, loc="outside lower center", ncols=columns, handlelength=2.6)
