"""How figures look: one colour per scheme everywhere, told apart without colour too, the same bytes every time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {
    "nope": "NoPE", "rope": "RoPE", "p-rope": "p-RoPE", "pi": "PI", "ntk": "NTK", "yarn": "YaRN",
    "longrope": "LongRoPE", "alibi": "ALiBi", "kerple": "KERPLE", "fire": "FIRE", "t5": "T5", "fox": "FoX",
}  # fmt: skip

#: Okabe and Ito's colours, which colour-blind readers can tell apart, by base.
COLOURS = {
    "nope": "#0072B2", "rope": "#D55E00", "p-rope": "#009E73", "yarn": "#CC79A7", "alibi": "#6E6E6E", "fox": "#E69F00",
}  # fmt: skip
OTHER = "#56B4E9"
#: For series that are not schemes.
CYCLE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#6E6E6E")
MARKERS = {"nope": "o", "rope": "s", "p-rope": "^", "yarn": "D", "alibi": "v", "fox": "P"}
INK, FAINT = "#222222", "#8A8A8A"

TARGETS = {"last": "Needle close (last)", "first": "Needle far (first)", "middle": "Needle in the middle"}

_RC = {
    "figure.dpi": 100, "savefig.dpi": 200, "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 10, "axes.labelsize": 9, "legend.fontsize": 8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.grid": True, "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False, "lines.linewidth": 1.6,
    "lines.markersize": 5, "pdf.fonttype": 42, "svg.hashsalt": "gape",
}  # fmt: skip


def matplotlib() -> ModuleType:
    """The library figures are drawn with, imported when first needed.

    Raises:
        ImportError: it is missing; says how to install it.
    """
    try:
        import matplotlib as found  # noqa: PLC0415
        import matplotlib.backends.backend_agg  # noqa: PLC0415
        import matplotlib.figure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("figures need Matplotlib: pip install 'gape[plot]'") from error
    return found


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
    figure.draw_without_rendering()
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


def label(position: str, evaluated: str | None = None) -> str:
    """A scheme as the paper writes it, with what it was switched to for evaluation."""
    base = position.removesuffix("+gape")
    text = NAMES.get(base, base) + ("+GAPE" if base != position else "")
    if evaluated in (None, position):
        return text
    other = str(evaluated).removesuffix("+gape")
    return f"{text}, {NAMES.get(other, other)} at evaluation"


def line(position: str, evaluated: str | None = None) -> dict[str, Any]:
    """How a scheme's curve is drawn: colour and marker by base, solid and filled with gates."""
    base = position.removesuffix("+gape")
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


def length_axis(axes: Axes, lengths: list[int], name: str = "Context length (tokens)") -> None:
    """A logarithmic axis with a tick at each measured length."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
    axes.minorticks_off()
    axes.set_xlim(min(lengths) / 1.12, max(lengths) * 1.12)
    axes.set_xlabel(name)
