"""How spread the attention is: entropy, mean distance and weight on the first key, a block of queries at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gape.analysis.tap import Attended
from gape.utils.validation import whole

#: Weights held at once, over all heads; a few tensors of this size exist beside one another.
BLOCK_WEIGHTS = 2**24


class Statistics(NamedTuple):
    """Numbers of every query's attention distribution, each (B, Hq, Nq) in float32 (float64 beside float64).

    Attributes:
        entropy: −Σ_j α_ij log α_ij, in nats; 0 for a row that sees nothing.
        distance: Σ_j α_ij · (i − j), by position.
        sink: the weight on the first key of the tensor.
    """

    entropy: Tensor
    distance: Tensor
    sink: Tensor


@torch.no_grad()
def statistics(attended: Attended, block: int | None = None) -> Statistics:
    """Statistics of a layer's attention without its N × N weights.

    Args:
        attended: what a layer did; see :func:`gape.analysis.attended`.
        block: queries at a time; None means as many as make 2²⁴ weights over all heads. The result does not
            depend on it.

    Raises:
        ValueError: block below 1.
    """
    i, j = attended.seen.positions()
    parts = []
    for start, stop in blocks(attended, block):
        weights = attended.weights(start, stop)
        away = i[..., start:stop].unsqueeze(-1) - j[..., : weights.size(-1)].unsqueeze(-2)
        away = (away if away.dim() == 2 else away.unsqueeze(1)).to(weights.dtype)
        parts.append((torch.special.entr(weights).sum(-1), (weights * away).sum(-1), weights[..., 0]))
    return Statistics(*(torch.cat(columns, dim=-1) for columns in zip(*parts, strict=True)))


def blocks(attended: Attended, block: int | None = None) -> Iterator[tuple[int, int]]:
    """Consecutive (start, stop) over the queries, `block` of them at a time or what :data:`BLOCK_WEIGHTS` allows."""
    batch, heads, n_q = attended.q.shape[:3]
    if block is None:
        block = max(1, BLOCK_WEIGHTS // (batch * heads * attended.seen.n_k))
    for start in range(0, n_q, whole("block", block)):
        yield start, min(start + block, n_q)
