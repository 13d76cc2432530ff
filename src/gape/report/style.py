"""Style of figures: one colour and one marker per scheme everywhere, and the same bytes every time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gape.report.schemes import base_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe and Ito's colours, which colour-blind readers can tell apart, by base.
COLOURS = {
    "nope": "#0072B2", "rope": "#D55E00", "p-rope": "#009E73", "yarn": "#CC79A7", "alibi": "#6E6E6E", "fox": "#E69F00",
}  # fmt: skip
OTHER = "#56B4E9"
#: For series that are not schemes.
CYCLE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#6E6E6E")
#: For variants of one scheme, after the scheme's own colour.
_VARIANT_COLOURS = ("#882255", "#332288", "#117733", "#AA4499", "#661100")
MARKERS = {"nope": "o", "rope": "s", "p-rope": "^", "yarn": "D", "alibi": "v", "fox": "P"}
INK, FAINT = "#222222", "#8A8A8A"

_RC = {
    "figure.dpi": 100, "savefig.dpi": 200, "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 10, "axes.labelsize": 9, "legend.fontsize": 8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.grid": True, "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False, "lines.linewidth": 1.6,
    "lines.markersize": 5, "pdf.fonttype": 42, "svg.hashsalt": "gape",
}  # fmt: skip


def matplotlib() -> ModuleType:
    """The library figures are drawn with, imported when first needed; an ImportError says how to install it."""
    try:
        import matplotlib as library  # noqa: PLC0415
        import matplotlib.backends.backend_agg  # noqa: PLC0415
        import matplotlib.figure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("figures need Matplotlib: pip install 'gape[plot]'") from error
    return library


@contextmanager
def house_style() -> Iterator[None]:
    """Matplotlib's settings inside the block; those of the caller come back afterwards."""
    with matplotlib().rc_context(_RC):
        yield


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure of so many inches and its axes as a two-dimensional array, without the state of pyplot."""
    figure = matplotlib().figure.Figure(figsize=(width, height))
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def save(figure: Figure, directory: Path, name: str) -> list[Path]:
    """Write NAME.png and NAME.pdf; no date or version goes into the files.

    Returns:
        The two paths.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Laid out once: doing it again for the second file takes longer than writing both.
    layout = figure.get_layout_engine()
    if layout is not None:
        layout.execute(figure)
    figure.set_layout_engine("none")
    png, pdf = directory / f"{name}.png", directory / f"{name}.pdf"
    figure.savefig(png, metadata={"Software": None})
    _to_palette(png)
    figure.savefig(pdf, metadata={"CreationDate": None, "Producer": None, "Creator": None})
    return [png, pdf]


def _to_palette(png: Path) -> None:
    """256 colours that fit the picture, in place of all: a third of the bytes, which matters where results are kept."""
    from PIL import Image  # noqa: PLC0415

    with Image.open(png) as image:
        few = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=2)
        few.save(png, optimize=True, dpi=image.info["dpi"])


def line(position: str, evaluated: str | None = None) -> dict[str, Any]:
    """How a scheme's curve is drawn: colour and marker by base, solid and filled with gates."""
    base = base_of(position)
    gated, switched = base != position, evaluated not in (None, position)
    colour = COLOURS.get(base, OTHER)
    return {
        "color": colour,
        "marker": "X" if switched else MARKERS.get(base, "h"),
        "linestyle": ":" if switched else "-" if gated or base in ("alibi", "fox") else "--",
        "markerfacecolor": colour if gated else "white",
        "markeredgecolor": colour,
        "zorder": 3 if gated else 2,
    }


def lines(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How the curve of each entry's scheme is drawn; further variants of one scheme get colours of their own."""
    counts: dict[str, int] = {}
    drawn = []
    for entry in entries:
        style, number = line(entry["position"]), counts.get(entry["position"], 0)
        if number:
            colour = _VARIANT_COLOURS[(number - 1) % len(_VARIANT_COLOURS)]
            # Hollow markers stay so: they tell a scheme from the same with gates.
            face = colour if style["markerfacecolor"] != "white" else "white"
            style |= {"color": colour, "markerfacecolor": face, "markeredgecolor": colour, "linestyle": "-."}
        counts[entry["position"]] = number + 1
        drawn.append(style)
    return drawn


def ramp(count: int) -> list[Any]:
    """Colours for layers or heads, in order; distinct in grey too."""
    if count <= len(CYCLE):
        return list(CYCLE[:count])
    from matplotlib import colormaps  # noqa: PLC0415

    return [colormaps["viridis"](at / max(1, count - 1) * 0.92) for at in range(count)]


def length_axis(axes: Axes, lengths: Iterable[int], name: str = "Context length (tokens)") -> None:
    """A logarithmic axis with a tick at each measured length."""
    ticks = sorted(set(lengths))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{length:,}" for length in ticks], minor=False)
    axes.minorticks_off()
    axes.set_xlim(min(ticks) / 1.12, max(ticks) * 1.12)
    axes.set_xlabel(name)


def log_axis(axes: Axes, which: str, digits: tuple[int, ...]) -> None:
    """A logarithmic axis "x" or "y" whose ticks show plain numbers; `digits`: at which of each power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415

    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(10, subs=digits))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Figure, axes: Any, inches: float = 1.5) -> None:
    """One legend for what the panels share, under them, in as few and as even rows as fit; reference lines last."""
    named: dict[str, Any] = {}
    for ax in axes.flat:
        handles, names = ax.get_legend_handles_labels()
        named |= dict(zip(names, handles, strict=True))
    most = max(2, int(figure.get_figwidth() / inches))
    columns = -(-len(named) // -(-len(named) // most))
    names = sorted(named, key=lambda name: name in ("chance", "training length"))
    figure.legend([named[name] for name in names], names, loc="outside lower center", ncols=columns, handlelength=2.6)
