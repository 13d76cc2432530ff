"""Analyses of a language model as numbers that can be stored: entropy, gates, masks, maps and spectra.

One passage and one layer at a time: what a layer attended with is summed up while the model runs, and dropped before
the next layer begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gape.analysis.entropy import statistics
from gape.analysis.maps import attention_map, mask_map, mean_mask
from gape.analysis.passages import Passage
from gape.analysis.routing import effective_context
from gape.analysis.tap import Attended, tap
from gape.models.attention import GAPEAttention
from gape.ops.inputs import bias_dtype
from gape.positions.base import Scheme
from gape.positions.gated import Gated
from gape.positions.rotary import Rotary
from gape.utils.jsonl import Record
from gape.utils.validation import invalid_argument

#: Shares of the attention whose distance is stored, and the share that the theory's horizon may lose.
SHARES = (0.5, 0.1, 0.01)
GIVEN_UP = 0.01


def entropy(model: nn.Module, passages: Sequence[Passage]) -> Record:
    """Attention entropy, the distances it covers, and the gates, passage by passage.

    `model` is a :class:`gape.GPT` in eval mode.

    Returns:
        Lists by passage, layer and head. `entropy`, `distance` and `sink` are means over queries; `used` has the median
        over queries of the distance beyond which each of `shares` of the attention lies. `effective` is the median of
        the theory's effective context length at the share `given_up`. With gates: `gate`, `landmark` and `mask` are
        means of g, l and M, `correlation` is that of g_i with the entropy of row i over log(i + 1), and
        `amplitude` is Γ by layer and head. What a scheme lacks is None.
    """
    rows = [_by_layer(model, passage, _spread) for passage in passages]
    names = ("entropy", "distance", "sink", "used", "effective", "gate", "landmark", "mask", "correlation")
    results: Record = {"shares": list(SHARES), "given_up": GIVEN_UP}
    for name in names:
        values = [[layer[name] for layer in row] for row in rows]
        results[name] = None if values[0][0] is None else values
    results["amplitude"] = [layer["amplitude"] for layer in rows[0]] if results["gate"] is not None else None
    return results


def spectrum(model: nn.Module, passages: Sequence[Passage]) -> Record:
    """Norms by rotary pair: `inv_freq` (D/2), and of `queries` and `keys` `mean` and `std` over passages.

    Those are by layer, head and pair. A scheme that does not rotate is refused.
    """
    rows = [_by_layer(model, passage, _norms) for passage in passages]
    results: Record = {"inv_freq": rows[0][0]["inv_freq"]}
    for side in ("queries", "keys"):
        # (layers, passages, heads, pairs)
        stacked = torch.stack([torch.stack([row[layer][side] for row in rows]) for layer in range(len(rows[0]))])
        spread = stacked.std(1) if len(rows) > 1 else torch.zeros_like(stacked[:, 0])
        results[side] = {"mean": round_digits(stacked.mean(1), 5), "std": round_digits(spread, 3)}
    return results


def maps(model: nn.Module, passage: Passage, *, layer: int, size: int = 64) -> Record:
    """The attention of one layer on one passage in cells, by head; refuses a layer that there is not."""
    cells = _of_layer(model, passage, layer, lambda attended: attention_map(attended, size)[0])
    return {"layer": layer, "passage": passage.id, "length": len(passage.ids), "weights": round_digits(cells, 3)}


def masks(model: nn.Module, passage: Passage, *, layer: int, size: int = 64) -> Record:
    """The paper's M of one layer on one passage in cells, by head, and its mean over all pairs; needs gates."""

    def analyse(attended: Attended) -> Record:
        return {"masks": round_digits(mask_map(attended, size)[0], 4), "mean": round_digits(mean_mask(attended)[0])}

    about = {"layer": layer, "passage": passage.id, "length": len(passage.ids)}
    results: Record = _of_layer(model, passage, layer, analyse)
    return about | results


def round_digits(x: Tensor, digits: int = 6) -> Any:
    """A tensor as nested lists of numbers of so many significant digits; None for what JSON has no number for."""
    return _round(x.tolist(), digits)


def _round(x: Any, digits: int) -> Any:
    if isinstance(x, list):
        return [_round(value, digits) for value in x]
    return float(f"{x:.{digits}g}") if math.isfinite(x) else None


@torch.no_grad()
def _by_layer(
    model: nn.Module, passage: Passage, analyse: Callable[[Attended], Any], layer: int | None = None
) -> list[Any]:
    """The results of `analyse` for every layer, first layer first; None for others than a layer that is named."""
    results: list[Any] = []
    ids = torch.from_numpy(passage.ids).to(next(model.parameters()).device).unsqueeze(0)
    with tap(model, lambda number, attended: results.append(analyse(attended) if layer in (None, number) else None)):
        model(ids, logits_to_keep=1)
    return results


def _of_layer(model: nn.Module, passage: Passage, layer: int, analyse: Callable[[Attended], Any]) -> Any:
    layers = sum(isinstance(module, GAPEAttention) for module in model.modules())
    if not 0 <= layer < layers:
        raise invalid_argument("layer", layer, f"a number from 0 to {layers - 1}")
    return _by_layer(model, passage, analyse, layer)[layer]


def _spread(attended: Attended) -> Record:
    sums = statistics(attended, SHARES)
    effective = effective_context(attended, GIVEN_UP)
    row: Record = {
        "entropy": round_digits(sums.entropy[0].mean(-1)),
        "distance": round_digits(sums.distance[0].mean(-1)),
        "sink": round_digits(sums.sink[0].mean(-1)),
        "used": round_digits(sums.used[0].median(1).values, 4),
        "effective": None if effective is None else round_digits(effective[0].median(-1).values, 4),
    }
    gated: Record = dict.fromkeys(("gate", "landmark", "mask", "correlation", "amplitude"))
    if attended.gates is not None and attended.gate is not None and attended.landmark is not None:
        groups = attended.q.size(1) // attended.k.size(1)
        gated = {
            "gate": round_digits(attended.gate[0].mean(-1)),
            "landmark": round_digits(attended.landmark[0].mean(-1).repeat_interleave(groups)),
            "mask": round_digits(mean_mask(attended)[0]),
            "correlation": round_digits(_correlation(attended.gate[0], sums.entropy[0]), 4),
            "amplitude": round_digits(attended.gates.amplitude),
        }
    return row | gated


def _correlation(gate: Tensor, entropy: Tensor) -> Tensor:
    """Of g_i with the entropy of row i over its largest value, log(i + 1), by head; row 0 has none."""
    largest = torch.arange(2, gate.size(-1) + 1, device=gate.device).log()
    g, h = gate[:, 1:].double(), (entropy[:, 1:] / largest).double()
    g, h = g - g.mean(-1, keepdim=True), h - h.mean(-1, keepdim=True)
    return (g * h).sum(-1) / (g.square().sum(-1) * h.square().sum(-1)).sqrt()


def _norms(attended: Attended) -> Record:
    base = rotary(attended.scheme)
    if base is None:
        raise invalid_argument("attended", type(attended.scheme).__name__, "a layer whose scheme rotates")
    queries, keys = (pair_norms(x, base)[0].cpu() for x in (attended.q, attended.k))
    return {"inv_freq": round_digits(base.inv_freq), "queries": queries, "keys": keys}


def pair_norms(x: Tensor, scheme: Rotary) -> Tensor:
    """The mean norm over tokens of each pair (x_k, x_{k+D/2}) of x (B, H, N, D), rotated or not: (B, H, D/2), float32.

    The factor of schemes that scale what they rotate (YaRN, LongRoPE) is divided out. float64 stays.
    """
    first, second = x.to(bias_dtype(x.dtype)).chunk(2, dim=-1)
    return torch.hypot(first, second).mean(2) / scheme.attention_scale


def rotary(scheme: Scheme | None) -> Rotary | None:
    """The rotary scheme: a scheme itself or the base under its gates; None where nothing rotates."""
    base = scheme.base if isinstance(scheme, Gated) else scheme
    return base if isinstance(base, Rotary) else None
