"""Attention maps small enough to print: cells that hold the mean over their queries of the weight on their keys."""

from __future__ import annotations

import torch
from torch import Tensor

from gape.analysis.entropy import blocks
from gape.analysis.tap import Attended
from gape.utils.validation import whole


@torch.no_grad()
def attention_map(attended: Attended, size: int = 64, block: int | None = None) -> Tensor:
    """A layer's attention by cells of queries and keys, (B, Hq, size, size), or all of it where size exceeds it.

    Queries and keys are cut into `size` nearly equal spans. A cell is the weight that a query of its row gives to
    all keys of its column together, averaged over the row's queries: every row sums to 1.

    Args:
        attended: what a layer did; see :func:`gape.analysis.attended`.
        size: cells along each side, at least 1.
        block: queries at a time; the result does not depend on it.

    Raises:
        ValueError: size or block below 1.
    """
    n_q, n_k = attended.seen.n_q, attended.seen.n_k
    rows, columns = min(whole("size", size), n_q), min(size, n_k)
    device = attended.q.device
    row = torch.arange(n_q, device=device) * rows // n_q
    column = torch.arange(n_k, device=device) * columns // n_k
    total = None
    for start, stop in blocks(attended, block):
        weights = attended.weights(start, stop)
        cells = weights.new_zeros(*weights.shape[:3], columns).index_add_(3, column[: weights.size(-1)], weights)
        if total is None:
            total = weights.new_zeros(*weights.shape[:2], rows, columns)
        total.index_add_(2, row[start:stop], cells)
    if total is None:
        return attended.q.new_zeros(*attended.q.shape[:2], 0, columns)
    return total / torch.bincount(row, minlength=rows).unsqueeze(-1)
