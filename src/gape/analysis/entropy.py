"""How spread the attention is: entropy, mean distance and weight on the first key.

:func:`statistics` reads tiles of queries and keys, so its memory does not grow with the length. It carries a running
maximum, a running sum of exponentials and a running sum of −p·log p from tile to tile, rescaled when the maximum rises.
Other sums over keys are carried likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gape.analysis.tap import Attended
from gape.ops import reference
from gape.ops.inputs import Visibility, bias_dtype
from gape.positions.fox import FoX
from gape.utils.validation import invalid_argument, whole

#: Weights in memory at once, over all heads; there are a few tensors of this size.
BLOCK_WEIGHTS = 2**24
#: Weights of a tile over all heads; there are about ten tensors of this size.
TILE_WEIGHTS = 2**22
QUERIES = 512
#: Edges per octave of distance, at which the attention beyond it is summed.
EDGES_PER_OCTAVE = 8


def blocks(attended: Attended, block: int | None = None) -> Iterator[tuple[int, int]]:
    """Consecutive (start, stop) over the queries, `block` of them at a time or what :data:`BLOCK_WEIGHTS` allows."""
    batch, heads, n_q = attended.q.shape[:3]
    if block is None:
        block = max(1, BLOCK_WEIGHTS // (batch * heads * attended.visibility.n_k))
    for start in range(0, n_q, whole("block", block)):
        yield start, min(start + block, n_q)


class Statistics(NamedTuple):
    """Numbers of every query's attention distribution, each (B, Hq, Nq) in float32 (float64 beside float64).

    Attributes:
        entropy: −Σ_j α_ij log α_ij, in nats; 0 for a row that sees nothing.
        distance: Σ_j α_ij · (i − j), by position.
        sink: the weight on the first key of the tensor.
        used: (B, Hq, Nq, P): the distance beyond which a share p of the attention lies, for each of `shares`, exact to
            the spacing of the edges (a tenth of the distance) and interpolated between them.
    """

    entropy: Tensor
    distance: Tensor
    sink: Tensor
    used: Tensor


@torch.no_grad()
def statistics(
    attended: Attended, shares: Sequence[float] = (), *, query_block: int = QUERIES, key_block: int | None = None
) -> Statistics:
    """Statistics of a layer's attention in tiles of queries and keys, for every scheme.

    Args:
        attended: what a layer attended with; see :func:`gape.analysis.attended`.
        shares: attention that may lie further away than `used`, each in (0, 1).
        query_block: queries of a tile.
        key_block: keys of a tile; None means as many as make 2²² weights over all heads. Neither changes the result
            beyond rounding.

    Raises:
        ValueError: a block below 1, a share outside (0, 1), or shares where tokens did not come in index order.
    """
    if any(not 0 < share < 1 for share in shares):
        raise invalid_argument("shares", tuple(shares), "numbers between 0 and 1")
    if shares and not attended.visibility.index_order:
        raise invalid_argument("shares", tuple(shares), "none, since the tokens did not come in index order")
    batch, heads, n_q = attended.q.shape[:3]
    query_block = min(whole("query_block", query_block), max(n_q, 1))
    if key_block is None:
        key_block = max(1, TILE_WEIGHTS // (max(batch, 1) * heads * query_block))
    edges = _edges(attended.visibility.n_k, attended.q.device) if shares else None
    parts = [
        _block(attended, start, min(start + query_block, n_q), whole("key_block", key_block), edges, shares)
        for start in range(0, n_q, query_block)
    ]
    if not parts:
        empty = attended.q.new_zeros(batch, heads, 0, dtype=bias_dtype(attended.q.dtype))
        return Statistics(empty, empty, empty, empty.unsqueeze(-1).expand(-1, -1, -1, len(shares)))
    return Statistics(*(torch.cat(columns, dim=2) for columns in zip(*parts, strict=True)))


@dataclass(frozen=True, kw_only=True)
class _Tile:
    """Logits of some queries and some keys.

    Attributes:
        logits: (B, Hq, q, k), −∞ where a pair is not seen.
        away: i − j, (q, k) or (B, 1, q, k), in the dtype of the logits.
        first: index of the first of these keys.
        last_visible: (q,) index of each query among all keys.
    """

    logits: Tensor
    away: Tensor
    first: int
    last_visible: Tensor


#: A sum over the keys of a tile of weights that are not normalised yet: (B, Hq, q) or (B, Hq, q, C).
_Measure = Callable[[Tensor, _Tile], Tensor]


def _block(
    attended: Attended, start: int, stop: int, key_block: int, edges: Tensor | None, shares: Sequence[float]
) -> Statistics:
    """All statistics of queries start … stop − 1."""
    measures: dict[str, _Measure] = {"distance": _distance, "sink": _sink}
    if edges is not None:
        measures["beyond"] = _beyond(edges)
    rows = _Rows(measures)
    for tile in _tiles(attended, start, stop, key_block):
        rows.add(tile)
    sums = rows.normalise()
    used = sums["distance"].new_zeros(*sums["distance"].shape, 0)
    if edges is not None:
        used = _crossings(sums["beyond"], edges, shares)
    return Statistics(rows.entropy(), sums["distance"], sums["sink"], used)


class _Rows:
    """Running sums of a block of queries, relative to the running maximum of its logits."""

    def __init__(self, measures: dict[str, _Measure]) -> None:
        self._measures = measures
        self._top: Tensor | None = None
        self._sums: dict[str, Tensor] = {}

    def add(self, tile: _Tile) -> None:
        highest = tile.logits.amax(-1)
        # Finite, so that a row that sees nothing yet takes part without a NaN.
        lowest = torch.full_like(highest, -1e30)
        before = lowest if self._top is None else self._top
        top = torch.maximum(before, highest)
        weights = (tile.logits - top.unsqueeze(-1)).exp()
        new = {"total": weights.sum(-1), "entropy": torch.special.entr(weights).sum(-1)}
        new |= {name: measure(weights, tile) for name, measure in self._measures.items()}
        if self._top is not None:
            shift = before - top
            factor = shift.exp()
            # −w·log w of every weight so far, now that each is smaller by the factor.
            self._sums["entropy"] = self._sums["entropy"] - shift * self._sums["total"]
            for name, value in new.items():
                new[name] = value + self._sums[name] * (factor if value.dim() == 3 else factor.unsqueeze(-1))
        self._top, self._sums = top, new

    def normalise(self) -> dict[str, Tensor]:
        """What the measures sum up to under the finished softmax."""
        total = self._sums["total"].clamp(min=torch.finfo(self._sums["total"].dtype).tiny)
        return {
            name: self._sums[name] / (total if self._sums[name].dim() == 3 else total.unsqueeze(-1))
            for name in self._measures
        }

    def entropy(self) -> Tensor:
        """The Shannon entropy of every row."""
        total = self._sums["total"]
        visible = total > 0
        safe = total.where(visible, 1.0)
        return torch.where(visible, safe.log() + self._sums["entropy"] / safe, 0.0)


def _tiles(attended: Attended, start: int, stop: int, key_block: int) -> Iterator[_Tile]:
    """The tiles of queries start … stop − 1, first keys first, without those that causality hides from all."""
    problem = attended.problem(start, stop)
    i, j = problem.visibility.positions()
    last_visible = torch.arange(start, stop, device=i.device) + attended.visibility.n_k - attended.visibility.n_q
    for first in range(0, problem.visibility.n_k, key_block):
        last = min(first + key_block, problem.visibility.n_k)
        visibility = _tile_visibility(problem.visibility, first, last)
        part = replace(
            problem,
            k=problem.k[:, :, first:last],
            v=problem.v[:, :, first:last],
            landmark=problem.landmark[:, :, first:last],
            visibility=visibility,
        )
        logits = reference.logits(part)
        bias = _bias(attended, visibility, start, stop, first, last)
        if bias is not None:
            logits = logits + bias
        mask = visibility.mask()
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        away = (i.unsqueeze(-1) - j[..., first:last].unsqueeze(-2)).to(logits.dtype)
        yield _Tile(
            logits=logits, away=away if away.dim() == 2 else away.unsqueeze(1), first=first, last_visible=last_visible
        )


def _tile_visibility(rows: Visibility, first: int, last: int) -> Visibility:
    """The same queries and keys first … last − 1 only, with positions written out."""
    i, j = rows.positions()
    # In index order the keys before the first query are seen by all of them, and need no mask.
    whole_tile = rows.index_order and last <= rows.n_k - rows.n_q + 1
    mask = rows.attn_mask
    return replace(
        rows,
        n_k=last - first,
        q_positions=i,
        k_positions=j[..., first:last],
        k_documents=None if rows.k_documents is None else rows.k_documents[:, first:last],
        attn_mask=mask if mask is None or mask.size(-1) == 1 else mask[..., first:last],
        is_causal=rows.is_causal and not whole_tile,
    )


def _bias(attended: Attended, visibility: Visibility, start: int, stop: int, first: int, last: int) -> Tensor | None:
    """What the scheme adds to the logits of a tile besides the gates."""
    if isinstance(attended.scheme, FoX) and attended.k_side is not None:
        offset = attended.visibility.n_k - attended.visibility.n_q
        own = attended.k_side[..., offset + start : offset + stop].unsqueeze(-1)
        # The difference before it is rounded: both sums are large, and what lies between nearby tokens is small.
        return (own - attended.k_side[..., first:last].unsqueeze(-2)).to(bias_dtype(attended.q.dtype))
    return None if attended.scheme is None else attended.scheme.bias(*visibility.positions())


def _distance(weights: Tensor, tile: _Tile) -> Tensor:
    return (weights * tile.away).sum(-1)


def _sink(weights: Tensor, tile: _Tile) -> Tensor:
    return weights[..., 0].clone() if tile.first == 0 else torch.zeros_like(weights[..., 0])


def _beyond(edges: Tensor) -> _Measure:
    """The weight on keys at each edge's distance or further, (B, Hq, q, edges)."""

    def measure(weights: Tensor, tile: _Tile) -> Tensor:
        running = weights.cumsum(-1)
        # For every query and edge, the last key that is that far away.
        last = (tile.last_visible.unsqueeze(-1) - edges - tile.first).clamp(max=weights.size(-1) - 1)
        taken = running.gather(-1, last.clamp(min=0).expand(*weights.shape[:2], -1, -1))
        return taken.masked_fill(last < 0, 0.0)

    return measure


def _edges(n_k: int, device: torch.device) -> Tensor:
    """Whole distances from 1 to n_k, evenly spaced by their logarithm; no key is as far away as the last."""
    count = EDGES_PER_OCTAVE * max(1, n_k).bit_length() + 1
    powers = {round(2 ** (step / EDGES_PER_OCTAVE)) for step in range(count)}
    return torch.tensor(sorted({power for power in powers if power < n_k} | {n_k}), device=device)


def _crossings(beyond: Tensor, edges: Tensor, shares: Sequence[float]) -> Tensor:
    """The distance at which the mass beyond it falls to each share, (B, Hq, q, shares)."""
    # Distance 0 and all the mass come before the first edge.
    mass = torch.cat((torch.ones_like(beyond[..., :1]), beyond), dim=-1)
    at = torch.cat((edges.new_zeros(1), edges)).to(mass.dtype)
    crossings = []
    for share in shares:
        after = (mass > share).sum(-1, keepdim=True).clamp(max=len(at) - 1)
        high, low = mass.gather(-1, after - 1), mass.gather(-1, after)
        part = ((high - share) / (high - low).clamp(min=torch.finfo(mass.dtype).tiny)).clamp(0, 1)
        crossings.append((at[after - 1] + part * (at[after] - at[after - 1])).squeeze(-1))
    return torch.stack(crossings, dim=-1)
