"""Figures that need no training: the paper's bounds, and what the mask does to a toy sequence.

The numbers come from :mod:`gape.theory`; S_max, Γ, g and T are round values in the range that trained models show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gape import theory
from gape.report.series import Data
from gape.report.style import CYCLE, FAINT, INK, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = 2048.0
S_MAX = 4.0
POINTS = 400


def logit_gap() -> Data:
    """Theorem 3: the least gap between own key and an unprotected one, and the least gate that makes it positive."""
    distance = torch.linspace(1, 4 * T, POINTS, dtype=torch.float64)
    gates = (2.5, 4.0, 8.0)
    bounds = {f"{g:g}": _list(theory.logit_gap_bound(distance, g / T, S_MAX)) for g in gates}
    # Own score −0.6·S_max and a key's score that swings within its bound, as a rotary one does.
    swing = S_MAX * torch.cos(distance / 97) * torch.cos(distance / 1013)
    example = gates[1] / T * distance - 0.6 * S_MAX - swing
    critical = {f"{g:g}": theory.elimination_distance(g / T, S_MAX) for g in gates}
    minima = {f"{a:g}": _list(theory.gate_to_eliminate(distance, S_MAX, a, T)) for a in (0.5, 1.0, 2.0)}
    return {
        "s_max": S_MAX, "context_length": T, "distance": _list(distance), "bounds": bounds, "critical": critical,
        "example": {"gate": f"{gates[1]:g}", "gap": _list(example)}, "least_gate": minima,
    }  # fmt: skip


def draw_logit_gap(data: Data) -> Figure:
    """(a) the gap's lower bound grows with distance; (b) the least gate that suppresses a key falls with it."""
    figure, axes = new_figure(9.0, 3.2, 1, 2)
    left, right = axes[0]
    distance = data["distance"]
    example = data["example"]
    left.plot(distance, example["gap"], color=FAINT, linewidth=0.8, label=f"one head's gap, g = {example['gate']}")
    for colour, (gate, bound) in zip(CYCLE, data["bounds"].items(), strict=False):
        left.plot(distance, bound, color=colour, label=f"lower bound, g = {gate}")
        left.plot([data["critical"][gate]], [0], "o", color=colour, markersize=6, zorder=4)
    left.axhline(0, color=INK, linewidth=0.8)
    note = "where a bound is above 0\nthe own key wins, whatever the scores"
    left.text(distance[-1] * 0.99, -1.95 * data["s_max"], note, ha="right", va="center", fontsize=7, color=INK)
    left.set_ylabel("Logit gap to the own key")
    left.set_title(r"(a) Gap to an unprotected key; dots at $\Delta_{\mathrm{crit}}$")
    left.set_ylim(-2.4 * data["s_max"], 6 * data["s_max"])
    for colour, (amplitude, least) in zip(CYCLE, data["least_gate"].items(), strict=False):
        right.plot(distance, least, color=colour, label=f"Γ = {amplitude}")
    right.set_yscale("log")
    right.set_ylim(0.8, 1000)
    right.set_ylabel("Least query gate")
    right.set_title("(b) Gate that ranks the key below the own key")
    for ax in (left, right):
        _distance_axis(ax, distance[-1], data["context_length"])
        ax.legend(loc="upper left" if ax is left else "upper right")
    return figure


def retrieval() -> Data:
    """Proposition 3 and Corollary 2: which needles can be retrieved, and the landmark that the others need."""
    gate = 4.0
    rate = gate / T
    distance = torch.linspace(0, 4 * T, POINTS, dtype=torch.float64)
    penalties = {f"{p:g}": _list(theory.retrieval_margin(distance, 0.0, rate, p)) for p in (0.0, 0.5, 0.9)}
    length = torch.linspace(1, 8 * T, POINTS, dtype=torch.float64)
    needed = {f"{depth:g}": _list(theory.required_landmark(length, depth, rate, S_MAX)) for depth in (0.0, 0.5, 0.7)}
    limits = {depth: theory.retrieval_limit(rate, S_MAX, float(depth)) for depth in needed}
    return {
        "s_max": S_MAX, "context_length": T, "gate": gate, "distance": _list(distance), "penalty": penalties,
        "elimination": theory.elimination_distance(rate, S_MAX), "length": _list(length), "required": needed,
        "limits": limits,
    }  # fmt: skip


def draw_retrieval(data: Data) -> Figure:
    """(a) the region of scores that still retrieve an unprotected key; (b) the landmark a needle needs by length."""
    figure, axes = new_figure(9.0, 3.2, 1, 2)
    left, right = axes[0]
    distance, ceiling = data["distance"], 2 * data["s_max"]
    unprotected = data["penalty"]["0"]
    reach = [min(p, ceiling) for p in unprotected]
    left.fill_between(distance, reach, ceiling, color=CYCLE[2], alpha=0.18, linewidth=0, label="retrievable at l = 0")
    left.axhline(ceiling, color=INK, linewidth=1.0, linestyle="--", label=r"largest score difference, $2\,S_{\max}$")
    for colour, (landmark, penalty) in zip(CYCLE, data["penalty"].items(), strict=False):
        left.plot(distance, penalty, color=colour, label=f"penalty at l = {landmark}")
    left.plot([data["elimination"]] * 2, [0, ceiling], color=FAINT, linewidth=1.0)
    left.text(data["elimination"], 0.1, r" $\Delta_{\mathrm{elim}}$ at l = 0", va="bottom", fontsize=8, color=INK)
    left.set_ylim(0, 2.1 * ceiling)
    left.set_ylabel("Score difference needed")
    left.set_title(f"(a) What a needle's score must overcome, g = {data['gate']:g}")
    _distance_axis(left, distance[-1], data["context_length"])
    for colour, (depth, needed) in zip(CYCLE, data["required"].items(), strict=False):
        right.plot(data["length"], needed, color=colour, label=f"depth ρ = {depth}")
        right.plot([data["limits"][depth]], [0], "o", color=colour, markersize=6, zorder=4, clip_on=False)
    right.set_ylim(0, 1.03)
    right.set_ylabel("Required landmark l*")
    right.set_title(r"(b) Landmark a needle must exceed; dots at $i_{\mathrm{fail}}$")
    _distance_axis(right, data["length"][-1], data["context_length"], "Sequence length i")
    left.legend(loc="upper left", fontsize=7)
    right.legend(loc="upper left")
    return figure


def mask_toy() -> Data:
    """M for a toy sequence of 24 tokens with two landmarks, under a weak and a strong query gate."""
    n, protected = 24, {4: 0.97, 13: 0.9}
    landmark = torch.tensor([protected.get(j, 0.03) for j in range(n)], dtype=torch.float64)
    gates = {"weak": 2.0, "strong": 8.0}
    i, j = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)[None]
    masks = {}
    for name, gate in gates.items():
        full = torch.as_tensor(theory.mask(i, j, gate / n, landmark[None]))
        masks[name] = [[float(v) if b <= a else None for b, v in enumerate(row)] for a, row in enumerate(full.tolist())]
    decay = {
        name: _list(torch.as_tensor(theory.relative_mask(n - 1.0, j[0], gate / n, landmark)))
        for name, gate in gates.items()
    }
    plain = _list(torch.as_tensor(theory.relative_mask(n - 1.0, j[0], gates["strong"] / n, 0.0)))
    return {
        "tokens": n, "landmarks": sorted(protected), "landmark": _list(landmark), "gates": gates, "masks": masks,
        "last_query": decay, "unprotected": plain,
    }  # fmt: skip


def draw_mask_toy(data: Data) -> Figure:
    """Two masks M as images, and what the last query takes off each key."""
    figure, axes = new_figure(10.2, 3.3, 1, 3, width_ratios=[1, 1, 1.25])
    top = max(v for rows in data["masks"].values() for row in rows for v in row if v is not None)
    for ax, (name, rows) in zip(axes[0], data["masks"].items(), strict=False):
        cells = [[float("nan") if v is None else v for v in row] for row in rows]
        image = ax.imshow(cells, cmap="cividis", vmin=0, vmax=top)
        for place in data["landmarks"]:
            ax.text(place + 1, place - 0.6, f"l = {data['landmark'][place]:.2g}", fontsize=7, va="center")
        ax.grid(visible=False)
        ax.set_xlabel("Key j")
        ax.set_ylabel("Query i" if name == "weak" else "")
        ax.set_title(f"M, {name} query gate, g = {data['gates'][name]:g}")
    figure.colorbar(image, ax=axes[0, 1], label="M", shrink=0.85)
    ax = axes[0, 2]
    ax.plot(data["unprotected"], color=FAINT, linestyle="--", label="no landmarks: a fixed slope")
    for colour, (name, values) in zip((CYCLE[0], CYCLE[3]), data["last_query"].items(), strict=True):
        ax.plot(values, color=colour, marker="o", markersize=3, label=f"g = {data['gates'][name]:g}")
    for place in data["landmarks"]:
        ax.axvline(place, color=CYCLE[2], linewidth=6, alpha=0.2, zorder=0)
    ax.set_xlabel("Key j (landmarks shaded)")
    ax.set_ylabel("Logits lost, −Γ·g·(1 − l)·(i − j)/T")
    ax.set_title("The last query: landmarks survive")
    ax.legend(loc="lower right", framealpha=0.9, frameon=True, edgecolor="none")
    return figure


def _distance_axis(axes: Axes, end: float, unit: float, name: str = "Distance Δ = i − j") -> None:
    ticks = [step * unit for step in range(int(end / unit) + 1)]
    if len(ticks) > 6:
        ticks = ticks[::2]
    axes.set_xticks(ticks, ["0" if not tick else "T" if tick == unit else f"{tick / unit:g}T" for tick in ticks])
    axes.set_xlim(0, end)
    axes.set_xlabel(name)


def _list(values: theory.Value) -> list[float]:
    return [float(f"{v:.6g}") for v in torch.as_tensor(values).tolist()]
