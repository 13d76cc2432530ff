"""How spread the attention is: entropy, mean distance and weight on the first key, a block of queries at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gape.analysis.tap import Attended
from gape.ops.inputs import bias_dtype
from gape.utils.validation import invalid_argument, whole

#: Weights in memory at once, over all heads; there are a few tensors of this size.
BLOCK_WEIGHTS = 2**24
#: Edges per octave of distance, at which the attention beyond it is summed.
EDGES_PER_OCTAVE = 8


def blocks(attended: Attended, block: int | None = None) -> Iterator[tuple[int, int]]:
    """Consecutive (start, stop) over the queries, `block` of them at a time or what :data:`BLOCK_WEIGHTS` allows."""
    batch, heads, n_q = attended.q.shape[:3]
    if block is None:
        block = max(1, BLOCK_WEIGHTS // (max(batch, 1) * heads * max(attended.visibility.n_k, 1)))
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
def statistics(attended: Attended, shares: Sequence[float] = (), *, block: int | None = None) -> Statistics:
    """Statistics of a layer's attention, for every scheme; memory grows with the keys, not with their square.

    `shares` of the attention, each in (0, 1), are those of `used`; the result does not depend on `block`, the queries
    at a time.

    Raises:
        ValueError: a block below 1, a share outside (0, 1), or shares where tokens did not come in index order.
    """
    if any(not 0 < share < 1 for share in shares):
        raise invalid_argument("shares", tuple(shares), "numbers between 0 and 1")
    if shares and not attended.visibility.index_order:
        raise invalid_argument("shares", tuple(shares), "none, since the tokens did not come in index order")
    parts = [_block(attended, start, stop, shares) for start, stop in blocks(attended, block)]
    if not parts:
        empty = attended.q.new_zeros(*attended.q.shape[:3], dtype=bias_dtype(attended.q.dtype))
        return Statistics(empty, empty, empty, empty.unsqueeze(-1).expand(-1, -1, -1, len(shares)))
    return Statistics(*(torch.cat(columns, dim=2) for columns in zip(*parts, strict=True)))


def _block(attended: Attended, start: int, stop: int, shares: Sequence[float]) -> Statistics:
    """All statistics of queries start … stop − 1."""
    weights = attended.weights(start, stop)
    i, j = attended.visibility.positions()
    away = i[..., start:stop, None] - j[..., None, : weights.size(-1)]
    distance = (weights * (away if away.dim() == 2 else away.unsqueeze(1))).sum(-1)
    used = weights.new_zeros(*weights.shape[:3], 0)
    if shares:
        used = _used(weights, start + attended.visibility.n_k - attended.visibility.n_q, shares)
    return Statistics(torch.special.entr(weights).sum(-1), distance, weights[..., 0].clone(), used)


def _used(weights: Tensor, own: int, shares: Sequence[float]) -> Tensor:
    """The distance beyond which each share lies, (B, Hq, q, shares); `own` is the key of the first query."""
    n_q, n_k = weights.shape[2:]
    edges = _edges(own + n_q, weights.device)
    # For every query and edge, the last key that is that far away.
    last = torch.arange(own, own + n_q, device=weights.device).unsqueeze(-1) - edges
    beyond = weights.cumsum(-1).gather(-1, last.clamp(0, n_k - 1).expand(*weights.shape[:2], -1, -1))
    # Distance 0 and all the mass come before the first edge.
    mass = torch.cat((torch.ones_like(beyond[..., :1]), beyond.masked_fill(last < 0, 0.0)), dim=-1)
    at = torch.cat((edges.new_zeros(1), edges)).to(mass.dtype)
    crossings = []
    for share in shares:
        after = (mass > share).sum(-1, keepdim=True).clamp(max=len(at) - 1)
        high, low = mass.gather(-1, after - 1), mass.gather(-1, after)
        part = ((high - share) / (high - low).clamp(min=torch.finfo(mass.dtype).tiny)).clamp(0, 1)
        crossings.append((at[after - 1] + part * (at[after] - at[after - 1])).squeeze(-1))
    return torch.stack(crossings, dim=-1)


def _edges(n_k: int, device: torch.device) -> Tensor:
    """Whole distances from 1 to n_k, evenly spaced by their logarithm; no key is as far away as the last."""
    count = EDGES_PER_OCTAVE * n_k.bit_length() + 1
    powers = {round(2 ** (step / EDGES_PER_OCTAVE)) for step in range(count)}
    return torch.tensor(sorted({power for power in powers if power < n_k} | {n_k}), device=device)
