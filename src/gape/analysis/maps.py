"""Attention maps and the paper's mask M, as small grids of cells and sums over pairs."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gape.analysis.entropy import blocks
from gape.analysis.tap import Attended
from gape.utils.validation import invalid_argument, whole


@torch.no_grad()
def attention_map(attended: Attended, size: int = 64, block: int | None = None) -> Tensor:
    """A layer's attention by cells of queries and keys, (B, Hq, size, size), or all of it where size exceeds it.

    Queries and keys are cut into `size` nearly equal spans. A cell is the weight that a query of its row gives to
    all keys of its column together, averaged over the row's queries: every row sums to 1. The result does not depend on
    `block`, the queries at a time.

    Raises:
        ValueError: size or block below 1.
    """
    n_q, n_k = attended.visibility.n_q, attended.visibility.n_k
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


@torch.no_grad()
def mean_mask(attended: Attended) -> Tensor:
    """The mean of M over the pairs j ≤ i, (B, Hq) in float64; needs gates and tokens in index order."""
    total, pairs = _cells(attended, 1, 1)
    return (total / pairs)[..., 0, 0]


@torch.no_grad()
def mask_map(attended: Attended, size: int = 64) -> Tensor:
    """M by cells of queries and keys, (B, Hq, rows, columns) in float64, NaN where no key of a cell is seen.

    Cells are those of :func:`attention_map`; each is the mean of M over its pairs with j ≤ i.

    Raises:
        ValueError: size below 1, a layer without gates, or tokens out of index order.
    """
    size = whole("size", size)
    total, pairs = _cells(attended, min(size, attended.visibility.n_q), min(size, attended.visibility.n_k))
    return torch.where(pairs > 0, total / pairs.clamp(min=1), torch.nan)


def _cells(attended: Attended, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Sums of M and numbers of pairs by cell: (B, Hq, rows, columns) and (rows, columns), float64."""
    landmark, rate = attended.landmark, attended.rate
    if landmark is None or rate is None or not attended.visibility.index_order:
        expected = "a layer with gates whose tokens came in order"
        raise invalid_argument("attended", type(attended.scheme).__name__, expected)
    n_q, n_k, device = attended.visibility.n_q, attended.visibility.n_k, attended.q.device
    i = torch.arange(n_k - n_q, n_k, device=device)
    j = torch.arange(n_k, dtype=torch.float64, device=device)
    landmark = landmark.double().repeat_interleave(attended.q.size(1) // attended.k.size(1), dim=1)
    # Sums over the keys before each place, (B, H, N + 1).
    before, protected = (F.pad(x.cumsum(-1), (1, 0)) for x in (j * (1 - landmark), landmark))
    starts = torch.arange(columns, device=device) * n_k // columns
    stops = torch.arange(1, columns + 1, device=device) * n_k // columns
    sums, counts = [], []
    for row in range(rows):
        chosen = slice(row * n_q // rows, (row + 1) * n_q // rows)
        # A query sees the keys up to its own: where a cell ends for it.
        ends = torch.minimum(stops, i[chosen, None] + 1).clamp(min=starts)
        inside = (ends - starts).double()
        first = before[..., ends] - before[..., starts].unsqueeze(-2)
        second = protected[..., ends] - protected[..., starts].unsqueeze(-2)
        masks = rate.double()[:, :, chosen, None] * (first + i[chosen, None] * second)
        sums.append(masks.sum(2))
        counts.append(inside.sum(0))
    return torch.stack(sums, dim=2), torch.stack(counts)
