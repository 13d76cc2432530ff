"""The six coordinates that carry −c_i·u_j·(i − j) in pieces of the working dtype: one side for queries, one for keys.

:mod:`gape.ops.split` says how they work and when there are two anchors; `docs/precision.md` has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gape.ops.problem import Problem, beside_heads
from gape.ops.rounding import UNIT, pieces, round_significand, significand_bits, straight_through

#: Queries that two anchors are near enough to, 1,024 each, for gates that learn through a half-precision backward.
ANCHORED_ROWS = 2048

#: Significands up to which a backward pass is too short for one anchor.
SHORT_BITS = 11

#: Width of the columns of one anchor and three pieces, or of two and two.
COLUMNS = 6


def query_columns(
    rate: Tensor, positions: Sequence[Tensor], scale: float, dtype: torch.dtype, bits: int, count: int = 3
) -> Tensor:
    """The query side for rate (B, Hq, Nq).

    Args:
        rate: c, in float32 or float64.
        positions: of consecutive groups of the queries, each (n,) or (B, n) and counted from the group's own anchor;
            one group, or two.
        scale: the softmax scale.
        dtype: of the columns.
        bits: significand that each piece may use.
        count: pieces of a product.

    Returns:
        (B, Hq, Nq, count · (groups + 1)) in `dtype`.
    """
    i = _wide(torch.cat(list(positions), dim=-1), dtype)
    c = rate.to(i.dtype) * (UNIT / scale)
    # A rate that float16 cannot hold saturates, consistently for every key of the query.
    limit = torch.finfo(dtype).max / 2
    c = torch.minimum(c, limit / (i.abs() / UNIT**2).clamp(min=1.0))
    c = straight_through(c, round_significand(c, bits))
    columns = [-piece for piece in pieces(c * (i / UNIT**2), bits, count)]
    if len(positions) == 1:
        columns += [c] * count
    else:
        first = torch.arange(rate.size(-1), device=rate.device) < positions[0].size(-1)
        columns += [c * first] * count + [c * ~first] * count
    return torch.stack(columns, dim=-1).to(dtype)


def key_columns(exposure: Tensor, positions: Sequence[Tensor], dtype: torch.dtype, bits: int, count: int = 3) -> Tensor:
    """The key side for exposure (B, Hk, Nk), whose `positions` are given once for every anchor.

    Returns:
        (B, Hk, Nk, count · (anchors + 1)) in `dtype`.
    """
    counted = [_wide(j, dtype) for j in positions]
    u = exposure.to(counted[0].dtype)
    u = straight_through(u, round_significand(u, bits))
    limit = torch.finfo(dtype).max / 2
    columns = [u * UNIT] * count
    for j in counted:
        columns += pieces((u * (j / UNIT)).clamp(-limit, limit), bits, count)
    return torch.stack(columns, dim=-1).to(dtype)


def learns_shortly(problem: Problem) -> bool:
    """Whether gates learn through a backward pass too short for one anchor."""
    return significand_bits(problem.q) <= SHORT_BITS and problem.gates_learn


def sides(problem: Problem, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Both sides for queries start … stop − 1 and the keys that any of them may see.

    There is one anchor, the middle query, or one for each half where gates learn shortly.

    Returns:
        (B, Hq, stop − start, columns) in q's dtype and (B, Hk, n, columns) in k's.
    """
    seen, bits = problem.seen, significand_bits(problem.q)
    middle = (start + stop) // 2
    near = learns_shortly(problem)
    groups = [(start, middle), (middle, stop)] if near and middle > start else [(start, stop)]
    count = 2 if near and seen.index_order else 3
    n_k = seen.rows(start, stop).n_k
    anchors = [seen.anchor(*group) for group in groups]
    q_positions, k_positions = seen.positions()
    i = [q_positions[..., a:b] - anchor for (a, b), anchor in zip(groups, anchors, strict=True)]
    j = [k_positions[..., :n_k] - anchor for anchor in anchors]
    return (
        query_columns(problem.rate[:, :, start:stop], i, problem.scale, problem.q.dtype, bits, count),
        key_columns(problem.exposure[:, :, :n_k], j, problem.k.dtype, bits, count),
    )


def _wide(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Positions as floats wide enough for products with numbers of `dtype`, broadcastable to (B, H, N)."""
    half = dtype in (torch.bfloat16, torch.float16)
    # Apple's GPUs have no float64.
    wide = torch.float32 if half or positions.device.type == "mps" else torch.float64
    return beside_heads(positions, wide)
